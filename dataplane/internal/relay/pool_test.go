package relay

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// turns are the last digits of the backends that so many clients get.
func turns(p *pool, n int, now time.Time, tried ...netip.AddrPort) string {
	var out strings.Builder
	for i := range n {
		b, hurry := p.choose(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), tried, now)
		if hurry == 0 {
			return out.String() + "-"
		}
		fmt.Fprint(&out, b.Port%10)
	}
	return out.String()
}

func backend(n uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 1, 1}), 8080+n)
}

func poolOf(weights ...uint16) (m model.Pool) {
	for i, w := range weights {
		b := model.BackendAt(backend(uint16(i)))
		b.Weight = w
		m.Backends = append(m.Backends, b)
	}
	return m
}

func TestPool_turns(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		weights []uint16
		want    string
	}{
		{[]uint16{1, 1, 1}, "012012"},
		{[]uint16{7, 7}, "0101"},
		{[]uint16{5, 1, 1}, "00102000010200"},
		{[]uint16{1, 0, 1}, "0202"}, // one is draining
	} {
		p := newPool(model.PoolID{})
		p.set(poolOf(c.weights...))
		if got := turns(p, len(c.want), now); got != c.want {
			t.Errorf("weights %v: %s, not %s", c.weights, got, c.want)
		}
	}
}

func TestPool_suspects(t *testing.T) {
	now := time.Now()
	p := newPool(model.PoolID{})
	p.set(poolOf(1, 1, 1))
	p.failed(backend(1), now)
	if got := turns(p, 4, now); got != "0202" {
		t.Error(got)
	}
	if got := turns(p, 2, now, backend(0), backend(2)); got != "11" { // who is left
		t.Error(got)
	}
	if got := turns(p, 1, now, backend(0), backend(1), backend(2)); got != "-" {
		t.Error(got)
	}
	p.failed(backend(0), now)
	p.trust(backend(0)) // as it has answered after all
	if got := turns(p, 4, now); strings.Count(got, "0") != 2 {
		t.Error(got)
	}
	later := now.Add(2 * suspicion)
	if got := turns(p, 9, later); strings.Count(got, "1") != 1 { // one client finds out for all
		t.Error(got)
	}
	p.answered(netip.MustParseAddr("10.0.0.9"), backend(1), later)
	if got := turns(p, 9, later); strings.Count(got, "1") != 3 {
		t.Error(got)
	}
}

// TestPool_findsOut has a backend refuse all. Clients go on to find that out, one at a time, or it would not be ejected.
// They lose less time than the first one.
func TestPool_findsOut(t *testing.T) {
	now := time.Now()
	p := newPool(model.PoolID{})
	p.set(poolOf(1, 1, 1))
	var hurries []time.Duration
	for range 600 { // in ten seconds
		b, hurry := p.choose(netip.MustParseAddr("10.0.0.9"), nil, now)
		if b.AddrPort() == backend(1) {
			p.failed(backend(1), now)
			hurries = append(hurries, hurry)
		}
		now = now.Add(time.Second / 60)
	}
	if n := len(hurries); n < 9 || n > 11 || slices.Min(hurries[1:]) <= hurries[0] {
		t.Errorf("a backend that refuses was tried %d times in ten seconds, its time divided by %d", n, hurries)
	}
}

func TestPool_affinity(t *testing.T) {
	now, client := time.Now(), netip.MustParseAddr("10.0.0.9")
	p := newPool(model.PoolID{})
	m := poolOf(1, 1, 1)
	m.Affinity = time.Minute
	p.set(m)
	p.answered(client, backend(1), now)
	for range 5 {
		if b, _ := p.choose(client, nil, now.Add(59*time.Second)); b.AddrPort() != backend(1) {
			t.Fatal(b)
		}
	}
	if b, _ := p.choose(client, []netip.AddrPort{backend(1)}, now); b.AddrPort() == backend(1) {
		t.Error("tried twice")
	}
	for _, want := range []uint16{1, 2} {
		p.answered(client, backend(2), now)
		if b, _ := p.remembered(client, now); b != backend(want) {
			t.Errorf("a session at %s, not %s", b, backend(want))
		}
		p.missed(client, backend(1))
	}
	if _, ok := p.remembered(client, now.Add(time.Minute)); ok {
		t.Error("remembered for too long")
	}
	m.Backends = m.Backends[:1]
	p.set(m)
	if b, _ := p.choose(client, nil, now); b.AddrPort() != backend(0) {
		t.Error("of a backend that has left")
	}
}

