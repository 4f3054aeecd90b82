package engine

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// TestSurplus: of each backend there are its weight and, in seconds, for how long its connections are idle. Of these
// some are closed.
func TestSurplus(t *testing.T) {
	t.Parallel()
	for _, row := range strings.Split(strings.TrimSpace(`
1: 9 8 7 6 | 1: 5 5 5 5                                 ->
1: 9 8 7 6 | 1:                                         -> 9
1: 6 7 8 9 | 1:                                         -> 9
1: 0 1 0 1 | 1:                                         ->
1: 0 1 0 2 | 1:                                         -> 2
1: 9 8     | 1: 7                                       ->
1: 9 8 7   | 1: 7                                       -> 9
1: 9       | 1:       | 1:                              ->
1: 9 9 9 9 9 9 9 9 9 9 | 1: 8 8 8 8 8 8 8 8 8 8 | 1:    -> 9 8
1: 3 3 3 3 3 3 3 3 3 3 | 1: 8 8 8 8 8 8 8 8 8 8 | 1:    -> 3 8
1: 0 0 0 0 0 0 0 0 0 9 | 1: 1 1 1 1 1 1 1 1 1 1 | 1:    -> 9
1: 9 9 9 9 9 9 9       | 1: 8 8 8 8 8 8 8       | 1: 7 7 7 7 7 7 ->
2: 9 8 7 6 | 1: 5 5                                     ->
3: 9 8 7 6 | 1: 5 5 5 5                                 -> 5
3: 9 8 7 6 | 0: 5 5 5 5 | 1: 5                          ->
0: 9 9 9 9 | 1: 5                                       ->
`), "\n") {
		rows, want, _ := strings.Cut(row, "->")
		pool, open := model.Pool{Rebalance: 2 * time.Second}, []dataplane.Open(nil)
		for i, one := range strings.Split(rows, "|") {
			weight, idle, _ := strings.Cut(strings.TrimSpace(one), ":")
			w, err := strconv.Atoi(weight)
			if err != nil {
				t.Fatal(err)
			}
			b := numbered(i, w)
			pool.Backends = append(pool.Backends, b)
			for _, seconds := range strings.Fields(idle) {
				d, err := time.ParseDuration(seconds + "s")
				if err != nil {
					t.Fatal(err)
				}
				open = append(open, dataplane.Open{Backend: b.AddrPort(), Idle: d})
			}
		}
		var closing []string
		for _, i := range surplus(pool, open, places(open)) {
			closing = append(closing, strconv.Itoa(int(open[i].Idle/time.Second)))
		}
		if got := strings.Join(closing, " "); got != strings.TrimSpace(want) {
			t.Errorf("%s: %q are closed", row, got)
		}
	}
}

func numbered(i, weight int) model.Backend {
	return model.Backend{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Port: 80, Weight: uint16(weight)}
}

func places(open []dataplane.Open) (all []int) {
	for i := range open {
		all = append(all, i)
	}
	return all
}

// TestSurplus_converges has clients come back to backends by chance. Five minutes after the last backend came the
// connections of each are within a tenth of its even share.
func TestSurplus_converges(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for backends := 2; backends <= 8; backends++ {
		pool, weights := model.Pool{Rebalance: 2 * time.Second}, 0
		for i := range backends {
			b := numbered(i, 1+r.IntN(3))
			pool.Backends, weights = append(pool.Backends, b), weights+int(b.Weight)
		}
		choose := func(of []model.Backend) netip.AddrPort {
			for {
				if b := of[r.IntN(len(of))]; r.IntN(3) < int(b.Weight) {
					return b.AddrPort()
				}
			}
		}
		open := make([]dataplane.Open, 40*backends)
		for i := range open {
			open[i].Backend = choose(pool.Backends[:backends-1])
			if open[i].Idle = time.Hour; i%4 == 0 {
				open[i].Idle = 0
			}
		}
		closed := 0
		for range 5 * time.Minute / rebalanceRound {
			for _, i := range surplus(pool, open, places(open)) {
				if open[i].Idle == 0 {
					t.Fatal("a busy connection is closed")
				}
				open[i].Backend = choose(pool.Backends)
				closed++
			}
		}
		for _, b := range pool.Backends {
			n, share := 0, float64(len(open)*int(b.Weight))/float64(weights)
			for _, c := range open {
				if c.Backend == b.AddrPort() {
					n++
				}
			}
			if math.Abs(float64(n)-share) > max(1, share/10) {
				t.Errorf("of %d backends one has %d connections, and should have %.1f", backends, n, share)
			}
		}
		t.Logf("%d backends: %d of %d connections were closed", backends, closed, len(open))
	}
}

// idlePlane has connections that are idle, and notes which of them are to be closed.
type idlePlane struct {
	dataplane.Dataplane

	mu     sync.Mutex
	open   []dataplane.Open
	calls  int
	closed []string
	total  int
}

func (p *idlePlane) CloseIdle(_ context.Context, of *dataplane.Idle) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	closing := of.Choose(p.open)
	p.total += len(closing)
	for _, i := range closing {
		p.closed = append(p.closed, fmt.Sprint(p.open[i].Service, " ", p.open[i].Backend))
	}
	return len(closing), nil
}

func (p *idlePlane) told() (calls int, closed []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	slices.Sort(p.closed)
	return p.calls, slices.Compact(p.closed)
}

// TestEngine_rebalances: connections of Services that want that are closed for a time after their backends have
// changed, and of no others, though they have the same backends.
func TestEngine_rebalances(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var p *idlePlane
		observed := 0 // by the goroutine that calls the plane
		r.start(func(o *Options) {
			p = &idlePlane{Dataplane: o.Plane}
			o.Plane, o.Observer = p, observerFunc(func(round Round) { observed += round.Rebalanced })
		})
		for _, to := range []string{"10.96.0.1:80", "10.96.0.2:80"} {
			for range 20 {
				p.open = append(p.open, dataplane.Open{
					Service: netip.MustParseAddrPort(to), Backend: netip.MustParseAddrPort("10.244.1.2:8080"), Idle: time.Minute,
				})
			}
		}
		r.send(web(1, "10.244.1.2", "10.244.1.3"))
		bubble.Pass(time.Minute)
		if calls, _ := p.told(); calls > 0 {
			t.Errorf("without the annotation the plane is asked %d times", calls)
		}
		wants := web(2, "10.244.1.2", "10.244.1.3")
		for _, s := range wants.Services.All() {
			s.Rebalance = 10 * time.Second
		}
		r.send(wants)
		bubble.Pass(2 * rebalanceFor)
		calls, closed := p.told()
		if got := strings.Join(closed, ", "); got != "10.96.0.2:80 10.244.1.2:8080" {
			t.Errorf("closed are connections of %s", got)
		}
		if most := int(rebalanceFor / rebalanceRound); calls < most/2 || calls > most {
			t.Errorf("the plane is asked %d times", calls)
		}
		slices := web(2, "10.244.1.2", "10.244.1.3", "10.244.1.4").Slices
		r.send(service.Batch{Slices: slices})
		bubble.Pass(time.Minute)
		if more, _ := p.told(); more == calls {
			t.Error("after a backend has come the plane is not asked")
		}
		r.stop()
		if observed == 0 || observed != p.total {
			t.Errorf("%d connections are closed, and the Observer is told of %d", p.total, observed)
		}
	})
}
