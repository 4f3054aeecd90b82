package conntrack

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// beside is a look at flows that goes on while the caller may do other things. It does not know the State, which the
// caller changes meanwhile, but what it needs of it.
type beside struct {
	mu   sync.Mutex              // of the plane's udp, too
	gone map[model.Key]bool      // UDP frontends that were deleted since the last sweep, as Any
	came map[netip.AddrPort]bool // TCP frontends that forward, since attempts were looked at
	plan *planned                // the next look; nil: none
	next time.Time               // it is not earlier
}

// planned is a look that has not begun.
type planned struct {
	look
	rests bool // afterwards, for as long as it took
	ended chan struct{}
	err   error // once that is closed
}

// manyFlows are so many that a look at them takes long: some 0.05 s, and twenty times that on a busy node.
const manyFlows = 1 << 16

// seek has flows looked at beside. The caller waits for that, unless there are many. If a look fails, the next Audit
// looks at all flows.
func (p *plane) seek(of look) error {
	if len(of.udp) == 0 && !of.attempts {
		return nil
	}
	n, err := tracked.Count(p.conntrack)
	many := err == nil && n > manyFlows
	b := &p.beside
	b.mu.Lock()
	if b.plan == nil {
		b.plan = &planned{ended: make(chan struct{}), rests: many}
		time.AfterFunc(time.Until(b.next), p.lookBeside)
	}
	plan := b.plan
	for _, f := range of.udp {
		plan.add(f)
	}
	plan.attempts = plan.attempts || of.attempts
	plan.sweep = plan.sweep || of.sweep
	b.mu.Unlock()
	if many {
		return nil
	}
	<-plan.ended
	return plan.err
}

// lookBeside carries out what is planned.
func (p *plane) lookBeside() {
	p.looks.Lock()
	defer p.looks.Unlock()
	b := &p.beside
	b.mu.Lock()
	plan, v := b.plan, besideView{p, maps.Clone(b.gone), b.came}
	b.plan = nil
	if plan != nil && plan.attempts {
		b.came = map[netip.AddrPort]bool{}
	}
	b.mu.Unlock()
	if plan == nil { // Close was faster
		return
	}
	defer close(plan.ended)
	begun := time.Now()
	plan.err = p.forget(p.looks.conntrack, v, plan.look)
	b.mu.Lock()
	defer b.mu.Unlock()
	if plan.rests {
		b.next = time.Now().Add(time.Since(begun))
	}
	if plan.err != nil {
		p.attempts.failed.Store(true)
		return
	}
	if plan.sweep {
		maps.DeleteFunc(b.gone, func(at model.Key, _ bool) bool { return v.gone[at] })
	}
}

// expects reports whether clients may have come too early to a TCP frontend.
func (b *beside) expects() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.came) > 0
}

// reset is called when all flows have been looked at.
func (b *beside) reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone, b.came = map[model.Key]bool{}, map[netip.AddrPort]bool{}
}

// besideView is a view of what the plane remembers: of UDP all frontends, of TCP those that came. Only looks for
// attempts ask for the latter.
type besideView struct {
	*plane
	gone map[model.Key]bool
	came map[netip.AddrPort]bool
}

func (v besideView) frontend(at model.Key, to netip.AddrPort) (known, forwards bool) {
	v.beside.mu.Lock()
	defer v.beside.mu.Unlock()
	pool, known := v.udp.rows[at]
	if pool != nil {
		_, forwards = model.Pool{Backends: pool.backends}.At(to)
	}
	return known, forwards
}

func (v besideView) opened(at netip.AddrPort) bool { return v.came[at] }

func (v besideView) removed(at model.Key) bool { return v.gone[at] }

// udpRows are the frontends of UDP as of the last call.
type udpRows struct {
	rows  map[model.Key]*udpPool // nil: it does not forward
	pools map[model.PoolID]*udpPool
}

type udpPool struct {
	id       model.PoolID
	backends []model.Backend
	users    int
}

func (r *udpRows) clear() {
	clear(r.rows)
	clear(r.pools)
}

// lost takes over changed pools, and has flows looked for to the backends that those have lost.
func (r *udpRows) lost(d model.Delta[model.PoolID, model.Pool], of *look) {
	for id, now := range d.Set.All() {
		u := r.pools[id]
		if u == nil {
			continue
		}
		for _, b := range u.backends {
			if _, ok := now.At(b.AddrPort()); !ok {
				of.add(tracked.Filter{Protocol: model.UDP, Answers: b.AddrPort()})
			}
		}
		u.backends = now.Backends
	}
}

func (r *udpRows) note(s *model.State, key model.Key, f model.Frontend) {
	if f.Verdict != model.Forward {
		r.rows[key] = nil
		return
	}
	u := r.pools[f.Pool]
	if u == nil {
		u = &udpPool{id: f.Pool}
		r.pools[f.Pool] = u
	}
	u.backends = s.Pools[f.Pool].Backends
	u.users++
	r.rows[key] = u
}

func (r *udpRows) drop(key model.Key) {
	u := r.rows[key]
	delete(r.rows, key)
	if u == nil {
		return
	}
	if u.users--; u.users == 0 {
		delete(r.pools, u.id)
	}
}
