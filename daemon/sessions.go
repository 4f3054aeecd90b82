package daemon

import (
	"context"
	"iter"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// inherit has the plane learn, for its first Sync, the sessions that other planes, of a process that has ended, have
// left in the kernel.
func (h *heir) inherit(ctx context.Context, s *model.State) {
	if !h.inherits || h.learned {
		return
	}
	if _, err := h.Learn(ctx, s, h.leftSessions(ctx, s)); err != nil {
		h.log.Warn("session affinity: some clients may get other endpoints than before, by another data plane", "error", err)
	}
}

// leftSessions are read from the kernel. The plane behind another one is among those that tell: it may have served
// alone.
func (h *heir) leftSessions(ctx context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		for _, p := range planes() {
			if left, err := p.Inspect(); p.Name == h.self.Name || err != nil || !left.Rules {
				continue // Sync will say what is wrong with traces
			}
			for one, err := range p.Sessions(ctx, dataplane.Config{Log: h.log}, s) {
				if !yield(one, err) {
					return
				}
			}
		}
	}
}

// learnLate takes in what clients did after Sync, before what another plane has left is removed.
func (h *heir) learnLate(ctx context.Context, p plane, s *model.State) {
	if h.alone || !h.inherits {
		return
	}
	if _, err := h.Learn(ctx, s, p.Sessions(ctx, dataplane.Config{Log: h.log}, s)); err != nil {
		h.log.Warn("session affinity: some clients may get other endpoints than before", "another data plane", p.Name,
			"error", err)
	}
}
