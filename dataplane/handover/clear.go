package handover

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Remainder is what was found of another plane.
type Remainder struct {
	Plane       string
	Removed     bool
	Connections int // that need what is left
}

// learner is Learn of the plane in force.
type learner func(context.Context, *model.State, iter.Seq2[dataplane.Session, error]) (int, error)

// clear removes what other planes have left, and lets the state machine go on. The caller holds mu.
func (h *Handover) clear(ctx context.Context, s *model.State, learn learner) error {
	var errs []error
	connections, p := 0, h.InForce()
	h.left = nil
	for _, d := range h.options.Drivers {
		if d.Name == p.Behind || d.Name == p.Over {
			continue
		}
		r, err := h.clearOne(ctx, d, s, learn)
		connections += r.Connections
		if err != nil {
			errs = append(errs, fmt.Errorf("remove leftovers of the data plane %s: %w", d.Name, err))
		}
		if r.Removed {
			h.options.Log.Info("removed the leftovers of another data plane", "plane", d.Name)
		}
		if r.Removed || r.Connections > 0 {
			h.left = append(h.left, r)
		}
	}
	h.plan(connections)
	if err := errors.Join(errs...); err != nil {
		h.state = h.state.on(resists)
		return dataplane.Partial(err)
	}
	if connections > 0 {
		h.state = h.state.on(drains)
	} else {
		h.state = h.state.on(cleared)
	}
	h.options.Cleared(p)
	return nil
}

// plan plans the next look at the objects that open connections need.
func (h *Handover) plan(connections int) {
	if connections == 0 {
		h.drain = Schedule{}
		return
	}
	if !h.drain.Began() {
		h.options.Log.Info("connections through another data plane stay open", "connections", connections,
			"until", time.Now().Add(h.options.DrainTime).Truncate(time.Second))
	}
	h.drain.Next(0)
}

// clearOne removes what one plane has left, unless there are connections that need it.
func (h *Handover) clearOne(
	ctx context.Context, d dataplane.Driver, s *model.State, learn learner,
) (r Remainder, err error) {
	r.Plane = d.Name
	p, over := h.InForce(), h.drain.Over(h.options.DrainTime)
	r.Connections, err = h.kept.drain(ctx, s, look{name: d.Name, over: over, alike: d.Name == p.Name, learn: learn})
	if d.Name == p.Name || err != nil || r.Connections > 0 {
		return r, err
	}
	left, err := d.Inspect()
	if p.Unprivileged {
		err = nil
	}
	if err != nil || !left.Rules {
		return r, err
	}
	if h.state == Clearing {
		h.learnLate(ctx, d, s, learn)
	}
	c := dataplane.Config{Log: h.options.Log}
	if left.LocalnetWasOff {
		if c.KeepLocalnet, err = h.recordsLocalnet(p); err != nil {
			return r, err
		}
	}
	if d.Drain != nil && !over {
		c.Mark = p.Mark // of clients that are hidden from now on
		r.Connections, err = d.Drain(ctx, c)
		r.Removed = err == nil && r.Connections == 0
		return r, err
	}
	err = d.Remove(ctx, c)
	r.Removed = err == nil
	return r, err
}

// recordsLocalnet reports whether a plane, or the one behind it, has recorded that the sysctl route_localnet was off.
func (h *Handover) recordsLocalnet(p *Plane) (bool, error) {
	for _, d := range h.options.Drivers {
		if d.Name == p.Name || d.Name == p.Behind {
			own, err := d.Inspect()
			if err != nil || own.LocalnetWasOff {
				return own.LocalnetWasOff, err
			}
		}
	}
	return false, nil
}

// learnEarlier has the plane learn, for its first Sync, the sessions that planes of an earlier process have left.
func (h *Handover) learnEarlier(ctx context.Context, s *model.State) {
	if h.programmed.Load() {
		return
	}
	if _, err := h.Learn(ctx, s, h.leftSessions(ctx, s)); err != nil {
		h.options.Log.Warn("session affinity: some clients of another data plane may get other endpoints",
			"error", err)
	}
}

// leftSessions are read from the kernel. The plane behind the one in force is among those that are asked: it may have
// served alone.
func (h *Handover) leftSessions(ctx context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		for _, d := range h.options.Drivers {
			if left, err := d.Inspect(); d.Name == h.InForce().Name || err != nil || !left.Rules {
				continue // clear says what is wrong with leftovers
			}
			for one, err := range d.Sessions(ctx, dataplane.Config{Log: h.options.Log}, s) {
				if !yield(one, err) {
					return
				}
			}
		}
	}
}

// learnLate takes in the sessions that clients have got of another plane since the plane in force has learned its
// sessions. It comes just before the other plane's rules go. A client that meets these for the first time after that,
// in the milliseconds until they are gone, has no session.
func (h *Handover) learnLate(ctx context.Context, d dataplane.Driver, s *model.State, learn learner) {
	if _, err := learn(ctx, s, d.Sessions(ctx, dataplane.Config{Log: h.options.Log}, s)); err != nil {
		h.options.Log.Warn("session affinity: some clients of another data plane may get other endpoints", "plane", d.Name,
			"error", err)
	}
}
