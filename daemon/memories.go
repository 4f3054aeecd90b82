package daemon

import (
	"context"
	"iter"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// heritage is what other planes, of a process that has ended, have left in the kernel of what they remembered of
// clients.
type heritage struct {
	self string // who inherits
	c    dataplane.Config
}

// tell is a dataplane.Config.Inherit. The plane behind another one is among those that tell: it may have served alone.
func (h *heritage) tell(ctx context.Context, s *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(yield func(dataplane.Memory, error) bool) {
		for _, p := range planes() {
			if left, err := p.traces(); p.name == h.self || err != nil || !left.Rules {
				continue // Sync will say what is wrong with traces
			}
			for m, err := range p.memories(ctx, h.c, s) {
				if !yield(m, err) {
					return
				}
			}
		}
	}
}

// remember takes in what clients did after Sync had asked the first time, before what another plane has left is
// removed.
func (h *heir) remember(ctx context.Context, p plane, s *model.State) {
	affine, ok := h.Dataplane.(dataplane.Affine)
	if h.alone || !h.inherits || !ok || p.memories == nil {
		return
	}
	if _, err := affine.Remember(ctx, s, p.memories(ctx, dataplane.Config{Log: h.log}, s)); err != nil {
		h.log.Warn("session affinity: some clients may get other endpoints than before", "another data plane", p.name,
			"error", err)
	}
}
