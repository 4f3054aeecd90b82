package service

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/model"
)

// The outcomes of clients' own connections are the health check. A backend of a Service port has a share of new
// connections in sixteenths:
//
//	full ── failures in a row, while others answer ──► 0: ejected ── the agent connects ──► 1: tried by clients
//	  ▲                                                   ▲                                   │      │
//	  │                                                   └─────────── any failure ───────────┘      │ an answer
//	  └──── time ──── 8 ◄── time ── 4 ◄── time ── 2 ◄────────────────────────────────────────────────┘
//
// When an ejection has lasted its time, the agent connects to the backend first: a client that tries a dead one may
// have to wait in vain. A policy may refuse the agent and let clients pass, so after some failures clients try anyway.
// They do at once where the protocol is not TCP: there silence alone says little.
//
// A new endpoint of a Service with the annotation slow-start begins at 2 and rises in the same way, whatever the mode.
//
// One client's word is not enough to condemn a backend: policies, routes or the client itself may be the reason why it
// gets no answer. So there must be a second client that failed, or one to which another backend answered meanwhile. In
// any case another backend must have answered meanwhile: where none does, the fault is elsewhere. And a failure says
// nothing of a backend that has just answered another connection. The agent makes one before it ejects a backend.

const (
	fullLevel  = 16
	trialLevel = 1
	slowLevel  = 2
	// maxClients is how many of the clients are remembered that failed at one backend.
	maxClients = 4
	// contradicted is for how long after an answer failures do not count. A client's answers are told once a second.
	contradicted = 2 * time.Second
	// maxAsked is how many connections of the agent in a row may fail before clients try.
	maxAsked = 3
	// hearing is for how long answers of a suspected backend are listened for, unless it denies the agent a connection.
	hearing = 300 * time.Millisecond
	// suspectFor is for how long failures count that no other one follows, watchFor for how long answers are listened for
	// after failures that do not count.
	suspectFor, watchFor = 10 * time.Minute, time.Minute
)

// portHealth is what is known of the backends of a Service port, of one address family: only those that have failed,
// or are new.
type portHealth struct {
	backends map[netip.AddrPort]*backendHealth
	answers  [2]answer // the last ones of two different backends
}

// answer is that of a backend.
type answer struct {
	backend netip.AddrPort
	at      time.Time
}

// backendHealth is what outcomes tell of one backend.
type backendHealth struct {
	level    uint8     // its share of new connections, in sixteenths
	fresh    bool      // has not had its full share yet; no mode but eject takes away more than it lacks as a new one
	failing  bool      // so many connections in a row that hints of zones do not count
	failed   int       // connections since its last answer
	refused  bool      // the last one of these
	udp      bool      // and SCTP: silence alone says little
	since    time.Time // the first one after its last answer
	last     time.Time // likewise, or one that does not count
	clients  []failedClient
	answered bool          // since decide was last called
	answer   time.Time     // the last one
	until    time.Time     // when the level changes by time, or the record goes; zero: never
	ejection time.Duration // how long the last one was to last
	ask      bool          // the agent is to connect
	asked    int           // connections of the agent that failed, since clients tried
	suspect  bool          // the agent has connected, or is about to, since the first failure
	denied   bool          // in vain
}

// failedClient is one that failed at a backend, and whether another backend answered it since.
type failedClient struct {
	netip.Addr
	elsewhere bool
}

// learn takes in an outcome. Records are of backends that have failed.
func (p *portHealth) learn(now time.Time, o *model.Outcome) {
	b := p.backends[o.Backend]
	if o.Result == model.Answered {
		p.answer(now, o)
		if b != nil {
			if b.failing && b.level == fullLevel {
				p.forgive()
			}
			b.answers(now)
		}
		return
	}
	if b == nil {
		b = &backendHealth{level: fullLevel}
		p.backends[o.Backend] = b
	}
	if b.last = now; now.Sub(b.answer) < contradicted {
		return
	}
	if b.since.IsZero() {
		b.since = now
	}
	b.failed++
	b.refused, b.udp = o.Result == model.Refused, o.Protocol != model.TCP
	known := slices.ContainsFunc(b.clients, func(c failedClient) bool { return c.Addr == o.Client })
	if !known && len(b.clients) < maxClients {
		b.clients = append(b.clients, failedClient{Addr: o.Client})
	}
}

