package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/takeover"
)

// heir is a data plane that removes what other planes of ours have left, in this or an earlier process, once its own
// rules are in force: at every moment there is somebody who translates. What cannot be removed is an error of Sync that
// keeps nobody from serving; the engine says it and tries again.
//
// While it waits it removes nothing: another plane is in force, which may stay so, or is about to be.
type heir struct {
	opened
	clears  sync.Mutex // held by who removes what others have left: the loop, or who has changed the data plane
	self    plane
	others  func() []plane // all of them; only tests have some of their own
	log     *slog.Logger
	cleared func() // is called when nothing is left of others, but what connections still need
	alone   bool   // so it is
	waits   bool   // another plane is in force, or being programmed
	// inherits: the sessions of other planes have to be read from the kernel, as no other plane of this process has any.
	// learned: the plane has taken them in.
	inherits, learned bool
	served            bool // the plane has had rows, now or before it was kept and taken back
	lacks             bool // there are rows that the plane cannot have in force
	retired           retired
	carried           *carrying
	left              []remainder // of the last look
}

// remainder is what was found of another plane.
type remainder struct {
	plane       string
	removed     bool
	connections int // that need what is left
}

// drainTime is for how long connections may need what another plane has left.
const drainTime = takeover.DefaultDrain

// retired is about connections that need what another plane has left.
type retired struct {
	since, look time.Time     // when they were found, and when to look the next time; zero: there are none
	pause       time.Duration // between two looks
}

// legacy is what a plane needs that will be the only one.
type legacy struct {
	kept    *carrying    // what others carry, and it itself may have carried; nil: nothing is kept
	cleared func(opened) // see heir
	opening
}

// inherit opens such a plane.
func (s planeSettings) inherit(c dataplane.Config, l legacy) (opened, error) {
	unknown := map[string]error{}
	for _, p := range planes() {
		if p.Name == s.name {
			continue
		}
		left, err := p.Inspect()
		if err != nil { // the plane that is wanted may well work; Sync will look again
			unknown[p.Name] = err
		}
		c.LocalnetWasOff = c.LocalnetWasOff || left.LocalnetWasOff
	}
	o, taken, err := l.open(c, s)
	if err != nil {
		return o, err
	}
	for name, err := range unknown {
		if c.Log != nil && !o.unprivileged() {
			c.Log.Warn("cannot tell whether another data plane has left something", "plane", name, "error", err)
		}
	}
	self, err := planeNamed(o.settings.name)
	h := &heir{
		opened: o, self: self, others: planes, log: c.Log, cleared: func() { l.cleared(o) }, carried: l.kept,
		served: taken, inherits: !l.second, waits: l.second,
	}
	o.Dataplane, o.heir = h, h
	return o, err
}

// open takes back a plane that carries something still, or makes one.
func (l legacy) open(c dataplane.Config, s planeSettings) (o opened, taken bool, err error) {
	if o, ok := l.kept.take(s); ok {
		return o, true, nil
	}
	if !l.exact {
		o, err = s.open(c)
		return o, false, err
	}
	o, err = s.openItself(c)
	return o, false, permitted(err)
}

// Sync implements dataplane.Dataplane.
func (h *heir) Sync(ctx context.Context, s *model.State) error {
	h.served = true
	h.inherit(ctx, s)
	return h.synced(ctx, s, h.Dataplane.Sync(ctx, s))
}

// Repair implements dataplane.Dataplane.
func (h *heir) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	return h.synced(ctx, s, h.Dataplane.Repair(ctx, s, r))
}

// synced removes what others have left, now that the plane holds all rows.
func (h *heir) synced(ctx context.Context, s *model.State, err error) error {
	h.lacks = errors.Is(err, dataplane.ErrPartial)
	h.learned = h.learned || err == nil || h.lacks
	if err != nil && !errors.Is(err, dataplane.ErrPartial) || !h.clears.TryLock() {
		return err
	}
	defer h.clears.Unlock()
	if h.waits || h.alone {
		return err
	}
	return errors.Join(err, h.clearAll(ctx, s))
}

// Apply implements dataplane.Dataplane.
func (h *heir) Apply(ctx context.Context, s *model.State, c model.Change) error {
	err := h.Dataplane.Apply(ctx, s, c)
	h.lacks = h.lacks || errors.Is(err, dataplane.ErrPartial)
	return err
}

// succeed removes what other planes have left, now that this one is in force. It may be called while the loop calls the
// methods of Dataplane.
func (h *heir) succeed(ctx context.Context, s *model.State) (left []remainder, err error) {
	h.clears.Lock()
	defer h.clears.Unlock()
	h.waits = false
	err = h.clearAll(ctx, s)
	return h.left, err
}

