package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

// freeAddress is a local address and port that is unused, and probably stays so: other processes listen elsewhere.
func freeAddress(t *testing.T) netip.AddrPort {
	pid := os.Getpid()
	host := netip.AddrFrom4([4]byte{127, byte(pid >> 8), byte(pid), 2})
	l, err := net.Listen("tcp", netip.AddrPortFrom(host, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// get asks until the answer has the code, and returns it.
func get(t *testing.T, url string, code int) (map[string]any, http.Header) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var text []byte
	var header http.Header
	eventually.Nil(t, fmt.Sprintf("%s answers %d", url, code), func() error {
		response, err := client.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		header = response.Header
		if text, err = io.ReadAll(response.Body); err == nil && response.StatusCode != code {
			err = fmt.Errorf("%s %s", response.Status, text)
		}
		return err
	})
	body := map[string]any{}
	if err := json.Unmarshal(text, &body); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return body, header
}

// noGoroutineLeft checks that what follows leaves no goroutine.
func noGoroutineLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		eventually.Nil(t, "goroutines end", func() error {
			if runtime.NumGoroutine() <= before {
				return nil
			}
			stacks := make([]byte, 1<<20)
			return fmt.Errorf("%d goroutines before, now:\n%s", before, stacks[:runtime.Stack(stacks, true)])
		})
	})
}

func TestHealthz(t *testing.T) {
	noGoroutineLeft(t)
	r := newRig(t)
	at := freeAddress(t)
	r.setFault(func(string) error { return errBroken })
	r.start(func(o *Options) { o.HealthAddress, o.HealthTimeout = at, time.Millisecond })
	healthz, livez := "http://"+at.String()+"/healthz", "http://"+at.String()+"/livez"
	get(t, healthz, 503) // before the first batch
	get(t, livez, 503)

	r.send(web(1, "10.244.1.2"))
	body, _ := get(t, healthz, 503) // the kernel refuses
	if body["healthy"] != false {
		t.Fatal(body)
	}
	r.setFault(nil)
	body, _ = get(t, healthz, 200)
	families := body["status"].(map[string]any)
	if body["healthy"] != true || body["nodeEligible"] != true || body["lastUpdated"] != body["currentTime"] ||
		families["IPv4"].(map[string]any)["healthy"] != true || families["IPv6"].(map[string]any)["healthy"] != true {
		t.Fatal(body)
	}

	r.send(service.Batch{Node: &service.Node{Name: "node", Eligible: false}})
	if body, _ = get(t, healthz, 503); body["healthy"] != true || body["nodeEligible"] != false {
		t.Fatal(body)
	}
	get(t, livez, 200)
	r.send(service.Batch{Node: &service.Node{Name: "node", Eligible: true}})
	get(t, healthz, 200)

	r.setFault(func(string) error { return errBroken })
	r.send(web(2, "10.244.1.3"))
	get(t, healthz, 503)
	get(t, livez, 503)
	r.stop()
}

func TestChecks_followRows(t *testing.T) {
	noGoroutineLeft(t)
	e := New(Options{})
	log := slog.New(slog.DiscardHandler)
	a, b := freeAddress(t), freeAddress(t)
	state := model.NewState()
	state.Health[a] = model.Health{Service: "shop/web", Local: 2}
	state.Health[b] = model.Health{Service: "shop/db", Local: 0}
	e.checks.follow(state.Health, log)
	defer e.checks.close()

	if body, _ := get(t, "http://"+a.String(), 503); body["serviceProxyHealthy"] != false {
		t.Fatal(body) // nothing is programmed
	}
	e.status.programmed(time.Now(), true, false)
	body, header := get(t, "http://"+a.String()+"/any/path", 200)
	want := `{"localEndpoints":2,"service":{"name":"web","namespace":"shop"},"serviceProxyHealthy":true}`
	if got, _ := json.Marshal(body); string(got) != want || header.Get("X-Load-Balancing-Endpoint-Weight") != "2" ||
		header.Get("Content-Type") != "application/json" {
		t.Fatalf("%s %v", got, header)
	}
	if body, header := get(t, "http://"+b.String(), 503); header.Get("X-Load-Balancing-Endpoint-Weight") != "0" ||
		body["serviceProxyHealthy"] != true {
		t.Fatal(body, header)
	}

	state.Health[b] = model.Health{Service: "shop/db", Local: 1}
	delete(state.Health, a)
	e.checks.follow(state.Health, log)
	get(t, "http://"+b.String(), 200)
	if conn, err := net.Dial("tcp", a.String()); err == nil {
		conn.Close()
		t.Fatal("the server of a row that is gone still listens")
	}
}

