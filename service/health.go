package service

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
)

// HealthMode is what becomes of backends that do not answer new connections.
type HealthMode string

// The values of HealthMode.
const (
	HealthOff     HealthMode = "off"     // outcomes of connections are not looked at
	HealthObserve HealthMode = "observe" // they are shown
	HealthEject   HealthMode = "eject"   // a dead backend gets no new connections for a time
)

// Health says when a backend is ejected, and when it comes back. Package config knows the bounds. It is compared.
type Health struct {
	Mode     HealthMode    // empty: off
	Failures int           // in a row, after which a backend is taken for dead
	Floor    int           // percent of a pool's ready backends that always stay
	Time     time.Duration // of the first ejection; each further one takes twice as long
	MaxTime  time.Duration
	Slow     time.Duration // from the first answer until the backend has its full share again
}

// room is how many of a pool's ready backends may be ejected: the floor stays, and at least one.
func (h Health) room(ready int) int {
	return max(0, ready-max(1, (ready*h.Floor+99)/100))
}

// Annotations of a Service that replace the configured values.
const (
	healthAnnotation = "fairlead.dev/backend-health" // off, observe or eject
	slowAnnotation   = "fairlead.dev/slow-start"     // a duration; it holds for new endpoints, too
)

// maxSlow is the longest slow start.
const maxSlow = 4 * time.Minute

// health reads them.
func (c *serviceReader) health() {
	c.to.health = HealthMode(c.word(healthAnnotation, "the configured one is used",
		string(HealthOff), string(HealthObserve), string(HealthEject)))
	if text, ok := c.from.Annotations[slowAnnotation]; ok {
		d, err := time.ParseDuration(strings.TrimSpace(text))
		if err != nil || d < 0 || d > maxSlow {
			c.add(annotation(slowAnnotation), "%.40q is no time from 0s to %s; the configured one is used", text, maxSlow)
			return
		}
		c.to.slow = uint8(d/time.Second) + 1
	}
}

// of are the settings for a Service.
func (h Health) of(s *Service) Health {
	h.Mode = cmp.Or(s.health, h.Mode)
	if s.slow > 0 {
		h.Slow = time.Duration(s.slow-1) * time.Second
	}
	return h
}

// Learn takes in what became of connections, and the time. The next Update shows the decisions about backends. Learn
// is called a few times a second. While it is eager, it is called more often: some may be ejected, and each failure
// counts. It reports watch if answers matter: some backend is suspected, or tried again. A namespace's outcomes
// concern its own Services only.
func (t *Table) Learn(now time.Time, outcomes []model.Outcome) (watch, eager bool) {
	for i := range outcomes {
		t.learn(now, &outcomes[i])
	}
	for id, p := range t.ports {
		owner := rowOwner(id.Service)
		e := t.entries[owner]
		if e == nil || e.service == nil {
			delete(t.ports, id)
			continue
		}
		h := t.options.Health.of(e.service)
		changed, failed := p.decide(now, h)
		if changed {
			t.decided = append(t.decided, named{e, owner})
		}
		if len(p) == 0 {
			delete(t.ports, id)
		}
		watch, eager = watch || failed, eager || failed && h.Mode == HealthEject
	}
	return watch, eager
}

// learn finds the Service port of an outcome: of the pools at its address, the one that has the backend, or had it.
func (t *Table) learn(now time.Time, o *model.Outcome) {
	for _, id := range t.state.PoolsAt(o.Protocol, o.To) {
		_, has := t.state.Pools[id].At(o.Backend)
		id.Local = false // both pools of a port judge together
		p := t.ports[id]
		switch {
		case !has && p[o.Backend] == nil:
			continue
		case p != nil || o.Result != model.Answered:
			t.port(id).learn(now, o)
		}
		return
	}
}

// Ask is a question of a Table: does a backend that is ejected, or is to be, accept a connection of TCP?
type Ask struct {
	Port     model.PoolID // the Service port and address family
	Backend  netip.AddrPort
	Accepted bool // the answer
}

// Asks are new questions, so many at most. Asked takes each answer.
func (t *Table) Asks(most int) (all []Ask) {
	for id, p := range t.ports {
		for at, b := range p {
			if b.ask && len(all) < most {
				b.ask = false
				all = append(all, Ask{Port: id, Backend: at})
			}
		}
	}
	return all
}

// Asked takes in an answer.
func (t *Table) Asked(now time.Time, a Ask) {
	b, e := t.ports[a.Port][a.Backend], t.entries[rowOwner(a.Port.Service)]
	switch {
	case b == nil || e == nil || e.service == nil:
	case b.level == 0 && a.Accepted:
		b.answered = true
	case b.level > trialLevel && a.Accepted:
		b.answers(now)
	case b.level > trialLevel:
		b.denied = b.failed > 0
	case b.level == 0 && b.until.IsZero(): // else it was ejected meanwhile
		b.asked++
		b.eject(now, t.options.Health.of(e.service))
	}
}

// Rises reports whether the time matters, though outcomes may not: the share of some backend grows.
func (t *Table) Rises() bool { return len(t.ports) > 0 }

// Judges reports whether outcomes matter at all.
func (t *Table) Judges() bool { return t.options.Health.Mode.judges() || t.judged > 0 }

func (m HealthMode) judges() bool { return m == HealthObserve || m == HealthEject }

// countJudged notes a Service that has outcomes looked at, whatever is configured.
func (t *Table) countJudged(s *Service, by int) {
	if s != nil && s.health.judges() {
		t.judged += by
	}
}
