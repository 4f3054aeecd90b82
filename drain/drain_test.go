package drain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// server is an API server with a number of nodes.
type server struct {
	nodes int

	mu     sync.Mutex
	writes []time.Time
	lists  int
	says   map[string]kube.Confirmation
	living map[string]time.Time
	clocks map[string]time.Duration // of kubelets that are wrong
	broken error
}

func (s *server) Confirm(_ context.Context, node string, says kube.Confirmation) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes = append(s.writes, time.Now())
	s.says[node] = says
	return s.broken
}

func (s *server) Confirmations(context.Context) (map[string]kube.Confirmation, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists++
	all := map[string]kube.Confirmation{}
	for node, says := range s.says {
		all[node] = says
	}
	return all, s.broken
}

func (s *server) Heartbeats(context.Context) (map[string]kube.Heartbeat, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]kube.Heartbeat{}
	for node, until := range s.living {
		renewed := until.Add(-time.Minute)
		if until.IsZero() {
			renewed = time.Now().Truncate(10 * time.Second)
		}
		all[node] = kube.Heartbeat{Renewed: renewed.Add(s.clocks[node]), Counts: time.Minute}
	}
	return all, s.broken
}

func (s *server) CountNodes(context.Context) (int, error) { return s.nodes, nil }

// node is a Barrier of node "own" with a Table.
type node struct {
	*Barrier
	t      *testing.T
	server *server
	mu     sync.Mutex
	table  *service.Table
	cancel context.CancelFunc
}

func newNode(t *testing.T, nodes int) *node {
	table, err := service.NewTable(service.Options{NodeName: "own"})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, table: table, server: &server{
		nodes: nodes, says: map[string]kube.Confirmation{}, living: map[string]time.Time{"own": {}},
		clocks: map[string]time.Duration{},
	}}
	n.Barrier = New(func(_ context.Context, f func(*service.Table)) error {
		n.mu.Lock()
		defer n.mu.Unlock()
		f(n.table)
		return nil
	}, slog.New(slog.DiscardHandler))
	n.Use("own", n.server)
	ctx, cancel := context.WithCancel(t.Context())
	n.cancel = cancel
	go n.Run(ctx)
	return n
}

// hears has the node program a version of the only slice. Endpoints that terminate have a minus before them.
func (n *node) hears(version uint64, endpoints ...string) {
	n.put(version, endpoints...)
	n.holds(version)
}

// holds says that all changes up to a version are in force.
func (n *node) holds(version uint64) {
	n.mu.Lock()
	round := engine.Round{InForce: engine.InForce{Version: version, Barrier: n.table.Barrier()}}
	n.mu.Unlock()
	n.Round(round)
}

func (n *node) put(version uint64, endpoints ...string) {
	name := service.Name{Namespace: "default", Name: "web"}
	s := &service.Slice{
		Name: name, Service: "web", Version: version, Ports: []service.SlicePort{{Protocol: model.TCP, Port: 8080}},
	}
	for _, e := range endpoints {
		addr, ends := strings.CutPrefix(e, "-")
		s.Endpoints = append(s.Endpoints, service.Endpoint{
			Addr: netip.MustParseAddr(addr), Ready: !ends, Serving: true, Terminating: ends, Weight: 1,
		})
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.table.Update(service.Batch{
		Services: service.One(name, &service.Service{
			Name: name, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Barrier: true,
			Ports: []service.Port{{Protocol: model.TCP, Port: 80}},
		}),
		Slices: service.One(name, s),
	})
}

// deleted has the Service and its slice deleted.
func (n *node) deleted(version uint64) {
	name := service.Name{Namespace: "default", Name: "web"}
	n.mu.Lock()
	n.table.Update(service.Batch{
		Services: service.One[service.Service](name, nil), Slices: service.One[service.Slice](name, nil),
	})
	n.mu.Unlock()
	n.holds(version)
}

// other is what another node confirms.
func (n *node) other(name string, says kube.Confirmation) {
	n.server.mu.Lock()
	defer n.server.mu.Unlock()
	if says.Renewed.IsZero() {
		says.Renewed = time.Now()
	}
	n.server.says[name] = says
	if _, known := n.server.living[name]; !known {
		n.server.living[name] = time.Time{}
	}
}

// counts are the numbers of writes and lists, and the version that was confirmed last.
func (s *server) counts() (writes, lists int, version uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.writes), s.lists, s.says["own"].Version
}

func (s *server) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = err
}

// lives has a node count as living until then; zero: it goes on.
func (s *server) lives(node string, until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.living[node] = until
}

// clock sets how wrong the clock of a node is.
func (s *server) clock(node string, wrong time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clocks[node] = wrong
}