func TestChecks_portInUse(t *testing.T) {
	noGoroutineLeft(t)
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := occupied.Addr().(*net.TCPAddr).AddrPort()
	var log strings.Builder
	e := New(Options{})
	e.status.programmed(time.Now(), true, false)
	state := model.NewState()
	state.Health[at] = model.Health{Service: "shop/web", Local: 1}
	for range 3 {
		e.checks.follow(state.Health, slog.New(slog.NewTextHandler(&log, nil)))
	}
	defer e.checks.close()
	if n := strings.Count(log.String(), at.String()+": bind: "+inUse.Error()); n != 1 {
		t.Fatalf("reported %d times: %s", n, log.String())
	}
	occupied.Close()
	eventually.True(t, "the server is opened", func() bool {
		e.checks.follow(state.Health, slog.New(slog.DiscardHandler))
		return e.checks.servers[at] != nil
	})
	get(t, "http://"+at.String(), 200)
}

// One namespace's servers that cannot be opened are tried ever more rarely, few at a time, and have a few lines in the
// log. They do not keep another one's from being opened.
func TestChecks_manyInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const evil, minutes = 2000, 10
		var log strings.Builder
		e := New(Options{})
		state := model.NewState()
		at := func(port int) netip.AddrPort {
			return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port))
		}
		for i := range evil {
			state.Health[at(i+1)] = model.Health{Service: fmt.Sprint("evil/s", i), Local: 1}
		}
		state.Health[at(evil+1)] = model.Health{Service: "shop/web", Local: 1}
		attempts, most := 0, 0
		e.checks.bind = func(netip.AddrPort) (net.Listener, error) {
			attempts++
			return nil, inUse
		}
		follow := func() bool {
			before := attempts
			more := e.checks.follow(state.Health, slog.New(said.Bounded(slog.NewTextHandler(&log, nil))))
			most = max(most, attempts-before)
			return more
		}
		for i := 0; follow(); i++ {
			if i > evil/maxOpened {
				t.Fatal("the first attempts have no end")
			}
		}
		if n := len(e.checks.refused); n != evil+1 {
			t.Errorf("%d servers were tried, want all", n)
		}
		if !strings.Contains(log.String(), "shop/web") || !strings.Contains(log.String(), "evil/s1") {
			t.Errorf("the owners are not named:\n%s", &log)
		}
		for range minutes * 60 * 2 {
			bubble.Pass(500 * time.Millisecond)
			follow()
		}
		if limit := evil * (minutes*60/25 + 12); most > maxOpened || attempts > limit || attempts < evil*minutes {
			t.Errorf("%d attempts in %d minutes, want at most %d; %d at once", attempts, minutes, limit, most)
		}
		if log.Len() > 16<<10 {
			t.Errorf("the log has %d bytes", log.Len())
		}
	})
}

// That load balancers are sent away is said, once, and why is in the problems.
func TestEngine_saysWhoMayUseTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		node := &service.Node{Name: "node", Eligible: true}
		for range 2 {
			for _, n := range []*service.Node{node, {}, {}, node, node} {
				r.send(service.Batch{Node: n})
				synctest.Wait()
			}
		}
		r.stop()
		for text, want := range map[string]int{
			"load balancers should not use this node": 2, "load balancers may use this node again": 2, "was deleted": 2,
		} {
			if n := strings.Count(r.log.String(), text); n != want {
				t.Errorf("%q was logged %d times, want %d:\n%s", text, n, want, r.log.String())
			}
		}
	})
}

// The servers of a running Engine follow what it programs, and retry without a change.
func TestEngine_retriesHealthAddress(t *testing.T) {
	noGoroutineLeft(t)
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := occupied.Addr().(*net.TCPAddr).AddrPort()
	r := newRig(t)
	r.start(func(o *Options) { o.HealthAddress, o.AuditInterval = at, 10*time.Millisecond })
	r.send(web(1, "10.244.1.2"))
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return occupied.Close() }); err != nil {
		t.Fatal(err)
	}
	get(t, "http://"+at.String()+"/healthz", 200)
	r.stop()
}

// text asks until the answer has the code, and returns it.
func text(t *testing.T, url string, code int) (text string) {
	t.Helper()
	eventually.Nil(t, fmt.Sprintf("%s answers %d", url, code), func() error {
		response, err := http.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if text = string(body); err == nil && response.StatusCode != code {
			err = fmt.Errorf("%s %s", response.Status, text)
		}
		return err
	})
	return text
}

