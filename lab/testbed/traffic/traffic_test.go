package traffic_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

func TestMain(m *testing.M) {
	traffic.Main()
	os.Exit(testbed.RunTests(func() int {
		if os.Getenv(orphans) != "" {
			return leaveOrphan()
		}
		return m.Run()
	}))
}

// orphans makes the test binary a program that starts a worker, and waits to be killed.
const orphans = "TRAFFIC_TEST_ORPHANS"

func leaveOrphan() int {
	bed, err := testbed.New(context.Background(), testbed.Spec{})
	if err != nil {
		panic(err)
	}
	w, err := traffic.StartWorker(context.Background(), bed, testbed.Node)
	if err != nil {
		panic(err)
	}
	fmt.Println(w.Pid())
	select {}
}

// TestOrphan kills a program, and its worker ends.
func TestOrphan(t *testing.T) {
	t.Parallel()
	program := exec.CommandContext(t.Context(), "/proc/self/exe")
	program.Env = append(os.Environ(), orphans+"=1")
	program.Stderr = os.Stderr
	out, err := program.StdoutPipe()
	if err == nil {
		err = program.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	worker, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(worker)
	if err := program.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = program.Wait() // it was killed
	ended := []unix.PollFd{{Fd: int32(worker), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(ended, -1)
		if n == 1 {
			return
		}
		if !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
}

// TestUnaware shows that a worker whose program does not call Main starts no more of them.
func TestUnaware(t *testing.T) {
	p := newPair(t)
	t.Setenv("FAIRLEAD_TRAFFIC_WORKER", "1")
	if _, err := traffic.StartWorker(t.Context(), p.bed, "client"); err == nil || !strings.Contains(err.Error(), "call traffic.Main") {
		t.Error(err)
	}
}

// pair is a server and a client in pods of one node.
type pair struct {
	bed            *testbed.Bed
	server, client *traffic.Worker
}

func newPair(t *testing.T) *pair {
	t.Helper()
	bed := testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{{Name: "server"}, {Name: "client"}}})
	return &pair{bed, start(t, bed, "server"), start(t, bed, "client")}
}

// start starts a worker that ends with the test.
func start(t *testing.T, bed *testbed.Bed, place testbed.Place) *traffic.Worker {
	t.Helper()
	w, err := traffic.StartWorker(t.Context(), bed, place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return w
}

func (p *pair) serve(t *testing.T, s traffic.Server) {
	t.Helper()
	if err := p.server.Serve(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// targets are ports of the server in one family.
func (p *pair) targets(v6 bool, ports ...uint16) (to []netip.AddrPort) {
	for _, port := range ports {
		to = append(to, netip.AddrPortFrom(p.bed.Addr("server", v6), port))
	}
	return to
}

func (p *pair) run(t *testing.T, l traffic.Load) traffic.Result {
	t.Helper()
	r, err := p.client.Run(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// counts is what a result counts, as text.
func counts(r traffic.Result) string {
	s := fmt.Sprintf("%d done", r.Done)
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		s += fmt.Sprintf(", %d %s", r.Errors[kind], kind)
	}
	return s
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// served is what the server counts, a line for each port.
func (p *pair) served(t *testing.T) string {
	t.Helper()
	counts, err := p.server.Served(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, port := range slices.Sorted(maps.Keys(counts)) {
		c := counts[port]
		lines = append(lines, fmt.Sprintf("%d: %d connections, %d answered", port, c.Connections, c.Answered))
	}
	return strings.Join(lines, "\n")
}

func families(t *testing.T, f func(t *testing.T, v6 bool)) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) { f(t, v6) })
	}
}

// TestHTTP has clients of all kinds ask, and compares what both sides have counted.
func TestHTTP(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		load        traffic.Load
		connections int // to each port; 0: as many as requests
	}{
		{name: "one", load: traffic.Load{Requests: 40}},
		{name: "many", load: traffic.Load{Requests: 400, Concurrency: 50}},
		{name: "in order", load: traffic.Load{Requests: 400, Concurrency: 10, FIN: true}},
		{name: "kept", load: traffic.Load{Requests: 400, KeepAlive: true}, connections: 1},
		{name: "rate", load: traffic.Load{Requests: 200, Concurrency: 4, Rate: 2000}},
		{name: "few ports", load: traffic.Load{Requests: 300, Sources: traffic.Ports(20000, 3)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			families(t, func(t *testing.T, v6 bool) {
				p := newPair(t)
				p.serve(t, traffic.Server{Ports: traffic.Ports(8001, 2), Bytes: 512})
				c.load.Targets = p.targets(v6, 8001, 8002)
				r := p.run(t, c.load)
				expect(t, "client", counts(r), fmt.Sprintf("%d done", c.load.Requests))
				half := c.load.Requests / 2
				connections := c.connections
				if connections == 0 {
					connections = half
				}
				expect(t, "server", p.served(t), fmt.Sprintf("8001: %d connections, %d answered\n"+
					"8002: %[1]d connections, %[2]d answered", connections, half))
				if want := int64(512 * c.load.Requests); r.Bytes != want {
					t.Errorf("%d bytes, want %d", r.Bytes, want)
				}
				checkPhases(t, r, 2*connections)
			})
		})
	}
}

// checkPhases compares how often each phase was measured, and what of it is part of what.
func checkPhases(t *testing.T, r traffic.Result, connections int) {
	t.Helper()
	n := int64(r.Done)
	got := fmt.Sprint(r.Connect.Count(), r.Processing.Count(), r.Waiting.Count(), r.Total.Count())
	expect(t, "measured", got, fmt.Sprint(connections, n, n, n))
	total, processing, waiting := r.Total.Summary(), r.Processing.Summary(), r.Waiting.Summary()
	if waiting.Mean > processing.Mean || processing.Mean > total.Mean || total.Min <= 0 || total.Min > total.Max {
		t.Errorf("total %+v, processing %+v, waiting %+v", total, processing, waiting)
	}
}

// TestLimit sends more than a backend admits: the first one is answered, and the others are refused at once.
func TestLimit(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: traffic.Ports(8001, 2), Limit: traffic.Limit{Rate: 1.0 / 3600}, Bytes: 512})
	r := p.run(t, traffic.Load{Targets: p.targets(false, 8001, 8002), Requests: 200, Concurrency: 20})
	expect(t, "client", counts(r), "2 done, 198 status 503")
	expect(t, "server", p.served(t), "8001: 100 connections, 1 answered\n8002: 100 connections, 1 answered")
}