// Connections of a client that begin together go to one backend, though none of them has reached it yet, and if that
// does not answer, to one other.
func TestPool_together(t *testing.T) {
	now, client := time.Now(), netip.MustParseAddr("10.0.0.9")
	p := newPool(model.PoolID{})
	m := poolOf(1, 1, 1, 1)
	m.Affinity = time.Minute
	p.set(m)
	for _, tried := range [][]netip.AddrPort{nil, {backend(0)}} {
		first, _ := p.choose(client, tried, now)
		if second, _ := p.choose(client, tried, now); second != first {
			t.Errorf("%s and %s, without %v", first.AddrPort(), second.AddrPort(), tried)
		}
	}
	if other, _ := p.choose(netip.MustParseAddr("10.0.0.10"), nil, now); other.AddrPort() == backend(1) {
		t.Error("another client follows, too")
	}
	if _, ok := p.remembered(client, now); ok {
		t.Error("no backend has answered, but one is remembered")
	}
}

// TestPool_strangers has many clients ask without an answer: they must not keep others from being remembered.
func TestPool_strangers(t *testing.T) {
	now := time.Now()
	p := newPool(model.PoolID{})
	m := poolOf(1, 1)
	m.Affinity = time.Hour
	p.set(m)
	for i := range uint32(maxClients) {
		p.attempted(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), backend(0), now)
	}
	client := netip.MustParseAddr("10.0.0.9")
	p.attempted(client, backend(1), now)
	p.confirmed(client, backend(1), now)
	if b, ok := p.remembered(client, now); !ok || b != backend(1) {
		t.Error("a client that was answered is not remembered")
	}
	if _, ok := p.remembered(netip.MustParseAddr("11.0.0.1"), now); !ok {
		t.Error("the first ones that asked are not remembered")
	}
}

// TestPool_leastOfTwo: of three backends one takes five times as long. The slowest hundredth of the clients wait half
// as long as with turns, at most.
func TestPool_leastOfTwo(t *testing.T) {
	seed := sample.Seed(t)
	inTurn, ofTwo := slowest(seed, ""), slowest(seed, model.LeastOfTwo)
	t.Logf("the slowest hundredth takes %.1f in turn, %.1f by least of two", inTurn, ofTwo)
	if 2*ofTwo > inTurn {
		t.Error("that is more than half")
	}
}

// slowest is the 99th percentile of the times that clients take. They come at random, and each backend serves one after
// the other.
func slowest(seed uint64, scheduler string) float64 {
	const clients, load = 20000, 0.9 // of what turns can carry
	chance := rand.New(rand.NewPCG(seed, 0))
	m := poolOf(1, 1, 1)
	m.Scheduler = scheduler
	p := newPool(model.PoolID{})
	p.set(m)
	takes := map[netip.AddrPort]float64{backend(0): 1, backend(1): 1, backend(2): 5}
	free := map[netip.AddrPort]float64{} // when a backend has served all that it has
	type end struct {
		at float64
		of netip.AddrPort
	}
	var open []end
	var times []float64
	for now := 0.0; len(times) < clients; now += chance.ExpFloat64() * 5 / 3 / load {
		open = slices.DeleteFunc(open, func(e end) bool {
			if e.at > now {
				return false
			}
			p.carriedBy(e.of).Open.Add(-1)
			return true
		})
		b, _ := p.choose(netip.MustParseAddr("10.0.0.9"), nil, time.Time{})
		to := b.AddrPort()
		p.carriedBy(to).Open.Add(1)
		free[to] = max(free[to], now) + takes[to]
		open = append(open, end{free[to], to})
		times = append(times, free[to]-now)
	}
	slices.Sort(times)
	return times[clients*99/100]
}

// TestPool_leastOfTwoLeft: who was tried is not drawn, and weights count.
func TestPool_leastOfTwoLeft(t *testing.T) {
	m := poolOf(1, 3, 0)
	m.Scheduler = model.LeastOfTwo
	p := newPool(model.PoolID{})
	p.set(m)
	now := time.Now()
	p.carriedBy(backend(0)).Open.Store(2)
	p.carriedBy(backend(1)).Open.Store(5)
	if got := turns(p, 9, now); got != "111111111" {
		t.Error(got)
	}
	p.carriedBy(backend(1)).Open.Store(7)
	if got := turns(p, 9, now); got != "000000000" {
		t.Error(got)
	}
	if got := turns(p, 3, now, backend(0)); got != "111" {
		t.Error(got)
	}
	if got := turns(p, 1, now, backend(0), backend(1)); got != "-" {
		t.Error(got)
	}
}
