package relay

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

const (
	// suspicion is how long a backend that did not answer is tried last. The Table ejects it after several failures, so
	// they must go on.
	suspicion = time.Second
	// proposalLasts is how long a client's first connection may take to reach its backend while others follow it.
	proposalLasts = 10 * time.Second
	// maxClients bounds the clients whose backend a pool remembers, some 100 bytes each. Beyond it new clients are
	// balanced without being remembered.
	maxClients = 1 << 16
)

// Which backend a client gets:
//
//	the one that it had (affinity) ─ none ─► the one that its other connection is just dialling ─ none ─►
//	the next in turn that is not suspect ─ none ─► the next in turn at all, one client at a time
//
// With the scheduler twos it is no turn that decides, but the load of two.
//
// A backend is suspect for a second after it did not answer. Then one client tries it for all the others, in haste.

// pool hands out backends. Goroutines of connections share it.
type pool struct {
	id model.PoolID

	mu       sync.Mutex
	all      []model.Backend // draining ones, too
	serving  []turn
	next     int // of serving, if all weigh the same
	even     bool
	twos     bool // the scheduler
	affinity time.Duration
	clients  map[netip.Addr]choice
	proposed map[netip.Addr]choice        // of clients whose backend is being dialled
	dirty    map[netip.Addr]struct{}      // clients that the set is to be told of
	suspects map[netip.AddrPort]time.Time // until when
	served   map[netip.AddrPort]*use      // by backend; zero: all that have left
}

// use is what a backend was used for.
type use struct {
	connections uint64
	failed      uint64 // connections that it did not answer
	socket.Carried
}

// turn is a backend and what it has in advance of the others: smooth weighted round robin.
type turn struct {
	model.Backend
	credit int
}

// choice is a client's backend, until it is forgotten.
type choice struct {
	backend netip.AddrPort
	until   time.Time
	saved   time.Time // until when the set clients has some backend for it; zero: it has none
	moves   bool      // its last connection there was in vain
}

func newPool(id model.PoolID) *pool {
	return &pool{
		id: id, clients: map[netip.Addr]choice{}, dirty: map[netip.Addr]struct{}{}, suspects: map[netip.AddrPort]time.Time{},
		served: map[netip.AddrPort]*use{}, proposed: map[netip.Addr]choice{},
	}
}

// set replaces the backends. Those that stay keep their turn.
func (p *pool) set(m model.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	credits := map[netip.AddrPort]int{}
	for _, t := range p.serving {
		credits[t.AddrPort()] = t.credit
	}
	p.all, p.serving, p.even, p.twos = m.Backends, nil, true, m.Scheduler == model.LeastOfTwo
	for _, b := range m.Serving() {
		p.serving = append(p.serving, turn{b, credits[b.AddrPort()]})
		p.even = p.even && b.Weight == p.serving[0].Weight
	}
	if p.affinity = m.Affinity; p.affinity == 0 {
		clear(p.clients)
		clear(p.proposed)
		clear(p.dirty)
	}
	for b := range p.suspects {
		if p.find(b) < 0 {
			delete(p.suspects, b)
		}
	}
	for b, n := range p.served {
		if b.IsValid() && !p.has(b) { // traffic of its last connections is not counted any more
			left := p.use(netip.AddrPort{})
			left.connections += n.connections
			left.failed += n.failed
			delete(p.served, b)
		}
	}
}

// use adds up what a backend is used for.
func (p *pool) use(b netip.AddrPort) *use {
	if p.served[b] == nil {
		p.served[b] = &use{}
	}
	return p.served[b]
}

// carriedBy adds up what is carried to and from a backend.
func (p *pool) carriedBy(b netip.AddrPort) *socket.Carried {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.has(b) {
		return &socket.Carried{}
	}
	return &p.use(b).Carried
}

func (p *pool) find(b netip.AddrPort) int {
	return slices.IndexFunc(p.serving, func(t turn) bool { return t.AddrPort() == b })
}

func (p *pool) has(b netip.AddrPort) bool {
	return slices.ContainsFunc(p.all, func(x model.Backend) bool { return x.AddrPort() == b })
}

// keeps reports whether a backend is in the pool, be it draining.
func (p *pool) keeps(b netip.AddrPort) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.has(b)
}

// choose returns a backend for a client that has tried some in vain. Backends that lately did not answer are tried
// last. The client's time is divided by hurry, as it may as well go to another one after this. With session affinity a
// little delay does not send it to another backend, unless it is the one that finds out. Zero: none is left.
func (p *pool) choose(client netip.Addr, tried []netip.AddrPort, now time.Time) (b model.Backend, hurry time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	others := len(p.serving) > len(tried)+1
	hurry = 1
	if p.affinity == 0 && others {
		hurry = haste
	}
	for _, c := range []choice{p.clients[client], p.proposal(client, now)} {
		if i := p.find(c.backend); i >= 0 && now.Before(c.until) && !slices.Contains(tried, c.backend) {
			return p.serving[i].Backend, hurry
		}
	}
	for _, trusting := range []bool{false, true} {
		may := func(t turn) bool {
			return !slices.Contains(tried, t.AddrPort()) && (trusting || !now.Before(p.suspects[t.AddrPort()]))
		}
		if i := p.turn(may); i >= 0 {
			b := p.serving[i].Backend
			if _, suspect := p.suspects[b.AddrPort()]; suspect && !trusting {
				p.suspects[b.AddrPort()] = now.Add(proposalLasts) // one client at a time finds out
				if others {
					hurry *= haste
				}
			}
			p.propose(client, b.AddrPort(), now)
			return b, hurry
		}
	}
	return model.Backend{}, 0
}