// asks sends the answer that pod 10.244.0.1 gets, and when.
func (n *node) asks(query string) <-chan string {
	answer := make(chan string, 1)
	go func() {
		start := time.Now()
		r := httptest.NewRequest("GET", Path+query, nil)
		r.RemoteAddr = "10.244.0.1:40000"
		w := httptest.NewRecorder()
		n.ServeHTTP(w, r)
		answer <- fmt.Sprintf("%d after %d s: %s", w.Code, time.Since(start)/time.Second, strings.TrimSpace(w.Body.String()))
	}()
	return answer
}

var answers = []struct {
	name, query, want string
	do                func(*node)
}{
	{"all confirm", "", "200 after 1 s: drained: 3 nodes confirmed it", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 10})
		n.other("b", kube.Confirmation{Version: 11, Used: []string{"10.244.0.7", "other"}})
	}},
	{"later", "", "200 after 4 s: drained: 2 nodes", func(n *node) {
		n.hears(9, "10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9})
		bubble.Pass(time.Second)
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		bubble.Pass(2 * time.Second)
		n.other("a", kube.Confirmation{Version: 10})
	}},
	{"silent", "", "503 after 25 s: not drained within 25s: 1 node confirmed it; not confirmed by: a", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9})
	}},
	{"used", "?timeout=3s", "503 after 3 s: not drained within 3s: 0 nodes confirmed it; " +
		"still used, for want of ready endpoints, by: a, own", func(n *node) {
		n.hears(10, "-10.244.0.1")
		n.other("a", kube.Confirmation{Version: 10, Used: []string{"default"}})
	}},
	{"no Fairlead", "", "200 after 16 s: drained: 1 node confirmed it; without Fairlead: b", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.server.lives("b", time.Time{})
	}},
	{"dead", "", "200 after 13 s: drained: 1 node confirmed it", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9, Renewed: time.Now().Add(-2 * time.Minute)})
		n.server.lives("a", time.Now().Add(-time.Second))
	}},
	{"clock behind", "", "503 after 25 s: not drained within 25s: 1 node confirmed it; not confirmed by: a", func(n *node) {
		n.server.clock("a", -time.Hour)
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9, Renewed: time.Now().Add(-time.Hour - 2*time.Minute)})
	}},
	{"clock ahead", "", "200 after 1 s: drained: 2 nodes confirmed it", func(n *node) {
		n.server.clock("a", time.Hour)
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 10, Renewed: time.Now().Add(time.Hour)})
	}},
	{"without kubelet", "?timeout=3s", "503 after 3 s: not drained within 3s: 1 node confirmed it; not confirmed by: a",
		func(n *node) {
			n.hears(10, "-10.244.0.1", "10.244.0.2")
			n.other("a", kube.Confirmation{Version: 9})
			n.server.lives("a", time.Now().Add(-time.Hour))
		}},
	{"no endpoint", "", "404 after 0 s: no Service", func(n *node) { n.hears(10, "10.244.0.2") }},
	{"goes on", "?timeout=2s", "503 after 2 s: not drained within 2s: this node has not heard", func(n *node) {
		n.hears(10, "10.244.0.1")
	}},
	{"no API server", "?timeout=2s", "503 after 2 s: not drained within 2s: broken", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.server.fail(errors.New("broken"))
	}},
	{"Service deleted", "", "200 after 4 s: drained: its Services are gone", func(n *node) {
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9})
		bubble.Pass(3 * time.Second)
		n.deleted(11)
	}},
	{"deleted at once", "", "200 after 4 s: drained: its Services are gone", func(n *node) {
		n.other("a", kube.Confirmation{Version: 8})
		bubble.Pass(3 * time.Second)
		n.deleted(10)
	}},
	{"no time", "?timeout=x", "400 after 0 s: timeout: \"x\"", func(*node) {}},
}

func TestBarrier_answers(t *testing.T) {
	for _, c := range answers {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, 3)
				n.hears(8, "10.244.0.1", "10.244.0.2")
				bubble.Pass(time.Minute)
				if c.name == "no endpoint" {
					c.do(n)
				}
				answer := n.asks(c.query)
				c.do(n)
				if got := <-answer; !strings.HasPrefix(got, c.want) {
					t.Errorf("%s, want %s", got, c.want)
				}
				n.cancel()
			})
		})
	}
}