// hasFailed reports whether there is a backend that is known for more than being new.
func (p *portHealth) hasFailed() bool {
	for _, b := range p.backends {
		if !b.fresh || b.failed > 0 || b.level <= trialLevel {
			return true
		}
	}
	return false
}

// forgive has failures not count in which the first backend that answers again had its part: their cause was a common
// one.
func (p *portHealth) forgive() {
	for _, b := range p.backends {
		if b.level == fullLevel {
			b.failed, b.since, b.clients = 0, time.Time{}, nil
		}
	}
}

// answers has failures so far not count, nor those that are told soon.
func (b *backendHealth) answers(now time.Time) {
	b.failed, b.clients, b.answered, b.answer, b.suspect, b.denied = 0, nil, true, now, false, false
	if b.level > trialLevel { // else it says since when it is ejected
		b.since = time.Time{}
	}
}

func (p *portHealth) answer(now time.Time, o *model.Outcome) {
	i := 0
	if p.answers[0].backend != o.Backend && p.answers[0].backend.IsValid() {
		i = 1
		if p.answers[1].backend != o.Backend && p.answers[0].at.Before(p.answers[1].at) {
			i = 0
		}
	}
	p.answers[i] = answer{o.Backend, now}
	for at, b := range p.backends {
		for j := range b.clients {
			b.clients[j].elsewhere = b.clients[j].elsewhere || at != o.Backend && b.clients[j].Addr == o.Client
		}
	}
}

// decide changes levels, and forgets backends of which nothing is left to know. It reports whether anything that shows
// has changed.
func (p *portHealth) decide(now time.Time, h Health) (changed bool) {
	off := h.Mode == HealthOff || h.Mode == ""
	for at, b := range p.backends {
		was := b.level
		if off && !b.fresh || b.forgotten(now) {
			delete(p.backends, at)
			changed = changed || was < fullLevel
			continue
		}
		if off {
			b.level, b.failed = max(b.level, slowLevel), 0
		}
		p.step(now, at, b, h)
		failed := b.failing
		b.failing, b.answered = b.level == 0 || b.failed >= h.Failures, false
		changed = changed || b.level != was || b.failing != failed
	}
	return changed
}

// forgotten reports whether a backend has its full share, and has had it for so long that its past does not count.
func (b *backendHealth) forgotten(now time.Time) bool {
	if b.level < fullLevel {
		return false
	}
	if b.failed > 0 {
		return now.Sub(b.last) > suspectFor
	}
	return !now.Before(b.until) && now.Sub(b.last) > watchFor
}

// step changes the level of a backend, if it is time to.
func (p *portHealth) step(now time.Time, at netip.AddrPort, b *backendHealth, h Health) {
	timeIsUp := !b.until.IsZero() && !now.Before(b.until)
	switch {
	case b.level == 0 && (b.answered || timeIsUp && (b.udp || b.asked >= maxAsked)):
		b.level, b.until, b.failed, b.clients, b.ask, b.asked = trialLevel, time.Time{}, 0, nil, false, 0
		b.suspect, b.denied = false, false
	case b.level == 0 && timeIsUp:
		b.until, b.ask = time.Time{}, true
	case b.level == 0:
	case b.level == trialLevel && b.failed > 0, b.failed >= h.Failures && p.condemns(at, b) && b.heard(now):
		b.level = 0
		b.eject(now, h)
	case b.level == trialLevel && b.answered:
		b.rise(now, slowLevel, h.Slow)
	case b.level > trialLevel && b.level < fullLevel && b.until.IsZero(): // a new one
		b.rise(now, b.level, h.Slow)
	case b.level > trialLevel && b.level < fullLevel && timeIsUp:
		b.rise(now, 2*b.level, h.Slow)
	}
}

// eject has a backend stay out for a time, twice as long as the last.
func (b *backendHealth) eject(now time.Time, h Health) {
	b.ejection = min(max(2*b.ejection, h.Time), h.MaxTime)
	b.until = now.Add(b.ejection)
}

// slowSteps is how many levels there are between the trial and the full share.
const slowSteps = 3

func (b *backendHealth) rise(now time.Time, level uint8, slow time.Duration) {
	if slow == 0 {
		level = fullLevel
	}
	b.level, b.until = level, now.Add(slow/slowSteps)
	if b.failed == 0 {
		b.since = time.Time{}
	}
	if level == fullLevel { // for so long another ejection takes longer
		b.until, b.fresh = now.Add(2*b.ejection), false
	}
}

