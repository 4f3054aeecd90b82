package handover

import (
	"context"
	"errors"
	"slices"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// Kept is a plane that another one has replaced, and whose connections pass through this process.
type Kept struct {
	Plane       string `json:"plane"`
	Connections int    `json:"connections"` // that are still open
}

// kept are such planes. They live on until they have no connection, and are taken back when they are wanted again.
type kept struct {
	mu     sync.Mutex
	planes []*Plane
	over   bool // the process ends
}

// keep takes a plane that is not in force any more, unless nothing passes through it by its nature or the process ends.
func (k *kept) keep(p *Plane) bool {
	if p.Process == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.over {
		p.stopping = false
		k.planes = append(k.planes, p)
	}
	return !k.over
}

// take gives a plane back that was kept; nil: there is none with these settings.
func (k *kept) take(settings any) *Plane {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, p := range k.planes {
		if p.Settings == settings {
			k.planes = slices.Delete(k.planes, i, i+1)
			return p
		}
	}
	return nil
}

// look is what clear does with the kept planes of a name.
type look struct {
	name  string
	over  bool    // they have had their time
	alike bool    // the plane in force has that name, and the rules in the kernel: these planes are told nothing
	learn learner // has that plane learn
}

// drain has planes take no new connections, and closes those that have none any more, or have had their time. It
// returns how many connections they have.
func (k *kept) drain(ctx context.Context, s *model.State, l look) (connections int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	k.planes = slices.DeleteFunc(k.planes, func(p *Plane) bool {
		if p.Name != l.name {
			return false
		}
		n := 0
		if !l.over {
			n, err = p.drain(ctx, s, l)
			errs = append(errs, err)
		}
		if connections += n; n > 0 && !defect.Is(defect.HandoverDrain) {
			return false
		}
		errs = append(errs, p.Close())
		return true
	})
	return connections, errors.Join(errs...)
}

// drain returns how many connections a plane has, and at least one at the first call: the plane may have read a packet
// before it was told to stop. Up to that call clients could get sessions of the plane, so these are learned then.
func (p *Plane) drain(ctx context.Context, s *model.State, l look) (n int, err error) {
	first := !p.stopping
	if l.alike {
		n = p.Process.Open()
	} else if n, err = p.Process.SetStage(ctx, s, dataplane.Draining); err == nil && first {
		_, err = l.learn(ctx, s, p.Process.Sessions(ctx, s))
	}
	p.stopping = err == nil
	if first || err != nil {
		n = max(1, n)
	}
	return n, err
}

// list is what is kept. While planes are drained it does not wait for the answer.
func (k *kept) list() (all []Kept) {
	if !k.mu.TryLock() {
		return nil
	}
	defer k.mu.Unlock()
	for _, p := range k.planes {
		all = append(all, Kept{p.Name, p.Process.Open()})
	}
	return all
}

// close ends all connections.
func (k *kept) close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.over = true
	var errs []error
	for _, p := range k.planes {
		errs = append(errs, p.Close())
	}
	k.planes = nil
	return errors.Join(errs...)
}

// Kept are the planes that were replaced and have open connections.
func (h *Handover) Kept() []Kept { return h.kept.list() }