// proposal is what was proposed, unless that has been tried in vain meanwhile.
func (p *pool) proposal(client netip.Addr, now time.Time) choice {
	c := p.proposed[client]
	if now.Before(p.suspects[c.backend]) {
		return choice{}
	}
	return c
}

// propose has the client's other connections go to the same backend while this one is being dialled.
func (p *pool) propose(client netip.Addr, b netip.AddrPort, now time.Time) {
	if p.affinity > 0 && len(p.proposed) < maxClients {
		p.proposed[client] = choice{backend: b, until: now.Add(proposalLasts)}
	}
}

// turn is whose turn it is among the backends that may have one; -1: there is none.
func (p *pool) turn(may func(turn) bool) int {
	if p.twos {
		return p.lessLoaded(may)
	}
	if p.even {
		for range p.serving {
			i := p.next % len(p.serving)
			p.next = i + 1
			if may(p.serving[i]) {
				return i
			}
		}
		return -1
	}
	best, total := -1, 0
	for i := range p.serving {
		if !may(p.serving[i]) {
			continue
		}
		total += int(p.serving[i].Weight)
		p.serving[i].credit += int(p.serving[i].Weight)
		if best < 0 || p.serving[i].credit > p.serving[best].credit {
			best = i
		}
	}
	if best >= 0 {
		p.serving[best].credit -= total
	}
	return best
}

// lessLoaded is of two backends, drawn by weight, the one that has fewer open connections for its weight.
func (p *pool) lessLoaded(may func(turn) bool) int {
	one := p.drawn(may)
	if one < 0 {
		return one
	}
	other := p.drawn(func(t turn) bool { return t.Backend != p.serving[one].Backend && may(t) })
	if other >= 0 && p.open(other)*int64(p.serving[one].Weight) < p.open(one)*int64(p.serving[other].Weight) {
		return other
	}
	return one
}

// drawn is a backend by chance, by its weight; -1: there is none. Each takes the place of those before it with the
// chance that its weight has of theirs and its own (reservoir sampling). So one pass is enough, without their sum.
func (p *pool) drawn(may func(turn) bool) int {
	chosen, total := -1, 0
	for i, t := range p.serving {
		if !may(t) {
			continue
		}
		if total += int(t.Weight); rand.N(total) < int(t.Weight) {
			chosen = i
		}
	}
	return chosen
}

// open is how many connections a backend has.
func (p *pool) open(i int) int64 {
	if n := p.served[p.serving[i].AddrPort()]; n != nil {
		return n.Open.Load()
	}
	return 0
}

// answered counts a connection, and remembers the client's backend, for the pool's time from now on.
func (p *pool) answered(client netip.Addr, b netip.AddrPort, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.suspects, b)
	p.begun(client, b, now, maxClients)
}

// attempted does the same for a client that no backend has answered yet. The address may be forged, so such clients may
// take only half of the places.
func (p *pool) attempted(client netip.Addr, b netip.AddrPort, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begun(client, b, now, maxClients/2)
}

// begun counts a connection. The caller holds the lock.
func (p *pool) begun(client netip.Addr, b netip.AddrPort, now time.Time, most int) {
	if !p.has(b) {
		b = netip.AddrPort{}
	}
	p.use(b).connections++
	p.bind(client, b, now, most)
}

// confirmed remembers the backend of a client that it has answered.
func (p *pool) confirmed(client netip.Addr, b netip.AddrPort, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.suspects, b)
	if p.has(b) {
		p.bind(client, b, now, maxClients)
	}
}

// bind remembers a client's backend if there are less than so many clients. Where the session's backend has answered
// since it failed, a connection that began before moves nothing.
func (p *pool) bind(client netip.Addr, b netip.AddrPort, now time.Time, most int) {
	if p.affinity == 0 || !b.IsValid() || defect.Is(defect.UserspaceAffinity) {
		return
	}
	old, known := p.clients[client]
	switch {
	case !known && len(p.clients) >= most:
		return // until Audit has forgotten some
	case known && old.backend != b && !old.moves && now.Before(old.until) && p.find(old.backend) >= 0:
		return
	}
	delete(p.proposed, client)
	p.note(client, choice{backend: b, until: now.Add(p.affinity)})
}

// forget deletes the clients whose time has run out. The caller holds the lock.
func (p *pool) forget(now time.Time) {
	for client, c := range p.clients {
		if !now.Before(c.until) {
			delete(p.clients, client)
			delete(p.dirty, client)
		}
	}
	maps.DeleteFunc(p.proposed, func(_ netip.Addr, c choice) bool { return !now.Before(c.until) })
}

// trust has a backend not be tried last any more.
func (p *pool) trust(b netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.suspects, b)
}

// missed lets a client's session move from a backend that did not answer, unless that answers before another one.
func (p *pool) missed(client netip.Addr, b netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.clients[client]; c.backend == b {
		c.moves = true
		p.clients[client] = c
	}
}

// failed has a backend tried last for a while.
func (p *pool) failed(b netip.AddrPort, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.find(b) >= 0 {
		p.suspects[b] = now.Add(suspicion)
	}
	if !p.has(b) {
		b = netip.AddrPort{}
	}
	p.use(b).failed++
}

// remembered is the backend that a client's connections go to.
func (p *pool) remembered(client netip.Addr, now time.Time) (netip.AddrPort, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.clients[client]
	return c.backend, ok && now.Before(c.until) && p.find(c.backend) >= 0
}
