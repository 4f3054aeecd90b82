package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/takeover"
)

// heir is a data plane that removes what other planes of ours have left, in this or an earlier process, once its own
// rules are in force: at every moment there is somebody who translates. What cannot be removed is an error of Sync that
// keeps nobody from serving; the engine says it and tries again.
type heir struct {
	dataplane.Dataplane
	inner   dataplane.Dataplane // without what wraps it
	self    plane
	others  func() []plane // all of them; only tests have some of their own
	log     *slog.Logger
	cleared func() // is called when nothing is left of others, but what connections still need
	alone   bool   // so it is
	retired retired
}

// retired is about connections that need what another plane has left.
type retired struct {
	since, look time.Time     // when they were found, and when to look the next time; zero: there are none
	pause       time.Duration // between two looks
}

// affineHeir keeps what the plane can do besides.
type affineHeir struct {
	*heir
	dataplane.Affine
}

// inherit opens a plane that will be the only one.
func (s planeSettings) inherit(c dataplane.Config, cleared func(opened)) (opened, error) {
	for _, p := range planes() {
		if p.name == s.name {
			continue
		}
		left, err := p.traces()
		if err != nil && c.Log != nil { // the plane that is wanted may well work; Sync will look again
			c.Log.Warn("cannot tell whether another data plane has left something", "plane", p.name, "error", err)
		}
		c.LocalnetWasOff = c.LocalnetWasOff || left.LocalnetWasOff
	}
	o, err := s.open(c)
	if err != nil {
		return o, err
	}
	self, err := planeNamed(o.settings.name)
	h := &heir{
		Dataplane: o.Dataplane, inner: o.inner, self: self, others: planes, log: c.Log, cleared: func() { cleared(o) },
	}
	o.Dataplane = h
	if affine, ok := h.Dataplane.(dataplane.Affine); ok {
		o.Dataplane = affineHeir{h, affine}
	}
	return o, err
}

// Sync implements dataplane.Dataplane.
func (h *heir) Sync(ctx context.Context, s *model.State) error {
	err := h.Dataplane.Sync(ctx, s)
	if h.alone || err != nil && !errors.Is(err, dataplane.ErrPartial) {
		return err
	}
	if left := h.clear(ctx); left != nil {
		return errors.Join(err, fmt.Errorf("%w: %w", dataplane.ErrPartial, left))
	}
	h.alone = true
	h.cleared()
	return err
}

// Describe implements dataplane.Describer, whatever the plane is.
func (h *heir) Describe() []string {
	if d, ok := h.inner.(dataplane.Describer); ok {
		return d.Describe()
	}
	return nil
}

// Counters implements dataplane.Counted, whatever the plane is.
func (h *heir) Counters(ctx context.Context) (dataplane.Counters, error) {
	if counted, ok := h.inner.(dataplane.Counted); ok {
		return counted.Counters(ctx)
	}
	return dataplane.Counters{}, fmt.Errorf("the data plane %s counts nothing: %w", h.self.name, errors.ErrUnsupported)
}

// Audit implements dataplane.Dataplane. It is also when it is seen that connections have ended.
func (h *heir) Audit(ctx context.Context, s *model.State) ([]dataplane.Drift, error) {
	if !h.retired.look.IsZero() && h.retired.look.Before(time.Now()) {
		if err := h.clear(ctx); err != nil {
			h.alone = false // the next Sync tries again
			return nil, fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
		}
	}
	return h.Dataplane.Audit(ctx, s)
}

// clear removes what others have left.
func (h *heir) clear(ctx context.Context) error {
	var errs []error
	connections := 0
	for _, p := range h.others() {
		if p.name == h.self.name || p.name == h.self.behind {
			continue
		}
		removed, n, err := h.clearOne(ctx, p)
		connections += n
		if err != nil {
			err = fmt.Errorf("remove what the data plane %s has left: %w", p.name, err)
		}
		if removed {
			h.log.Info("removed what another data plane had left", "plane", p.name, "in force", h.self.name)
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
			"until", now.Add(takeover.DefaultDrain).Truncate(time.Second))
	default:
		r.pause = min(2*r.pause, takeoverInterval)
	}
	r.look = now.Add(r.pause)
}

// over reports whether connections have had their time.
func (r *retired) over() bool {
	return !r.since.IsZero() && time.Since(r.since) > takeover.DefaultDrain
}

// clearOne removes what one has left, unless there are connections that need it.
func (h *heir) clearOne(ctx context.Context, p plane) (removed bool, connections int, err error) {
	left, err := p.traces()
	if err != nil || !left.Rules {
		return false, 0, err
	}
	c := dataplane.Config{Log: h.log}
	if left.LocalnetWasOff {
		if c.KeepLocalnet, err = h.recordsLocalnet(); err != nil {
			return false, 0, err
		}
	}
	if p.retire != nil && !h.retired.over() {
		connections, err = p.retire(ctx, c)
		return connections == 0, connections, err
	}
	return true, 0, p.clean(ctx, c)
}

// recordsLocalnet reports whether this plane, or the one behind it, knows that the sysctl route_localnet was off.
func (h *heir) recordsLocalnet() (bool, error) {
	for _, p := range h.others() {
		if p.name == h.self.name || p.name == h.self.behind {
			own, err := p.traces()
			if err != nil || own.LocalnetWasOff {
				return own.LocalnetWasOff, err
			}
		}
	}
	return false, nil
}