// readyz says which check fails, at once, and fails for nothing that one object or the API server is to blame for.
func TestReadyz(t *testing.T) {
	noGoroutineLeft(t)
	defer http.DefaultClient.CloseIdleConnections()
	r := newRig(t)
	at := freeAddress(t)
	r.start(func(o *Options) {
		o.HealthAddress, o.AuditInterval = at, 10*time.Millisecond
		o.About = func() About {
			return About{Watches: []Watch{{Resource: "services", LastMessage: time.Now().Add(-time.Hour)}}}
		}
	})
	readyz := "http://" + at.String() + "/readyz"
	if got := text(t, readyz, 503); !strings.Contains(got, "[-]programmed failed: nothing has been programmed yet\n[+]changes ok\n") ||
		!strings.HasSuffix(got, "readyz check failed\n") {
		t.Error(got)
	}
	r.send(web(1, "10.244.1.2"))
	if got := text(t, readyz, 200); got != "ok" {
		t.Error(got)
	}
	if got := text(t, readyz+"?verbose", 200); got != "[+]programmed ok\n[+]changes ok\n[+]rules ok\n[+]audit ok\n[+]rows ok\n"+
		"[+]watch-services ok, heard of 1h0m0s ago\nreadyz check passed\n" {
		t.Error(got)
	}
	r.setFault(func(string) error { return errBroken })
	r.send(web(2, "10.244.1.3"))
	if got := text(t, readyz, 503); !strings.Contains(got, "[-]changes failed: a change waits since ") ||
		!strings.Contains(got, errBroken.Error()) {
		t.Error(got)
	}
	get(t, "http://"+at.String()+"/livez", 200) // it may pass
	r.setFault(func(string) error { return fmt.Errorf("%w: %w", dataplane.ErrPartial, errBroken) })
	if got := text(t, readyz+"?verbose", 200); !strings.Contains(got, "[+]rows ok, but some are not in force: ") {
		t.Error(got)
	}
	r.setFault(nil)
	eventually.True(t, "all is programmed", func() bool { return r.engine.Status().Failures == 0 })
	var undone atomic.Bool
	go func() {
		for !undone.Load() {
			r.vandalise()
			runtime.Gosched()
		}
	}()
	defer undone.Store(true)
	if got := text(t, readyz, 503); !strings.Contains(got, "[-]rules failed: another program undoes them since ") {
		t.Error(got)
	}
	if got := text(t, readyz+"?verbose&exclude=rules", 200); !strings.Contains(got, "[+]rules excluded: ok\n") {
		t.Error(got)
	}
	get(t, "http://"+at.String()+"/livez", 200)
	r.engine.status.undone(&Undone{Since: time.Now().Add(-2 * healthTimeout)})
	get(t, "http://"+at.String()+"/livez?exclude=rules", 200)
	r.stop()
}

// While the loop is busy with something else, a change that waits for too long shows.
func TestEngine_busyShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.AuditInterval = 10 * time.Hour })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		go func() { // which the end of the test may refuse
			_ = r.engine.Do(t.Context(), func(context.Context, View) error { bubble.Work(10 * time.Minute); return nil })
		}()
		synctest.Wait()
		sent := time.Now()
		r.send(web(2, "10.244.1.3"))
		bubble.Pass(30 * time.Second)
		if s := r.engine.Status(); !s.WaitingSince.Equal(sent) || !r.engine.Healthy() {
			t.Errorf("%+v, want that a change waits", s)
		}
		bubble.Pass(31 * time.Second)
		if r.engine.Healthy() {
			t.Error("a change has waited for a minute, and yet it is healthy")
		}
		bubble.Pass(10 * time.Minute)
		r.converged()
		if !r.engine.Healthy() {
			t.Errorf("%+v", r.engine.Status())
		}
		r.stop()
	})
}

// TestEngine_healthInForce: what load balancers are told is what the kernel has.
func TestEngine_healthInForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, path := newRig(t), filepath.Join(t.TempDir(), "health-checks")
		r.start(func(o *Options) { o.HealthFile = HealthFile{Path: path, MaxAge: time.Hour} })
		local := func(endpoints ...string) {
			b := web(1, endpoints...)
			b.Services[0].Is.ExternalLocal, b.Services[0].Is.HealthCheckNodePort = true, 32123
			for i := range b.Slices[0].Is.Endpoints {
				b.Slices[0].Is.Endpoints[i].Node = service.NodeNamed("node")
			}
			r.send(b)
			bubble.Pass(time.Second)
		}
		says := func(want string) {
			t.Helper()
			text, err := os.ReadFile(path)
			if err != nil || !strings.Contains(string(text), "health 192.0.2.1:32123 default/web-1 local "+want) {
				t.Errorf("want local %s: %s, %v", want, text, err)
			}
		}
		r.send(service.Batch{}) // there are no rows, and an earlier process may have written some
		synctest.Wait()
		if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), `"rows":""`) {
			t.Errorf("no rows: %s, %v", text, err)
		}
		local("10.244.1.2")
		says("1")
		r.setFault(func(string) error { return errBroken })
		local("10.244.1.2", "10.244.1.3")
		says("1")
		r.setFault(nil)
		bubble.Pass(time.Minute)
		says("2")
		r.stop()
	})
}
