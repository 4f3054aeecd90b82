package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// kernel is a plane on a node.
type kernel struct {
	at    node
	new   dataplane.New
	log   *slog.Logger
	fault func(operation string) error // may be nil
	plane dataplane.Dataplane
	state *model.State // which the plane should hold
}

// start makes a plane in the node's namespace. Objects of an earlier one stay there.
func (k *kernel) start() error {
	return k.at.Do(testbed.Node, func() (err error) {
		k.plane, err = k.new(dataplane.Config{Mark: dataplane.DefaultMark, Log: k.log, Fault: k.fault})
		return err
	})
}

// restart is what the end of one process and the start of the next do.
func (k *kernel) restart() error {
	err := k.at.released(func() error {
		if err := k.plane.Close(); err != nil {
			return fmt.Errorf("close: %w", err)
		}
		return nil
	})
	return errors.Join(err, k.start())
}

// sync and apply bring the kernel to a State, which is copied.
func (k *kernel) sync(ctx context.Context, s *model.State) error {
	k.state = s.Clone()
	if err := k.plane.Sync(ctx, s); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	return nil
}

func (k *kernel) apply(ctx context.Context, s *model.State, c model.Change) error {
	k.state = s.Clone()
	if err := k.plane.Apply(ctx, s, c); err != nil {
		return fmt.Errorf("apply: %w", err)
	}
	return nil
}

// audit is an error if the kernel does not hold the State.
func (k *kernel) audit(ctx context.Context, d dataplane.Depth) error {
	report, err := k.plane.Audit(ctx, k.state, d)
	if err == nil && len(report.Drifts) > 0 {
		err = fmt.Errorf("%d report.Drifts: %v", len(report.Drifts), report.Drifts)
	}
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}

// inspect is audit, and an error if what the kernel holds cannot be printed.
func (k *kernel) inspect(ctx context.Context) error {
	if err := k.audit(ctx, dataplane.Quick); err != nil {
		return err
	}
	_, err := k.at.rules(ctx)
	return err
}

// stop removes the plane; an error says what it left behind.
func (k *kernel) stop(ctx context.Context) error {
	err := errors.Join(k.plane.Remove(ctx), k.plane.Close())
	k.plane = nil
	if err != nil {
		return fmt.Errorf("remove and close: %w", err)
	}
	left, err := k.at.rules(ctx)
	if err == nil && left != "" {
		err = fmt.Errorf("left in the kernel after Remove:\n%s", left)
	}
	return err
}

// logger puts what a plane has to say into the test's output.
func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// way is how the States of a case get into the kernel.
type way struct {
	name  string
	order order
	// restarts: each step is one Sync, by a new plane, over what the plane before has left.
	restarts bool
}

func ways() []way {
	return []way{
		{name: "services-first", order: servicesFirst},
		{name: "slices-first", order: slicesFirst},
		{name: "restarts", order: allAtOnce, restarts: true},
	}
}

// play runs a case to its end, with an empty kernel.
func (k *kernel) play(ctx context.Context, c *testCase, way way) error {
	w, empty, err := newWorld(c)
	if err != nil {
		return err
	}
	empty = empty.Clone()
	if err := k.start(); err != nil {
		return err
	}
	if err := k.sync(ctx, empty); err != nil {
		return err
	}
	traffic := &traffic{node: k.at, flows: map[string]*flow{}}
	defer traffic.close()
	for i := range c.steps {
		err := k.step(ctx, w, &c.steps[i], way)
		if err == nil {
			err = k.inspect(ctx)
		}
		if err == nil {
			err = traffic.run(ctx, c.steps[i].probes)
		}
		if err != nil {
			rules, _ := k.at.rules(ctx)
			return fmt.Errorf("step %d: %w\nState:\n%s\nkernel:\n%s", i+1, err, k.state, rules)
		}
	}
	return k.finish(ctx, w, empty)
}

// step brings the kernel to the step's State.
func (k *kernel) step(ctx context.Context, w *world, s *step, way way) error {
	if way.restarts {
		return k.stepByRestart(ctx, w, s)
	}
	if s.rows != nil {
		return k.apply(ctx, s.rows, model.Diff(k.state, s.rows))
	}
	for _, objects := range way.order(s.objects) {
		state, change := w.change(objects)
		if err := k.apply(ctx, state, change); err != nil {
			return err
		}
	}
	state, change := w.change(nil, s.deleted...)
	return k.apply(ctx, state, change)
}

func (k *kernel) stepByRestart(ctx context.Context, w *world, s *step) error {
	state := s.rows
	if state == nil {
		state, _ = w.change(s.objects, s.deleted...)
	}
	if err := k.restart(); err != nil {
		return err
	}
	return k.sync(ctx, state)
}

// finish deletes all objects one by one, then the plane's.
func (k *kernel) finish(ctx context.Context, w *world, empty *model.State) error {
	for _, id := range w.ids() {
		state, change := w.change(nil, id)
		if err := k.apply(ctx, state, change); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
	}
	if err := k.apply(ctx, empty, model.Diff(k.state, empty)); err != nil {
		return err
	}
	if err := k.audit(ctx, dataplane.Quick); err != nil {
		return fmt.Errorf("after all was deleted: %w", err)
	}
	return k.stop(ctx)
}

// abandon cleans up after a case that failed.
func (k *kernel) abandon(ctx context.Context) error {
	if k.plane == nil {
		return nil
	}
	return k.stop(ctx)
}
