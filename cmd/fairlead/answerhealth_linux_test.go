package main

import (
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

const balanced = `
apiVersion: v1
kind: Service
metadata: {name: balanced}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.11
  clusterIPs: [10.96.0.11]
  externalTrafficPolicy: Local
  healthCheckNodePort: 32123
  ports: [{port: 80, targetPort: 8080, nodePort: 30081}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: balanced, labels: {kubernetes.io/service-name: balanced}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [POD-A]
  nodeName: NODE
`

// asker asks all the time, as several load balancers.
type asker struct {
	stop   chan struct{}
	done   sync.WaitGroup
	mu     sync.Mutex
	counts map[string]int // since they were taken last
}

func (w *world) askHealth(at string) *asker {
	a := &asker{stop: make(chan struct{}), counts: map[string]int{}}
	client := w.bed.HTTPClient("node-b")
	for range 4 {
		a.done.Go(func() {
			for {
				select {
				case <-a.stop:
					return
				default:
				}
				time.Sleep(time.Millisecond) //nolint:forbidigo // the time between two questions
				what := ""
				response, err := client.Get(at)
				if err != nil {
					what = err.Error()
				} else {
					what = response.Status
					_ = response.Body.Close()
				}
				a.mu.Lock()
				a.counts[what]++
				a.mu.Unlock()
			}
		})
	}
	w.Cleanup(func() {
		close(a.stop)
		a.done.Wait()
	})
	return a
}

func (a *asker) take() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	counts := a.counts
	a.counts = map[string]int{}
	return counts
}

// only expects that all answers of a time were one.
func (w *world) only(a *asker, want, when string) {
	w.Helper()
	counts := a.take()
	if len(counts) != 1 || counts[want] == 0 {
		w.Errorf("%s: %v, want only %s", when, counts, want)
	}
	w.Logf("%s: %v", when, counts)
}

// becomesAnswer waits for an answer, in the course of which there is no other one than that before.
func (w *world) becomesAnswer(a *asker, before, want, when string) {
	w.Helper()
	eventually.Taking(maxAge).True(w, when+": "+want, func() bool { return w.get(health, "/") == code(want) })
	time.Sleep(200 * time.Millisecond) //nolint:forbidigo // for questions that are under way
	for what := range a.take() {
		if what != before && what != want {
			w.Errorf("%s: %s", when, what)
		}
	}
}

func code(status string) int {
	if strings.HasPrefix(status, "200") {
		return 200
	}
	return 503
}

// maxAge is for how long the responder goes on without an agent: longer than one takes to start on a busy machine.
const maxAge = 15 * time.Second

var health = netip.MustParseAddrPort("192.0.2.1:32123")

const (
	ready   = "200 OK"
	unready = "503 Service Unavailable"
)

// TestAnswerHealth kills the agent while load balancers ask about a Service. The responder goes on answering, for a
// time, and no connection is refused, not even when another responder takes its place.
func TestAnswerHealth(t *testing.T) {
	w := openWorld(t)
	open(t, filepath.Dir(w.socket))
	here := strings.ReplaceAll(balanced, "NODE", "node")
	w.write("balanced.yaml", here)
	flags := []string{"--hostname-override", "node", "--health-check-max-age", maxAge.String()}
	p := w.start(flags...)
	if got := w.get(health, "/"); got != 0 {
		t.Errorf("without a responder: %d", got)
	}
	responder := w.unprivileged("-all", "answer-health", "--control-socket", w.socket)
	if err := responder.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the responder answers", func() bool { return w.get(health, "/") == 200 })
	a := w.askHealth("http://" + health.String() + "/")
	pause := func() { time.Sleep(time.Second) } //nolint:forbidigo // load balancers ask meanwhile
	pause()
	w.only(a, ready, "at first")

	kill := func() {
		_ = p.Process.Kill()
		_ = p.Wait()
	}
	kill()
	pause()
	w.only(a, ready, "while the agent is away")
	p = w.start(flags...)
	pause()
	w.only(a, ready, "while it comes back")

	w.write("balanced.yaml", strings.ReplaceAll(balanced, "NODE", "node-b"))
	w.becomesAnswer(a, ready, unready, "the endpoint goes")
	pause()
	w.only(a, unready, "without an endpoint")
	w.write("balanced.yaml", here)
	w.becomesAnswer(a, unready, ready, "the endpoint returns")

	next := w.unprivileged("-all", "answer-health", "--control-socket", w.socket)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = next.Process.Kill()
		_ = next.Wait()
	})
	eventually.True(t, "two responders listen", func() bool {
		return strings.Count(w.on(testbed.Node, "ss", "-Hltn", "sport", "=", ":32123"), "LISTEN") == 2
	})
	_ = responder.Process.Signal(unix.SIGTERM)
	if err := responder.Wait(); err != nil {
		t.Error("the first responder: ", err)
	}
	pause()
	w.only(a, ready, "another responder")

	kill()
	w.becomesAnswer(a, ready, unready, "the agent stays away")
	pause()
	w.only(a, unready, "after that")
	w.runs("fairlead", "clean --control-socket "+w.socket, 0, "health checks: removed")
	eventually.True(t, "nothing answers", func() bool { return w.get(health, "/") == 0 })
}