// TestLimitDelays has those of a burst wait for their turn.
func TestLimitDelays(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Limit: traffic.Limit{Rate: 100, Burst: 50}})
	r := p.run(t, traffic.Load{Targets: p.targets(false, 8001), Requests: 20, Concurrency: 20})
	expect(t, "client", counts(r), "20 done")
	if least := 190 * time.Millisecond; r.Elapsed < least {
		t.Errorf("20 of 100 a second took %s, want %s at least", r.Elapsed, least)
	}
}

func TestDelay(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	const delay = 30 * time.Millisecond
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Delay: delay})
	r := p.run(t, traffic.Load{Targets: p.targets(true, 8001), Requests: 20, Concurrency: 10})
	expect(t, "client", counts(r), "20 done")
	if s := r.Processing.Summary(); s.Min < delay.Seconds()*0.99 {
		t.Errorf("somebody waited %g s", s.Min)
	}
}

// TestWorkers has more clients at once than a port serves: the last ones wait for all others.
func TestWorkers(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	const delay, workers, clients = 30 * time.Millisecond, 2, 8
	p.serve(t, traffic.Server{Ports: traffic.Ports(8001, 2), Delay: delay, Workers: workers})
	r := p.run(t, traffic.Load{Targets: p.targets(false, 8001), Requests: clients, Concurrency: clients})
	expect(t, "result", counts(r), "8 done")
	if took, least := r.Elapsed, delay*clients/workers; took < least {
		t.Errorf("%d requests to a server of %d workers took %s, want %s at least", clients, workers, took, least)
	}
}

// TestIntended shows that the time in which a request waits for a client counts.
func TestIntended(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	const delay = 20 * time.Millisecond
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Delay: delay})
	const n = 10 // all at once, as it were, and one client
	r := p.run(t, traffic.Load{Targets: p.targets(false, 8001), Requests: n, Rate: 1e6})
	expect(t, "client", counts(r), "10 done")
	if s := r.Total.Summary(); s.Max < n*delay.Seconds()*0.99 {
		t.Errorf("the last one took %g s, and waited for %d others of %s", s.Max, n-1, delay)
	}
}

