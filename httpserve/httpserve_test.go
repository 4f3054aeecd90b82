package httpserve_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/lab/eventually"
)

const (
	v4, v6 = "127.0.0.1:0", "[::1]:0" // two sources
	short  = 50 * time.Millisecond
	long   = 8 * time.Second // a header that is there is read in it, on a busy machine too
	get    = "GET / HTTP/1.1\r\nHost: a\r\n"
	post   = "POST / HTTP/1.1\r\nHost: a\r\n"
)

// patient has limits that no test reaches.
func patient() httpserve.Limits {
	return httpserve.Limits{
		Listener: "test", Connections: 100, Source: 100, HeaderBytes: 4 << 10, BodyBytes: 1 << 10,
		Header: time.Hour, Request: time.Hour, Answer: time.Hour, Idle: time.Hour,
	}
}

// rig is a Pool with a server for each source.
type rig struct {
	*testing.T
	at map[string]string // the address of a server

	mu   sync.Mutex
	told map[string]int
}

func newRig(t *testing.T, l httpserve.Limits, h http.HandlerFunc) *rig {
	r := &rig{T: t, at: map[string]string{}, told: map[string]int{}}
	pool := httpserve.New(l, func(listener, reason string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.told[listener+" "+reason]++
	})
	for _, source := range []string{v4, v6} {
		l, err := net.Listen("tcp", source)
		if err != nil {
			t.Fatal(err)
		}
		s := pool.Server(h, slog.New(slog.DiscardHandler))
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() {
			if err := errors.Join(s.Close(), <-done); !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
		})
		r.at[source] = l.Addr().String()
	}
	return r
}

// client connects and sends.
func (r *rig) client(source, text string) net.Conn {
	r.Helper()
	c, err := net.Dial("tcp", r.at[source])
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, text); err != nil {
		r.Fatal(err)
	}
	return c
}

// probed fails unless a new client of a source is answered.
func (r *rig) probed(source string) {
	r.Helper()
	if got := status(r.T, r.client(source, get+"Connection: close\r\n\r\n")); got != http.StatusOK {
		r.Errorf("a new client of %s gets %d", source, got)
	}
}

func (r *rig) tells(want map[string]int) {
	r.Helper()
	eventually.Nil(r, "the reasons are told", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !maps.Equal(r.told, want) {
			return fmt.Errorf("%v, want %v", r.told, want)
		}
		return nil
	})
}

// TestPace: a flood closes no more connections than its pace allows.
func TestPace(t *testing.T) {
	const flood = 30
	l := patient()
	l.Source, l.Pace = 1, short/10
	r, begin := newRig(t, l, func(http.ResponseWriter, *http.Request) {}), time.Now()
	for range flood {
		r.client(v4, get)
	}
	r.tells(map[string]int{"test source": flood - 1})
	if least := (flood - 2) * l.Pace; time.Since(begin) < least {
		t.Errorf("%d connections were closed after %s, before %s", flood-1, time.Since(begin), least)
	}
}

// status is that of the answer; 0: the connection ends without one.
func status(t *testing.T, c net.Conn) int {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	_ = response.Body.Close()
	return response.StatusCode
}

// closed waits until the server has closed a connection.
func closed(t *testing.T, c net.Conn) {
	t.Helper()
	ended := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, c) // EOF or a reset
		ended <- n
	}()
	eventually.Receive(t, "the connection is closed", ended)
}

func ok(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }

