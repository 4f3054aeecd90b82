package service

import (
	"fmt"
	"net/netip"
	"slices"
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

// HealthModes are all of them.
func HealthModes() []HealthMode { return []HealthMode{HealthOff, HealthObserve, HealthEject} }

// Health says when a backend is ejected, and when it comes back. It is compared.
type Health struct {
	Mode     HealthMode    // empty: off
	Failures int           // in a row, after which a backend is taken for dead
	Floor    int           // percent of a pool's ready backends that always stay
	Time     time.Duration // of the first ejection; each further one takes twice as long
	MaxTime  time.Duration
	Slow     time.Duration // from the first answer until the backend has its full share again
}

// Validate names the setting that is wrong.
func (h Health) Validate() error {
	switch {
	case h.Mode != "" && !slices.Contains(HealthModes(), h.Mode):
		return fmt.Errorf("mode: %q is none of off, observe, eject", h.Mode)
	case h.Failures < 1 || h.Failures > 100:
		return fmt.Errorf("failures: %d is not from 1 to 100", h.Failures)
	case h.Floor < 1 || h.Floor > 100:
		return fmt.Errorf("floorPercent: %d is not from 1 to 100", h.Floor)
	case h.Time < time.Second || h.MaxTime < h.Time || h.MaxTime > time.Hour:
		return fmt.Errorf("ejectionTime: %s to %s (maxEjectionTime) is not within 1s and 1h", h.Time, h.MaxTime)
	case h.Slow < 0 || h.Slow > maxSlow:
		return fmt.Errorf("slowStart: %s is not from 0s to %s", h.Slow, maxSlow)
	}
	return nil
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
	if text, ok := c.from.Annotations[healthAnnotation]; ok {
		if i := slices.Index(HealthModes(), HealthMode(text)); i >= 0 {
			c.to.health = uint8(i + 1)
		} else {
			c.add(annotation(healthAnnotation), "%.40q is none of off, observe, eject; the configured one is used", text)
		}
	}
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
	if s.health > 0 {
		h.Mode = HealthModes()[s.health-1]
	}
	if s.slow > 0 {
		h.Slow = time.Duration(s.slow-1) * time.Second
	}
	return h
}

// Learn takes in what became of connections, and the time. The next Update shows the decisions about backends. It
// is called a few times a second. A namespace's outcomes concern its own Services only.
func (t *Table) Learn(now time.Time, outcomes []model.Outcome) {
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
		if p.decide(now, t.options.Health.of(e.service)) {
			t.decided = append(t.decided, named{e, owner})
		}
		if len(p.backends) == 0 {
			delete(t.ports, id)
		}
	}
}

// learn finds the Service port of an outcome.
func (t *Table) learn(now time.Time, o *model.Outcome) {
	id, ok := t.poolOf(o)
	if !ok {
		return
	}
	if t.ports[id] == nil && o.Result == model.Answered {
		return
	}
	t.port(id).learn(now, o)
}

// poolOf names the pool through which a connection went, if it has the backend or has it ejected.
func (t *Table) poolOf(o *model.Outcome) (id model.PoolID, ok bool) {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := model.Key{Addr: o.To.Addr(), Port: o.To.Port(), Protocol: o.Protocol, Scope: scope}
		f, exists := t.state.Frontends[key]
		if !exists || f.Verdict != model.Forward {
			continue
		}
		id = f.Pool
		id.Local = false // both pools of a port judge together
		if p := t.ports[id]; p != nil && p.backends[o.Backend] != nil {
			return id, true
		}
		if _, ok := t.state.Pools[f.Pool].At(o.Backend); ok {
			return id, true
		}
	}
	return id, false
}

// Ask is a question of a Table: does a backend that is ejected, or is to be, accept a connection of TCP?
type Ask struct {
	Port    model.PoolID // the Service port and address family
	Backend netip.AddrPort
}

// Asks are the questions since it was last called. Asked takes each answer.
func (t *Table) Asks() (all []Ask) {
	for id, p := range t.ports {
		for at, b := range p.backends {
			if b.ask {
				b.ask = false
				all = append(all, Ask{id, at})
			}
		}
	}
	return all
}

// Asked takes in whether a backend has accepted a connection.
func (t *Table) Asked(now time.Time, a Ask, accepted bool) {
	p, e := t.ports[a.Port], t.entries[rowOwner(a.Port.Service)]
	if p == nil || e == nil || e.service == nil {
		return
	}
	b := p.backends[a.Backend]
	switch {
	case b == nil:
	case b.level == 0 && accepted:
		b.answered = true
	case b.level > trialLevel && accepted:
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
func (t *Table) Judges() bool {
	return t.options.Health.Mode == HealthObserve || t.options.Health.Mode == HealthEject
}

// Watches reports whether answers matter at present: some backend is suspected, or tried again.
func (t *Table) Watches() bool {
	for _, p := range t.ports {
		if p.hasFailed() {
			return true
		}
	}
	return false
}

// Ejects reports whether one of these may be ejected, so that each failure counts at once.
func (t *Table) Ejects() bool {
	for id, p := range t.ports {
		e := t.entries[rowOwner(id.Service)]
		if e != nil && e.service != nil && t.options.Health.of(e.service).Mode == HealthEject && p.hasFailed() {
			return true
		}
	}
	return false
}