// condemns reports whether the failures are the backend's own.
func (p *portHealth) condemns(at netip.AddrPort, b *backendHealth) bool {
	others := slices.ContainsFunc(p.answers[:], func(a answer) bool {
		return a.backend.IsValid() && a.backend != at && !a.at.Before(b.since)
	})
	credible := slices.ContainsFunc(b.clients, func(c failedClient) bool { return c.elsewhere })
	return others && (credible || len(b.clients) > 1 && !b.udp)
}

// heard reports whether a condemned backend could answer meanwhile: other clients, or the agent, which connects.
func (b *backendHealth) heard(now time.Time) bool {
	if !b.suspect && !b.udp {
		b.ask, b.suspect = true, true
	}
	return b.denied || now.Sub(b.since) >= hearing
}

// String says what is known, in words that do not change while nothing else does.
func (b *backendHealth) String() string {
	how := "has not answered"
	if b.refused {
		how = "has refused connections"
	}
	return fmt.Sprintf("%s since %s", how, b.since.UTC().Format(time.TimeOnly+"Z"))
}

// consequence says what is known of an endpoint that does not answer, and what follows from it.
func (s *selection) consequence(c *candidate) string {
	switch {
	case s.health.Mode != HealthEject:
		return c.known.String() + "; it stays in use (backendHealth)"
	case s.crowded:
		return fmt.Sprintf("%s; it stays in use, as a floor of %d%% of the ready endpoints does", c.known, s.health.Floor)
	}
	return c.known.String() + ", while others answered; this node gives it no new connections"
}

// judgement is what is known of the backends of a Service port, and what is to follow.
type judgement struct {
	*portHealth
	Health
}

// judge is what is known of a Service's port in the address family of an address.
func (v *View) judge(s *Service, port string, family netip.Addr) (j judgement) {
	if v.Judge == nil {
		return j
	}
	return v.Judge(s, model.PoolID{Service: port, V6: family.Is6()})
}

func (t *Table) judge(s *Service, id model.PoolID) judgement {
	p := t.ports[id]
	if p == nil {
		return judgement{}
	}
	return judgement{p, t.options.Health.of(s)}
}

// of is what is known of an endpoint; nil: nothing.
func (j judgement) of(c *candidate) *backendHealth {
	if j.portHealth == nil {
		return nil
	}
	return j.backends[c.AddrPort]
}

// judge sets what candidates lack of their share. If more ready ones are dead than may be ejected, none is.
func (s *selection) judge() {
	if s.health.portHealth == nil {
		return
	}
	ready, dead := 0, 0
	for i := range s.candidates {
		c := &s.candidates[i]
		if c.use[clusterPool] != serves || !c.endpoint.takes() {
			continue
		}
		ready++
		if c.known = s.health.of(c); c.known == nil {
			continue
		}
		if c.lacks = c.known.lacks(s.health.Mode); c.dead() {
			dead++
		}
		s.slow = s.slow || c.lacks > 0 && !c.dead()
	}
	if dead <= s.health.room(ready) {
		return
	}
	s.crowded = true
	for i := range s.candidates {
		if c := &s.candidates[i]; c.dead() {
			c.lacks = 0
		}
	}
}

// lacks are the sixteenths of its share that a backend does not get.
func (b *backendHealth) lacks(mode HealthMode) uint8 {
	switch {
	case mode == HealthEject:
		return fullLevel - b.level
	case b.fresh:
		return fullLevel - max(b.level, slowLevel)
	}
	return 0
}

func (c *candidate) dead() bool { return c.lacks == fullLevel }

// answers reports whether the endpoint may be all that a zone, or a node, has. Where none of a zone answers, other
// zones serve, too.
func (s *selection) answers(c *candidate) bool {
	return c.known == nil || !c.known.failing || s.health.Mode != HealthEject || s.crowded
}

// eject takes the dead ones out of a pool, unless they are too many of it.
func (s *selection) eject(pool int) {
	if s.health.portHealth == nil {
		return
	}
	ready, dead := 0, 0
	for i := range s.candidates {
		if c := &s.candidates[i]; c.use[pool] == serves && c.endpoint.takes() {
			ready++
			if c.dead() {
				dead++
			}
		}
	}
	if dead > s.health.room(ready) {
		s.crowded = true
		return
	}
	for i := range s.candidates {
		if c := &s.candidates[i]; c.use[pool] == serves && c.dead() {
			c.use[pool] = ejected
		}
	}
}
