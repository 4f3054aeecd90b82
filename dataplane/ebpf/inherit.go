package ebpf

import (
	"context"
	"iter"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Memories implements dataplane.Affine.
func (p *Plane) Memories(context.Context, *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(func(dataplane.Memory, error) bool) {}
}

// Remember implements dataplane.Affine.
func (p *Plane) Remember(context.Context, *model.State, iter.Seq2[dataplane.Memory, error]) (int, error) {
	return 0, nil
}