// TestUnsent counts what there was no client for.
func TestUnsent(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Delay: 2 * time.Second})
	r := p.run(t, traffic.Load{Targets: p.targets(false, 8001), Rate: 1000, Duration: time.Second})
	if r.Done != 1 || r.Unsent < 900 {
		t.Errorf("%s, %d were not sent", counts(r), r.Unsent)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	families(t, func(t *testing.T, v6 bool) {
		p := newPair(t)
		for _, protocol := range []traffic.Protocol{traffic.HTTP, traffic.Bulk} {
			l := traffic.Load{Protocol: protocol, Requests: 1, Targets: p.targets(v6, 8001), Duration: time.Minute}
			expect(t, string(protocol), counts(p.run(t, l)), "0 done, 1 refused")
			nobody := netip.MustParseAddr("10.244.1.250")
			if v6 {
				nobody = testbed.EmbedV6(nobody)
			}
			l.Targets = []netip.AddrPort{netip.AddrPortFrom(nobody, 8001)}
			expect(t, string(protocol), counts(p.run(t, l)), "0 done, 1 unreachable")
		}
	})
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Delay: time.Hour})
	l := traffic.Load{Targets: p.targets(false, 8001), Requests: 3, Concurrency: 3, Timeout: 20 * time.Millisecond}
	expect(t, "client", counts(p.run(t, l)), "0 done, 3 timed out")
}

// TestLoop makes connections and requests from one thread, to each port in turn.
func TestLoop(t *testing.T) {
	t.Parallel()
	families(t, func(t *testing.T, v6 bool) {
		bed, err := testbed.New(t.Context(), testbed.Spec{Pods: []testbed.PodSpec{{Name: "server"}, {Name: "client"}}})
		if err != nil {
			t.Fatal(err)
		}
		defer bed.Close()
		loop, err := traffic.NewLoop(bed, "client", "server", traffic.Ports(8001, 2))
		if err != nil {
			t.Fatal(err)
		}
		defer loop.Close()
		to := bed.Addr("server", v6)
		loop.Ask(netip.AddrPortFrom(to, 8001), netip.AddrPortFrom(to, 8002))
		for name, do := range map[string]func(int) ([]time.Duration, error){
			"connects": loop.Connects, "connections": loop.Connections, "requests": loop.Requests,
		} {
			took, err := do(100)
			if err != nil || len(took) != 100 || slices.Min(took) <= 0 {
				t.Errorf("%s: %v, %v", name, took, err)
			}
		}
		loop.Ask(netip.AddrPortFrom(to, 8003))
		if _, err := loop.Connects(1); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("to a port that is closed: %v", err)
		}
	})
}

func TestBulk(t *testing.T) {
	t.Parallel()
	families(t, func(t *testing.T, v6 bool) {
		p := newPair(t)
		p.serve(t, traffic.Server{Protocol: traffic.Bulk, Ports: []uint16{8001}})
		const interval = 20 * time.Millisecond
		r := p.run(t, traffic.Load{
			Protocol: traffic.Bulk, Targets: p.targets(v6, 8001), Concurrency: 2, Duration: 10 * interval, Interval: interval,
		})
		expect(t, "client", counts(r), "2 done")
		var sum int64
		for _, i := range r.Intervals {
			sum += i
		}
		if r.Bytes == 0 || sum != r.Bytes || len(r.Intervals) < 10 {
			t.Errorf("%d bytes, %d in %d intervals", r.Bytes, sum, len(r.Intervals))
		}
	})
}

// TestStop ends a load that has no end, once it has done something.
func TestStop(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}})
	running, err := p.client.Begin(t.Context(), traffic.Load{Targets: p.targets(false, 8001), Concurrency: 3})
	if err != nil {
		t.Fatal(err)
	}
	p.awaitAnswer(t)
	r, err := running.Stop(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	used, err := p.client.CPU(t.Context())
	if err != nil || r.Done == 0 || r.Failed() > 0 || used == 0 {
		t.Errorf("%s, %s of processor time, %v", counts(r), used, err)
	}
}

// TestShut: clients that come after the ports are closed are refused; earlier ones are served on.
func TestShut(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8080}})
	to := p.targets(false, 8080)
	stays, err := p.client.Begin(t.Context(), traffic.Load{Targets: to, KeepAlive: true, Rate: 200})
	if err != nil {
		t.Fatal(err)
	}
	p.awaitAnswer(t)
	if err := p.server.Shut(t.Context()); err != nil {
		t.Fatal(err)
	}
	expect(t, "a new one", counts(p.run(t, traffic.Load{Targets: to, Requests: 1})), "0 done, 1 refused")
	p.awaitAnswer(t)
	r, err := stays.Stop(t.Context())
	if err != nil || r.Failed() > 0 {
		t.Errorf("the one that was there: %s, %v", counts(r), err)
	}
}