// TestRequests: each part of a request has its limit, and what is not wanted is not waited for.
func TestRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit  func(*httpserve.Limits)
		send   string
		status int
		reason string
	}{
		"nothing": {limit: func(l *httpserve.Limits) { l.Header = short }, reason: httpserve.Slow},
		"a header without end": {
			limit: func(l *httpserve.Limits) { l.Header = short }, send: get, reason: httpserve.Slow,
		},
		"a header that is too large": {
			send: get + "A: " + strings.Repeat("a", 10<<10) + "\r\n\r\n", status: 431, reason: httpserve.Malformed,
		},
		"no HTTP": {send: "\x16\x03\x01 \r\n\r\n", status: 400, reason: httpserve.Malformed},
		"a body of a GET": {
			send: get + "Content-Length: 10\r\n\r\n", status: 200, reason: httpserve.Body,
		},
		"a large body of a GET": {
			send: get + "Content-Length: 1000000\r\n\r\n", status: 200, reason: httpserve.Body,
		},
		"a body of a GET in chunks": {
			send: get + "Transfer-Encoding: chunked\r\n\r\n", status: 200, reason: httpserve.Body,
		},
		"a body where none is read": {
			limit: func(l *httpserve.Limits) { l.BodyBytes = 0 }, send: post + "Content-Length: 10\r\n\r\n",
			status: 200, reason: httpserve.Body,
		},
		"a body that does not come": {
			limit: func(l *httpserve.Limits) { l.Request = long }, send: post + "Content-Length: 10\r\n\r\n",
			status: 400, reason: httpserve.Slow,
		},
		"a body that is too large": {
			send: post + "Content-Length: 2000\r\n\r\n" + strings.Repeat("a", 2000), status: 413, reason: httpserve.Body,
		},
		"nothing after a request": {
			limit: func(l *httpserve.Limits) { l.Idle = short }, send: get + "\r\n", status: 200,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := patient()
			if c.limit != nil {
				c.limit(&l)
			}
			r := newRig(t, l, ok)
			client := r.client(v4, c.send)
			if got := status(t, client); got != c.status {
				t.Errorf("status %d, want %d", got, c.status)
			}
			closed(t, client)
			want := map[string]int{}
			if c.reason != "" {
				want["test "+c.reason] = 1
			}
			r.tells(want)
		})
	}
}

// TestDrip: a client that goes on sending a header gets no more time for it.
func TestDrip(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Header = short
	r := newRig(t, l, ok)
	c := r.client(v4, get+"A: ")
	eventually.True(t, "the connection is closed", func() bool {
		_, err := io.WriteString(c, "a")
		return err != nil
	})
	r.tells(map[string]int{"test slow": 1})
}

// TestAnswer_notTaken: a client that does not read its answer gives up its place, and frees the handler.
func TestAnswer_notTaken(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Answer = short
	freed := make(chan error, 1)
	r := newRig(t, l, func(w http.ResponseWriter, _ *http.Request) {
		var err error
		for block := make([]byte, 1<<20); err == nil; {
			_, err = w.Write(block)
		}
		freed <- err
	})
	r.client(v4, get+"\r\n")
	if err := eventually.Receive(t, "the handler is freed", freed); err == nil {
		t.Error("the answer has no end")
	}
	r.tells(map[string]int{"test slow": 1})
}

// TestAnswer_takesLong: the time for a request is not that for its answer.
func TestAnswer_takesLong(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Header, l.Request = short, short
	r := newRig(t, l, func(w http.ResponseWriter, q *http.Request) {
		waited := time.NewTimer(4 * short)
		defer waited.Stop()
		select {
		case <-q.Context().Done():
			http.Error(w, "cancelled", http.StatusServiceUnavailable)
		case <-waited.C:
		}
	})
	for _, request := range []string{get + "\r\n", post + "Content-Length: 1\r\n\r\na"} {
		if _, got := r.inTime(request); got != http.StatusOK {
			t.Errorf("%q: status %d", request, got)
		}
	}
}

// inTime sends a request again and again until the server has read it in its short time.
func (r *rig) inTime(request string) (c net.Conn, code int) {
	r.Helper()
	eventually.True(r, "a request is read", func() bool {
		c = r.client(v4, request)
		code = status(r.T, c)
		return code != 0
	})
	return c, code
}

// TestSecondHeader: the header of a later request has no more time than that of the first.
func TestSecondHeader(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Header = short
	r := newRig(t, l, ok)
	c, _ := r.inTime(get + "\r\n")
	_, _ = io.WriteString(c, get)
	closed(t, c)
}

// TestBody: what is sent is what a handler reads.
func TestBody(t *testing.T) {
	t.Parallel()
	body := make(chan string, 1)
	r := newRig(t, patient(), func(_ http.ResponseWriter, q *http.Request) {
		text, _ := io.ReadAll(q.Body)
		body <- string(text)
	})
	if got := status(t, r.client(v4, post+"Content-Length: 3\r\n\r\nabc")); got != http.StatusOK || <-body != "abc" {
		t.Error(got)
	}
	r.tells(map[string]int{})
}

