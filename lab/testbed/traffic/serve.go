package traffic

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// port is a port that is served.
type port struct {
	Server
	number  uint16
	limiter *limiter      // nil: no limit
	answers answers       // of HTTP
	workers chan struct{} // has one for each request that is served; nil: any number
	socket  net.Listener

	connections, answered atomic.Int64
}

func (c *Served) add(p *port) {
	c.Connections += p.connections.Load()
	c.Answered += p.answered.Load()
}

// listen opens all ports, and serves them.
func (s Server) listen() (ports []*port, err error) {
	serve := map[Protocol]func(*port){HTTP: (*port).http, Bulk: (*port).bulk}[cmp.Or(s.Protocol, HTTP)]
	if serve == nil {
		return nil, fmt.Errorf("there is no protocol %q", s.Protocol)
	}
	if err := raiseBacklog(); err != nil {
		return nil, err
	}
	answers := newAnswers(s.Bytes)
	for _, number := range s.Ports {
		p := &port{Server: s, number: number, answers: answers, limiter: newLimiter(s.Limit)}
		if s.Workers > 0 {
			p.workers = make(chan struct{}, s.Workers)
		}
		if p.socket, err = listenTCP(number); err != nil {
			return nil, errors.Join(err, shut(ports))
		}
		ports = append(ports, p)
	}
	for _, p := range ports {
		go serve(p)
	}
	return ports, nil
}

// shut closes ports, so that no connection comes any more.
func shut(ports []*port) (err error) {
	for _, p := range ports {
		if closed := p.socket.Close(); !errors.Is(closed, net.ErrClosed) {
			err = errors.Join(err, closed)
		}
	}
	return err
}

// raiseBacklog lets as many connections wait in this place as clients may make at once. The runtime looks at it when
// it listens for the first time.
func raiseBacklog() error {
	for _, setting := range []string{"core/somaxconn", "ipv4/tcp_max_syn_backlog"} {
		err := os.WriteFile("/proc/sys/net/"+setting, []byte("65535"), 0)
		if err != nil && !errors.Is(err, unix.EROFS) && !errors.Is(err, os.ErrPermission) { // then it stays as it is
			return err
		}
	}
	return nil
}

func listenTCP(port uint16) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // no backend of the studies has it
	c.KeepAlive = -1         // one system call less for each connection
	return c.Listen(context.Background(), "tcp", fmt.Sprintf(":%d", port))
}

// accept takes connections until the port is shut.
func (p *port) accept(serve func(*net.TCPConn)) {
	for {
		c, err := p.socket.Accept()
		switch {
		case err == nil:
			p.connections.Add(1)
			go serve(c.(*net.TCPConn))
		case errors.Is(err, net.ErrClosed):
			return
		default: // too many open files
			time.Sleep(time.Millisecond)
		}
	}
}

// bufferBytes is what of a message is read at once.
const bufferBytes = 1 << 10

func (p *port) http() {
	buffers := sync.Pool{New: func() any { return bufio.NewReaderSize(nil, bufferBytes) }}
	p.accept(func(c *net.TCPConn) {
		defer c.Close()
		in := buffers.Get().(*bufio.Reader)
		defer buffers.Put(in)
		for in.Reset(c); p.answer(c, in); {
		}
	})
}

// answer answers a request, and reports whether there can be another one.
func (p *port) answer(c *net.TCPConn, in *bufio.Reader) bool {
	request, err := http.ReadRequest(in)
	if err != nil {
		return false // the client has gone, or is none
	}
	if _, err := io.Copy(io.Discard, request.Body); err != nil {
		return false
	}
	if p.workers != nil {
		p.workers <- struct{}{}
		defer func() { <-p.workers }()
	}
	wait, admitted := p.limiter.admit(time.Now())
	if wait += p.Delay; admitted && wait > 0 {
		time.Sleep(wait)
	}
	var one int64
	if admitted {
		one = 1
	}
	p.answered.Add(one) // before the client knows, who may compare
	if _, err := c.Write(p.answers[[2]bool{admitted, request.Close}]); err != nil {
		p.answered.Add(-one)
		return false
	}
	return !request.Close
}

// answers are written once: by whether the request is admitted, and whether it is the connection's last.
type answers map[[2]bool][]byte

func newAnswers(bytes int) answers {
	a := answers{}
	for last, connection := range map[bool]string{false: "keep-alive", true: "close"} {
		for admitted, status := range map[bool]int{false: http.StatusServiceUnavailable, true: http.StatusOK} {
			body := ""
			if admitted {
				body = strings.Repeat("x", bytes)
			}
			a[[2]bool{admitted, last}] = fmt.Appendf(nil,
				"HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n%s",
				status, http.StatusText(status), len(body), connection, body)
		}
	}
	return a
}

// limiter is the leaky bucket of a backend.
type limiter struct {
	each time.Duration // between two answers
	most time.Duration // that one may wait

	mu   sync.Mutex
	next time.Time // when the next one is answered
}

func newLimiter(l Limit) *limiter {
	if l.Rate <= 0 {
		return nil
	}
	each := time.Duration(float64(time.Second) / l.Rate)
	return &limiter{each: each, most: time.Duration(l.Burst) * each}
}

// admit says how long a request has to wait, or that it is refused.
func (l *limiter) admit(now time.Time) (wait time.Duration, ok bool) {
	if l == nil {
		return 0, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next.Before(now) {
		l.next = now
	}
	if wait = l.next.Sub(now); wait > l.most {
		return 0, false
	}
	l.next = l.next.Add(l.each)
	return wait, true
}

// chunk is what is written, or read, at once of bulk data.
const chunk = 128 << 10

func (p *port) bulk() {
	p.accept(func(c *net.TCPConn) {
		defer c.Close()
		buffer := make([]byte, chunk)
		for {
			if _, err := c.Read(buffer); err != nil { // the end, be it a good one or not: the client knows
				return
			}
		}
	})
}