// A node is known to be dead when nothing new came of it for a while, whatever its clock was. One that has come back
// since, and is dead again, is waited for once more.
func TestBarrier_dead(t *testing.T) {
	for _, wrong := range []time.Duration{-time.Hour, 0, 100 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, 3)
			n.hears(8, "10.244.0.1", "10.244.0.2")
			n.other("a", kube.Confirmation{Version: 8, Renewed: time.Now().Add(wrong)})
			n.server.clock("a", wrong)
			n.server.lives("a", time.Now().Add(time.Minute)) // it says no more
			bubble.Pass(time.Hour)
			n.hears(10, "-10.244.0.1", "10.244.0.2")
			slow := "200 after 13 s"
			if wrong > 0 { // its clock says that it lives, so that only silence for a whole minute counts
				slow = "503 after 25 s: not drained within 25s: 1 node confirmed it; not confirmed by: a"
			}
			if got := <-n.asks(""); !strings.HasPrefix(got, slow) {
				t.Errorf("clock %s: %s, want %s", wrong, got, slow)
			}
			bubble.Pass(time.Minute)
			if got, want := <-n.asks(""), "200 after 1 s"; !strings.HasPrefix(got, want) {
				t.Errorf("clock %s: at last %s, want %s", wrong, got, want)
			}
			n.other("a", kube.Confirmation{Version: 8, Renewed: time.Now().Add(wrong)})
			n.server.lives("a", time.Now().Add(time.Minute)) // for a moment
			bubble.Pass(time.Hour)
			if got := <-n.asks(""); !strings.HasPrefix(got, slow) {
				t.Errorf("clock %s: after another hour %s, want %s", wrong, got, slow)
			}
			n.cancel()
		})
	}
}

// Of 5,000 nodes a dead one does not cost the first pod all its time: the agent looks for it while others write.
func TestBarrier_deadOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, manyNodes)
		n.hears(8, "10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 8})
		n.server.lives("a", time.Now().Add(time.Minute)) // it says no more
		bubble.Pass(time.Hour)
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		if got, want := <-n.asks(""), "200 after 16 s: drained: 1 node confirmed it"; !strings.HasPrefix(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
		if _, lists, _ := n.server.counts(); lists > 3 {
			t.Errorf("%d lists, want 3", lists)
		}
		n.cancel()
	})
}

// Each node of 5,000 writes every ten seconds at most, whatever happens, and at another moment than the others.
func TestBarrier_writes(t *testing.T) {
	for nodes, most := range map[int]int{3: 60, 5000: 6} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, nodes)
			for i := range 600 {
				n.hears(uint64(i+1), "-10.244.0.1", "10.244.0.2")
				bubble.Pass(100 * time.Millisecond)
			}
			if got, _, _ := n.server.counts(); got > most || got < most-1 {
				t.Errorf("%d nodes: %d writes a minute, want %d", nodes, got, most)
			}
			bubble.Pass(20 * time.Second)
			before, _, version := n.server.counts()
			if version != 600 {
				t.Errorf("%d nodes: the last says %d", nodes, version)
			}
			bubble.Pass(time.Hour)
			after, _, _ := n.server.counts()
			if got := after - before; got < 11 || got > 12 {
				t.Errorf("%d nodes: %d writes within an hour without news, want 12", nodes, got)
			}
			n.cancel()
		})
	}
}

// A slice may be in force before older changes of other namespaces are. When they are, too, that is confirmed at once.
func TestBarrier_overtaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 3)
		n.hears(8, "10.244.0.1", "10.244.0.2")
		bubble.Pass(time.Minute)
		n.put(11, "-10.244.0.1", "10.244.0.2")
		for _, c := range []struct{ holds, says uint64 }{{8, 8}, {10, 10}, {11, 11}, {12, 11}, {5, 5}} {
			n.holds(c.holds)
			bubble.Pass(2 * leastPause)
			if _, _, got := n.server.counts(); got != c.says {
				t.Errorf("in force is %d, and it says %d, not %d", c.holds, got, c.says)
			}
		}
		n.cancel()
	})
}

// Without Services that want it, it costs nothing.
func TestBarrier_idle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 3)
		for i := range uint64(100) {
			n.Round(engine.Round{InForce: engine.InForce{Version: i}})
			bubble.Pass(time.Minute)
		}
		if writes, lists, _ := n.server.counts(); writes+lists > 0 {
			t.Errorf("%d writes, %d lists", writes, lists)
		}
		n.cancel()
	})
}

// A pod has few requests, and the API server is asked once for all.
func TestBarrier_bounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1000) // two seconds
		n.hears(10, "-10.244.0.1", "10.244.0.2")
		n.other("a", kube.Confirmation{Version: 9})
		bubble.Pass(time.Minute)
		var all []<-chan string
		for range maxWaitsOfOne + 2 {
			all = append(all, n.asks("?timeout=20s"))
		}
		var got []string
		for _, a := range all {
			got = append(got, (<-a)[:3])
		}
		slices.Sort(got)
		_, lists, _ := n.server.counts()
		if want := []string{"429", "429", "503", "503"}; !slices.Equal(got, want) || lists > 20 {
			t.Errorf("%v, %d lists; want %v", got, lists, want)
		}
		n.Barrier.mu.Lock()
		defer n.Barrier.mu.Unlock()
		if len(n.waiting) > 0 || n.waits > 0 {
			t.Errorf("%v remain", n.waiting)
		}
		n.cancel()
	})
}
