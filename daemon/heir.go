package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// heir is a data plane that removes what other planes of ours have left, in this or an earlier process, once its own
// rules are in force: at every moment there is somebody who translates. What cannot be removed is an error of Sync that
// keeps nobody from serving; the engine says it and tries again.
type heir struct {
	dataplane.Dataplane
	self    plane
	others  func() []plane // all of them; only tests have some of their own
	log     *slog.Logger
	cleared func() // is called when there is nothing left of others
	alone   bool   // there is nothing left
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
		if err != nil {
			return opened{}, permitted(err)
		}
		c.LocalnetWasOff = c.LocalnetWasOff || left.LocalnetWasOff
	}
	o, err := s.open(c)
	if err != nil {
		return o, err
	}
	self, err := planeNamed(o.settings.name)
	h := &heir{Dataplane: o.Dataplane, self: self, others: planes, log: c.Log, cleared: func() { cleared(o) }}
	if affine, ok := o.Dataplane.(dataplane.Affine); ok {
		return opened{affineHeir{h, affine}, o.settings}, err
	}
	return opened{h, o.settings}, err
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

// clear removes what others have left.
func (h *heir) clear(ctx context.Context) error {
	var errs []error
	for _, p := range h.others() {
		if p.name == h.self.name {
			continue
		}
		removed, err := h.clearOne(ctx, p)
		if err != nil {
			err = fmt.Errorf("remove what the data plane %s has left: %w", p.name, err)
		}
		if removed {
			h.log.Info("removed what another data plane had left", "plane", p.name, "in force", h.self.name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (h *heir) clearOne(ctx context.Context, p plane) (removed bool, err error) {
	left, err := p.traces()
	if err != nil || !left.Rules {
		return false, err
	}
	c := dataplane.Config{Log: h.log}
	if left.LocalnetWasOff {
		own, err := h.self.traces()
		if err != nil {
			return false, err
		}
		c.KeepLocalnet = own.LocalnetWasOff
	}
	return true, p.clean(ctx, c)
}
