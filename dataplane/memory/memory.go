// Package memory is a data plane whose kernel is a map: for tests of what drives planes, and for
// running without root. Its Kernel outlives its planes, as the real one outlives a process.
//
//	engine ── Sync, Apply, Audit, Remove ──► Plane ── one operation per row, any may fail ──► Kernel
package memory

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

var (
	_ dataplane.Dataplane = (*Plane)(nil)
	_ dataplane.New       = (*Kernel)(nil).New
)

// Kernel holds the rows of all planes made for it, the last of which is meant to own them. The zero
// value is empty. Its methods may be called by any goroutine.
type Kernel struct {
	mu    sync.Mutex
	rows  *model.State
	calls []string
}

// New makes a plane. It is a dataplane.New.
func (k *Kernel) New(c dataplane.Config) (dataplane.Dataplane, error) {
	return &Plane{kernel: k, fault: c.Fault}, nil
}

// String is the rows in canonical text form.
func (k *Kernel) String() (text string) {
	k.Do(func(rows *model.State) { text = rows.String() })
	return text
}

// Do lends the rows, for reading or for doing what a stranger might do to them.
func (k *Kernel) Do(f func(*model.State)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rows == nil {
		k.rows = model.NewState()
	}
	f(k.rows)
}

// Calls are the names of the methods called so far, in order: sync, apply, audit, remove, close.
func (k *Kernel) Calls() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.calls)
}

func (k *Kernel) called(method string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, method)
}

// Plane is a dataplane.Dataplane. Rows are set and deleted one by one, so that a fault, or the end of
// the context, leaves the Kernel half-way.
type Plane struct {
	dataplane.Base
	kernel *Kernel
	fault  func(operation string) error
}

// Sync implements dataplane.Dataplane.
func (p *Plane) Sync(ctx context.Context, s *model.State) error {
	p.kernel.called("sync")
	have, err := p.read()
	if err != nil {
		return err
	}
	return p.perform(ctx, model.Diff(have, s))
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(ctx context.Context, _ *model.State, c model.Change) error {
	p.kernel.called("apply")
	return p.perform(ctx, c)
}

// Remove implements dataplane.Dataplane.
func (p *Plane) Remove(ctx context.Context) error {
	p.kernel.called("remove")
	have, err := p.read()
	if err != nil {
		return err
	}
	return p.perform(ctx, model.Diff(have, model.NewState()))
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	p.kernel.called("close")
	return nil
}

// Audit implements dataplane.Dataplane.
func (p *Plane) Audit(_ context.Context, s *model.State, _ dataplane.Depth) (dataplane.Report, error) {
	p.kernel.called("audit")
	have, err := p.read()
	if err != nil {
		return dataplane.Report{}, err
	}
	c := model.Diff(have, s)
	drifts := slices.Concat(
		drift("frontend", c.Frontends, have.Frontends),
		drift("pool", c.Pools, have.Pools),
		drift("guard", c.Guards, have.Guards),
		drift("health", c.Health, have.Health))
	if c.Pods != nil {
		drifts = append(drifts, dataplane.Drift{
			Class: "pods", Object: "pods", Want: fmt.Sprint(s.Pods), Have: fmt.Sprint(have.Pods),
		})
	}
	slices.SortFunc(drifts, func(a, b dataplane.Drift) int { return cmp.Compare(a.Object, b.Object) })
	return dataplane.Report{Drifts: drifts}, nil
}

// Repair implements dataplane.Dataplane.
func (p *Plane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func drift[K comparable, V any](kind string, d model.Delta[K, V], have map[K]V) []dataplane.Drift {
	var drifts []dataplane.Drift
	for k, v := range d.Set.All() {
		row := dataplane.Drift{Class: kind, Object: fmt.Sprintf("%s %v", kind, k), Want: fmt.Sprint(v)}
		if old, ok := have[k]; ok {
			row.Have = fmt.Sprint(old)
		}
		drifts = append(drifts, row)
	}
	for _, k := range d.Delete {
		object := fmt.Sprintf("%s %v", kind, k)
		drifts = append(drifts, dataplane.Drift{Class: kind, Object: object, Have: fmt.Sprint(have[k])})
	}
	return drifts
}

func (p *Plane) read() (rows *model.State, err error) {
	if err := p.fail("rows read"); err != nil {
		return nil, err
	}
	p.kernel.Do(func(have *model.State) { rows = have.Clone() })
	return rows, nil
}

func (p *Plane) fail(operation string) error {
	if p.fault == nil {
		return nil
	}
	if err := p.fault(operation); err != nil {
		return fmt.Errorf("%s: %w", operation, err)
	}
	return nil
}

// step changes one row.
type step struct {
	operation string
	change    model.Change
}

// perform carries out a change in an order in which no row ever refers to a pool that is not there.
func (p *Plane) perform(ctx context.Context, c model.Change) error {
	steps := []step{{"guards, health and pods set", model.Change{Guards: c.Guards, Health: c.Health, Pods: c.Pods}}}
	setPools, deletePools := single(c.Pools)
	setFrontends, deleteFrontends := single(c.Frontends)
	for _, d := range setPools {
		steps = append(steps, step{"pool set", model.Change{Pools: d}})
	}
	for _, d := range setFrontends {
		steps = append(steps, step{"frontend set", model.Change{Frontends: d}})
	}
	for _, d := range deleteFrontends {
		steps = append(steps, step{"frontend delete", model.Change{Frontends: d}})
	}
	for _, d := range deletePools {
		steps = append(steps, step{"pool delete", model.Change{Pools: d}})
	}
	for _, s := range steps {
		if err := cmp.Or(ctx.Err(), p.fail(s.operation)); err != nil {
			return err
		}
		p.kernel.Do(func(rows *model.State) { rows.Apply(s.change) })
	}
	return nil
}

// single takes a Delta apart into Deltas of one row.
func single[K comparable, V any](d model.Delta[K, V]) (sets, deletes []model.Delta[K, V]) {
	for k, v := range d.Set.All() {
		sets = append(sets, model.Delta[K, V]{Set: model.Rows[K, V]{{Key: k, Value: v}}})
	}
	for _, k := range d.Delete {
		deletes = append(deletes, model.Delta[K, V]{Delete: []K{k}})
	}
	return sets, deletes
}