// TestSource: a source beyond its share loses the connection that has been quiet for the longest time.
func TestSource(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Source = 3
	r := newRig(t, l, ok)
	other := r.client(v6, get)
	asks := func(c net.Conn) net.Conn { // the answer says that the server has read what was sent
		if _, err := io.WriteString(c, get+"\r\n"); err != nil {
			t.Fatal(err)
		}
		if got := status(t, c); got != http.StatusOK {
			t.Fatal(got)
		}
		return c
	}
	used, first, second := asks(r.client(v4, "")), asks(r.client(v4, "")), asks(r.client(v4, ""))
	asks(used)
	r.client(v4, "")
	closed(t, first)
	r.probed(v4)
	closed(t, second)
	r.probed(v6)
	for c, rest := range map[net.Conn]string{used: get + "\r\n", other: "\r\n"} {
		_, _ = io.WriteString(c, rest)
		if got := status(t, c); got != http.StatusOK {
			t.Error("a connection that has a place gets", got)
		}
	}
	r.tells(map[string]int{"test source": 2})
}

// TestTotal: if all places are taken, the source that has most of them gives one.
func TestTotal(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Connections = 10
	r := newRig(t, l, ok)
	used := func(source string) net.Conn {
		c := r.client(source, get+"\r\n")
		if got := status(t, c); got != http.StatusOK {
			t.Errorf("a new client of %s gets %d", source, got)
		}
		return c
	}
	clients := map[string][]net.Conn{}
	for _, source := range strings.Fields(strings.Repeat(v4+" ", 7) + strings.Repeat(v6+" ", 6)) {
		clients[source] = append(clients[source], used(source))
	}
	for source, want := range map[string]int{v4: 2, v6: 1} { // of 7 and 6, when 5 and 5 have a place
		gone := 0
		for _, c := range clients[source] {
			_, _ = io.WriteString(c, get+"\r\n")
			if status(t, c) == 0 {
				gone++
			}
		}
		if gone != want {
			t.Errorf("%d clients of %s lose their connection, want %d", gone, source, want)
		}
	}
	r.tells(map[string]int{"test total": 3})
}

// TestBusy: connections whose answers are being made stay, so that there are never more handlers than places.
func TestBusy(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Source = 4
	entered, leave := make(chan bool, 10), make(chan struct{})
	r := newRig(t, l, func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/long" {
			entered <- true
			<-leave
		}
		ok(w, q)
	})
	var long []net.Conn
	for range l.Source {
		long = append(long, r.client(v4, strings.Replace(get, "/", "/long", 1)+"Connection: close\r\n\r\n"))
		eventually.Receive(t, "the handler is called", entered)
	}
	for range 3 {
		c, err := net.Dial("tcp", r.at[v4])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		closed(t, c)
	}
	r.probed(v6)
	close(leave)
	for _, c := range long {
		if got := status(t, c); got != http.StatusOK {
			t.Errorf("status %d", got)
		}
		closed(t, c)
	}
	r.probed(v4)
	r.tells(map[string]int{"test busy": 3})
}

// TestSlowClients: whatever 300 clients of one address do, new ones of each address are answered, and no more of the
// 300 are held than a source may have.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	const clients = 300
	for name, send := range map[string]string{
		"nothing": "", "header": get, "body": get + "Content-Length: 1000000\r\n\r\n", "idle": get + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := patient()
			l.Connections, l.Source = 40, 20
			r := newRig(t, l, ok)
			ended := make(chan bool, clients)
			for range clients {
				c := r.client(v4, send)
				go func() {
					_, _ = io.Copy(io.Discard, c)
					ended <- true
				}()
			}
			r.probed(v6)
			r.probed(v4)
			for range clients - l.Source {
				eventually.Receive(t, "clients lose their connections", ended)
			}
		})
	}
}

// TestSlowReaders: clients that do not take their answers hold no more handlers than a source may have connections.
func TestSlowReaders(t *testing.T) {
	t.Parallel()
	l := patient()
	l.Source = 20
	var handlers atomic.Int32
	large := make([]byte, 32<<20) // one for all: 100 would be 3 GB
	r := newRig(t, l, func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/large" {
			handlers.Add(1)
			defer handlers.Add(-1)
			_, _ = w.Write(large)
		}
	})
	for range 100 {
		r.client(v4, strings.Replace(get, "/", "/large", 1)+"\r\n")
	}
	r.probed(v6)
	r.probed(v4)
	eventually.True(t, "handlers are freed", func() bool { return handlers.Load() <= int32(l.Source) })
}