// awaitAnswer returns when the server has answered once more.
func (p *pair) awaitAnswer(t *testing.T) {
	t.Helper()
	before := p.answered(t)
	eventually.True(t, "the server has answered once more", func() bool { return p.answered(t) > before })
}

// answered is how many requests the server has answered.
func (p *pair) answered(t *testing.T) (n int64) {
	t.Helper()
	ports, err := p.server.Served(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range ports {
		n += c.Answered
	}
	return n
}

// TestCancel ends a load by its context, and the worker has no more of it.
func TestCancel(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}})
	ctx, cancel := context.WithCancel(t.Context())
	running, err := p.client.Begin(ctx, traffic.Load{Targets: p.targets(false, 8001)})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := running.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := running.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := running.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "can be had once") {
		t.Error(err)
	}
}

// TestDeath kills a worker: its caller gets an error, and so does the client of its server.
func TestDeath(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.serve(t, traffic.Server{Ports: []uint16{8001}, Delay: time.Hour})
	running, err := p.client.Begin(t.Context(), traffic.Load{Targets: p.targets(false, 8001), Requests: 1, Timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the server has a connection", func() bool { return strings.Contains(p.served(t), " 1 connections") })
	server, err := os.FindProcess(p.server.Pid())
	if err == nil {
		err = server.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}
	<-p.server.Ended()
	if _, err := p.server.CPU(t.Context()); err == nil || !strings.Contains(err.Error(), "server has ended") {
		t.Error(err)
	}
	if err := p.server.Close(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Error(err)
	}
	r, err := running.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "client", counts(r), "0 done, 1 reset")
}

// TestRefusals are requests that make no sense.
func TestRefusals(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	to := p.targets(false, 8001)
	p.serve(t, traffic.Server{Ports: []uint16{8001}})
	for want, l := range map[string]traffic.Load{
		"needs a target":              {},
		"no protocol \"smoke\"":       {Targets: to, Protocol: "smoke"},
		"must not be negative":        {Targets: to, Rate: -1},
		"raise it (ulimit -n) or run": {Targets: to, Concurrency: 1 << 21},
	} {
		if _, err := p.client.Run(t.Context(), l); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := p.server.Serve(t.Context(), traffic.Server{Ports: []uint16{8000, 8001}}); err == nil ||
		!strings.Contains(err.Error(), "address already in use") {
		t.Error(err)
	}
	p.serve(t, traffic.Server{Ports: []uint16{8000}}) // the attempt has left nothing
	if _, err := traffic.StartWorker(t.Context(), p.bed, "nowhere"); err == nil {
		t.Error("there is a worker nowhere")
	}
}

// TestManyClients opens connections as the largest experiments do, and ports as the one with the most backends.
func TestManyClients(t *testing.T) {
	p := newPair(t)
	const clients = 10_000
	ports := traffic.Ports(10_000, 5000)
	p.serve(t, traffic.Server{Ports: ports, Delay: 500 * time.Millisecond})
	r := p.run(t, traffic.Load{
		Targets: p.targets(false, ports...), Requests: clients, Concurrency: clients, Timeout: time.Minute,
	})
	expect(t, "client", counts(r), fmt.Sprintf("%d done", clients))
	if n := int(r.Total.Count()); n != clients {
		t.Errorf("%d times", n)
	}
	t.Logf("%s, %+v", r.Elapsed, r.Total.Summary())
}

// TestResultJSON writes a result and reads it.
func TestResultJSON(t *testing.T) {
	t.Parallel()
	var r traffic.Result
	for i := range 100 {
		r.Total.Record(time.Duration(i+1) * time.Millisecond)
	}
	r.Total.Record(time.Hour)
	r.Done = 101
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var read traffic.Result
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	if a, b := fmt.Sprintf("%+v", r.Total.Summary()), fmt.Sprintf("%+v", read.Total.Summary()); a != b {
		t.Errorf("%s\n%s", a, b)
	}
	s := read.Total.Summary()
	expect(t, "summary", fmt.Sprintf("%d %.2g %.2g %.2g %.3g", s.N, s.Min, s.Median, s.P90, s.Max), "101 0.001 0.051 0.091 600")
	expect(t, "empty", fmt.Sprint(read.Connect.Summary()), fmt.Sprint(traffic.Summary{}))
	if err := json.Unmarshal([]byte(`{"Total":"smoke"}`), &read); err == nil {
		t.Error("smoke is a histogram")
	}
}
