package service

import (
	"fmt"
	"net/netip"
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
	// contradicted is for how long after an answer failures do not count. A client's answers are told once a second.
	contradicted = 2 * time.Second
	// maxAsked is how many connections of the agent in a row may fail before clients try.
	maxAsked = 3
	// hearing is for how long answers of a suspected backend are listened for, unless it denies the agent a connection.
	hearing = 300 * time.Millisecond
	// suspectFor is for how long failures count that no other one follows, watchFor for how long answers are listened for
	// after failures that do not count.
	suspectFor, watchFor = 10 * time.Minute, time.Minute
	// slowSteps is how many levels there are between the trial and the full share.
	slowSteps = 3
)

// portHealth is what is known of the backends of a Service port, of one address family: only those that have failed,
// or are new.
type portHealth map[netip.AddrPort]*backendHealth

// backendHealth is what outcomes tell of one backend.
type backendHealth struct {
	failures
	level    uint8         // its share of new connections, in sixteenths
	fresh    bool          // has not had its full share yet; no mode but eject takes away more than it lacks as a new one
	failing  bool          // so many connections in a row that hints of zones do not count
	last     time.Time     // the last failure, or one that does not count
	answered bool          // since decide was last called
	answer   time.Time     // the last one
	until    time.Time     // when the level changes by time, or the record goes; zero: never
	ejection time.Duration // how long the last one was to last
	ask      bool          // the agent is to connect
	asked    int           // connections of the agent that failed, since clients tried
}

// failures are those in a row, since the last answer.
type failures struct {
	failed    int
	since     time.Time  // the first one
	refused   bool       // the last one
	udp       bool       // and SCTP: silence alone says little
	client    netip.Addr // of the last one
	several   bool       // clients
	elsewhere bool       // another backend has answered meanwhile
	credible  bool       // likewise, a client that has failed here
	suspect   bool       // the agent has connected, or is about to
	denied    bool       // in vain
}

// learn takes in an outcome. Records are of backends that have failed.
func (p portHealth) learn(now time.Time, o *model.Outcome) {
	b := p[o.Backend]
	if o.Result == model.Answered {
		for at, other := range p {
			if at != o.Backend && other.failed > 0 {
				other.elsewhere, other.credible = true, other.credible || other.client == o.Client
			}
		}
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
		p[o.Backend] = b
	}
	if b.last = now; now.Sub(b.answer) < contradicted {
		return
	}
	if b.failed == 0 && b.level > trialLevel { // else it says since when it is ejected
		b.since = now
	}
	b.failed++
	b.refused, b.udp = o.Result == model.Refused, o.Protocol != model.TCP
	b.several = b.several || b.client.IsValid() && b.client != o.Client
	b.client = o.Client
}

// forgive has failures not count in which the first backend that answers again had its part: their cause was a common
// one.
func (p portHealth) forgive() {
	for _, b := range p {
		if b.level == fullLevel {
			b.failures = failures{}
		}
	}
}

// answers has failures so far not count, nor those that are told soon.
func (b *backendHealth) answers(now time.Time) {
	b.answered, b.answer = true, now
	b.forget()
}

// forget leaves what people are told.
func (f *failures) forget() { *f = failures{since: f.since, refused: f.refused} }

// decide changes levels, and forgets backends of which nothing is left to know. It reports whether anything that shows
// has changed, and whether there is a backend that is known for more than being new.
func (p portHealth) decide(now time.Time, h Health) (changed, failed bool) {
	off := h.Mode == HealthOff || h.Mode == ""
	for at, b := range p {
		was := b.level
		if off && !b.fresh || b.forgotten(now) {
			delete(p, at)
			changed = changed || was < fullLevel
			continue
		}
		if off {
			b.level, b.failed = max(b.level, slowLevel), 0
		}
		b.step(now, h)
		failing := b.level == 0 || b.failed >= h.Failures
		changed = changed || b.level != was || b.failing != failing
		failed = failed || !b.fresh || b.failed > 0 || b.level <= trialLevel
		b.failing, b.answered = failing, false
	}
	return changed, failed
}

// forgotten reports whether a backend has its full share, and has had it for so long that its past does not count.
func (b *backendHealth) forgotten(now time.Time) bool {
	if b.failed > 0 {
		return b.level == fullLevel && now.Sub(b.last) > suspectFor
	}
	return b.level == fullLevel && !now.Before(b.until) && now.Sub(b.last) > watchFor
}

// step changes the level of a backend, if it is time to.
func (b *backendHealth) step(now time.Time, h Health) {
	timeIsUp := !b.until.IsZero() && !now.Before(b.until)
	switch {
	case b.level == 0 && (b.answered || timeIsUp && (b.udp || b.asked >= maxAsked)):
		b.level, b.until, b.ask, b.asked = trialLevel, time.Time{}, false, 0
		b.forget()
	case b.level == 0 && timeIsUp:
		b.until, b.ask = time.Time{}, true
	case b.level == 0:
	case b.level == trialLevel && b.failed > 0, b.failed >= h.Failures && b.condemned() && b.heard(now):
		b.level = 0
		b.eject(now, h)
	case b.level > trialLevel && b.level < fullLevel && b.until.IsZero(): // a new one
		b.rise(now, b.level, h.Slow)
	case b.level == trialLevel && b.answered, b.level > trialLevel && b.level < fullLevel && timeIsUp:
		b.rise(now, 2*b.level, h.Slow)
	}
}

// eject has a backend stay out for a time, twice as long as the last.
func (b *backendHealth) eject(now time.Time, h Health) {
	b.ejection = min(max(2*b.ejection, h.Time), h.MaxTime)
	b.until = now.Add(b.ejection)
}

func (b *backendHealth) rise(now time.Time, level uint8, slow time.Duration) {
	if slow == 0 {
		level = fullLevel
	}
	b.level, b.until = level, now.Add(slow/slowSteps)
	if level == fullLevel { // for so long another ejection takes longer
		b.until, b.fresh = now.Add(2*b.ejection), false
	}
}

// condemned reports whether the failures are the backend's own.
func (f *failures) condemned() bool { return f.elsewhere && (f.credible || f.several && !f.udp) }

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

// judge is what is known of the backends of a Service port, and what is to follow.
func (t *Table) judge(s *Service, id model.PoolID) (portHealth, Health) {
	return t.ports[id], t.options.Health.of(s)
}

// judge sets what candidates lack of their share. If more ready ones are dead than may be ejected, none is.
func (s *selection) judge() {
	if len(s.known) == 0 {
		return
	}
	for i := range s.candidates {
		c := &s.candidates[i]
		if !c.takes(clusterPool) {
			continue
		}
		if c.known = s.known[c.AddrPort]; c.known != nil {
			c.lacks = c.known.lacks(s.health.Mode)
			s.slow = s.slow || c.lacks > 0 && !c.dead()
		}
	}
	s.crowded = s.tooManyDead(clusterPool)
	for i := range s.candidates {
		if c := &s.candidates[i]; s.crowded && c.dead() {
			c.lacks = 0
		}
	}
}

// tooManyDead reports whether more of a pool's ready endpoints are dead than may be ejected.
func (s *selection) tooManyDead(pool int) bool {
	ready, dead := 0, 0
	for i := range s.candidates {
		if c := &s.candidates[i]; c.takes(pool) {
			if ready++; c.dead() {
				dead++
			}
		}
	}
	return dead > s.health.room(ready)
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
	if s.tooManyDead(pool) {
		s.crowded = true
		return
	}
	for i := range s.candidates {
		if c := &s.candidates[i]; c.use[pool] == serves && c.dead() {
			c.use[pool] = ejected
		}
	}
}