// wait has it remove nothing until doubt: another plane is being programmed.
func (h *heir) wait() {
	h.clears.Lock()
	defer h.clears.Unlock()
	h.waits = true
}

// doubt has the next Sync, or the next Audit, look for what others have left.
func (h *heir) doubt() {
	h.clears.Lock()
	defer h.clears.Unlock()
	h.waits, h.alone = false, false
	h.retired.look = time.Now()
}

// connections are those through another plane at the last look.
func (h *heir) connections(plane string) (n int) {
	h.clears.Lock()
	defer h.clears.Unlock()
	for _, r := range h.left {
		if r.plane == plane {
			n += r.connections
		}
	}
	return n
}

func (h *heir) clearAll(ctx context.Context, s *model.State) error {
	if err := h.clear(ctx, s); err != nil {
		return fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
	}
	h.alone = true
	h.cleared()
	return nil
}

// Close implements dataplane.Dataplane. Connections through this process live on, unless that ends.
func (h *heir) Close() error {
	if h.served && h.carried.keep(h.opened) {
		return nil
	}
	return h.opened.Close()
}

// Audit implements dataplane.Dataplane. It is also when it is seen that connections have ended.
func (h *heir) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	remains := h.lookAgain(ctx, s)
	r, err := h.Dataplane.Audit(ctx, s, d)
	return r, cmp.Or(err, remains)
}

// lookAgain sees whether connections have ended, when it is time.
func (h *heir) lookAgain(ctx context.Context, s *model.State) error {
	if !h.clears.TryLock() {
		return nil
	}
	defer h.clears.Unlock()
	if h.waits || h.retired.look.IsZero() || h.retired.look.After(time.Now()) {
		return nil
	}
	if err := h.clear(ctx, s); err != nil {
		h.alone = false // the next Sync tries again
		return fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
	}
	return nil
}

// clear removes what others have left.
func (h *heir) clear(ctx context.Context, s *model.State) error {
	var errs []error
	connections := 0
	h.left = nil
	for _, p := range h.others() {
		if p.Name == h.self.behind || p.Name == h.over() {
			continue
		}
		r, err := h.clearOne(ctx, p, s)
		connections += r.connections
		if err != nil {
			err = fmt.Errorf("remove what the data plane %s has left: %w", p.Name, err)
		}
		if r.removed {
			h.log.Info("removed what another data plane had left", "plane", p.Name, "in force", h.self.Name)
		}
		if r.removed || r.connections > 0 {
			h.left = append(h.left, r)
		}
		errs = append(errs, err)
	}
	h.retired.note(connections, h.log)
	return errors.Join(errs...)
}

// note decides when to look again: soon at first, when short connections end.
func (r *retired) note(connections int, log *slog.Logger) {
	now := time.Now()
	switch {
	case connections == 0:
		*r = retired{}
		return
	case r.since.IsZero():
		r.since, r.pause = now, drainInterval
		log.Info("connections through another data plane live on", "connections", connections,
			"until", now.Add(drainTime).Truncate(time.Second))
	default:
		r.pause = min(2*r.pause, takeoverInterval)
	}
	r.look = now.Add(r.pause)
}

// over reports whether connections have had their time.
func (r *retired) over() bool {
	return !r.since.IsZero() && time.Since(r.since) > drainTime
}

// clearOne removes what one has left, unless there are connections that need it.
func (h *heir) clearOne(ctx context.Context, p plane, s *model.State) (r remainder, err error) {
	r.plane = p.Name
	alike := p.Name == h.self.Name
	r.connections, err = h.carried.drain(ctx, s, look{name: p.Name, over: h.retired.over(), alike: alike})
	if alike || err != nil || r.connections > 0 {
		return r, err
	}
	left, err := p.Inspect()
	if h.unprivileged() {
		err = nil
	}
	if err != nil || !left.Rules {
		return r, err
	}
	h.learnLate(ctx, p, s)
	c := dataplane.Config{Log: h.log}
	if left.LocalnetWasOff {
		if c.KeepLocalnet, err = h.recordsLocalnet(); err != nil {
			return r, err
		}
	}
	if p.Drain != nil && !h.retired.over() {
		c.Mark = h.settings.mark // of clients that are hidden from now on
		r.connections, err = p.Drain(ctx, c)
		r.removed = err == nil && r.connections == 0
		return r, err
	}
	err = p.Remove(ctx, c)
	r.removed = err == nil
	return r, err
}

// recordsLocalnet reports whether this plane, or the one behind it, knows that the sysctl route_localnet was off.
func (h *heir) recordsLocalnet() (bool, error) {
	for _, p := range h.others() {
		if p.Name == h.self.Name || p.Name == h.self.behind {
			own, err := p.Inspect()
			if err != nil || own.LocalnetWasOff {
				return own.LocalnetWasOff, err
			}
		}
	}
	return false, nil
}
