package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

// sole is a plane that removes what another one has left when it is told to look.
type sole struct {
	dataplane.Dataplane
	other *kernel
	looks bool
	enter func() error // by SetStage(Active); nil: nothing
}

func (p *sole) SetStage(_ context.Context, _ *model.State, to dataplane.Stage) (int, error) {
	if to == dataplane.Active && p.enter != nil {
		return 0, p.enter()
	}
	return 0, nil
}

func (p *sole) Sync(ctx context.Context, s *model.State) error {
	err := p.Dataplane.Sync(ctx, s)
	if err == nil && p.looks {
		p.looks = false
		err = p.clear(ctx)
	}
	return err
}

func (p *sole) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p *sole) clear(ctx context.Context) error {
	other, err := p.other.New(dataplane.Config{})
	if err != nil {
		return err
	}
	return other.Remove(ctx)
}

// pair is a rig whose plane may be changed for one with a kernel of its own, and back.
type pair struct {
	*rig
	next  *kernel
	plane *sole // in force
}

func newPair(t *testing.T, change func(*Options)) *pair {
	p := &pair{rig: newRig(t), next: &kernel{}}
	p.start(func(o *Options) {
		o.AuditInterval = 10 * time.Hour
		p.plane = &sole{Dataplane: o.Plane, other: p.next}
		o.Plane = p.plane
		if change != nil {
			change(o)
		}
	})
	return p
}

// change switches to a plane with the other kernel, and tells which steps that took.
func (p *pair) change(ctx context.Context, together bool, c dataplane.Config) (steps string, err error) {
	made, err := p.next.New(c)
	if err != nil {
		p.t.Fatal(err)
	}
	var all []string
	to := &sole{Dataplane: made, other: p.kernel}
	err = p.engine.Switch(ctx, Switch{
		To: to, Together: together,
		InForce:  func(ctx context.Context, _ *model.State) error { return to.clear(ctx) },
		Undo:     func() { p.plane.looks = true },
		Progress: func(step Progress) { all = append(all, string(step.Step)) },
	})
	if err == nil {
		p.kernel, p.next, p.plane = p.next, p.kernel, to
	}
	return strings.Join(all, " "), err
}

// settled expects that one kernel holds all rows, the other none.
func (p *pair) settled() {
	p.t.Helper()
	p.converged()
	if got := p.next.String(); got != model.NewState().String() {
		p.t.Fatalf("the other kernel holds\n%s", got)
	}
}

func TestEngine_switch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		if _, err := p.change(t.Context(), false, dataplane.Config{}); !errors.Is(err, ErrStarting) {
			t.Fatal(err)
		}
		if got := p.next.Calls(); !slices.Equal(got, []string{"close"}) {
			t.Fatal(got)
		}
		p.send(web(1, "10.244.1.2"))
		p.converged()
		for i := range 4 {
			steps, err := p.change(t.Context(), i%2 == 0, dataplane.Config{})
			if err != nil || steps != "programmed verified in-force" {
				t.Fatal(steps, err)
			}
			p.settled()
			p.send(web(2+i, "10.244.1.2"))
			p.settled()
		}
		p.stop()
		if p.engine.Status().InForceSince.IsZero() {
			t.Error("it is not known since when the plane is in force")
		}
	})
}

// The plane in force goes on with changes while the new one is programmed, which then follows them.
func TestEngine_switchWhileChangesCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		goOn, waits := make(chan struct{}), sync.Once{}
		slow := dataplane.Config{Fault: func(string) error {
			waits.Do(func() { <-goOn })
			return nil
		}}
		done := make(chan error)
		go func() {
			_, err := p.change(t.Context(), false, slow)
			done <- err
		}()
		synctest.Wait()
		p.send(web(1, "10.244.1.3"))
		p.send(web(2, "10.244.1.2"))
		p.converged()
		close(goOn)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		p.settled()
		p.stop()
	})
}

// Whatever fails before the new plane is in force, the old one goes on, and nothing is left of the new one.
func TestEngine_switchFails(t *testing.T) {
	for _, together := range []bool{false, true} {
		t.Run(fmt.Sprint("together ", together), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, nil)
				p.send(web(1, "10.244.1.2"))
				p.send(web(2, "10.244.1.2", "10.244.1.3"))
				p.converged()
				for k := 0; ; k++ {
					n := 0
					steps, err := p.change(t.Context(), together, dataplane.Config{Fault: func(string) error {
						if n++; n > k {
							return errBroken
						}
						return nil
					}})
					if err == nil {
						if k < 8 {
							t.Errorf("only %d operations", k)
						}
						break
					}
					if !errors.Is(err, errBroken) || !strings.HasSuffix(steps, "rolled-back") {
						t.Fatalf("operation %d: %s, %v", k, steps, err)
					}
					p.settled()
					p.send(web(3, fmt.Sprintf("10.244.1.%d", 4+k%2)))
					p.settled()
				}
				p.settled()
				p.stop()
			})
		})
	}
}

// lossy is a plane that does not hold what it is told to.
type lossy struct{ dataplane.Dataplane }

func (lossy) Audit(context.Context, *model.State, dataplane.Depth) (dataplane.Report, error) {
	return dataplane.Report{Drifts: []dataplane.Drift{
		{Object: "frontend x", Want: "forward"}, {Object: "frontend y", Want: "forward"},
	}}, nil
}

// What is refused, or does not arrive in the kernel, keeps a plane from being used.
func TestEngine_switchIsVerified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		made, err := p.next.New(dataplane.Config{})
		if err != nil {
			t.Fatal(err)
		}
		undo := func() { p.plane.looks = true }
		err = p.engine.Switch(t.Context(), Switch{To: lossy{made}, Undo: undo})
		if err == nil || !strings.Contains(err.Error(), "frontend x: missing: forward and 1 more") {
			t.Error(err)
		}
		p.settled()
		refuse := dataplane.Config{Fault: func(operation string) error {
			if operation == "frontend set" {
				return dataplane.ErrPartial
			}
			return nil
		}}
		if _, err := p.change(t.Context(), false, refuse); !errors.Is(err, dataplane.ErrPartial) {
			t.Error(err)
		}
		p.settled()
		p.stop()
	})
}

// What brings the new plane into force comes when that holds everything, and may fail still.
func TestEngine_switchEnters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		for _, fails := range []error{errBroken, nil} {
			made, err := p.next.New(dataplane.Config{})
			if err != nil {
				t.Fatal(err)
			}
			to, steps := &sole{Dataplane: made, other: p.kernel}, ""
			to.enter = func() error {
				if steps += "enter "; p.next.String() != p.kernel.String() {
					t.Errorf("the new plane holds\n%s", p.next)
				}
				return fails
			}
			err = p.engine.Switch(t.Context(), Switch{
				To:       to,
				InForce:  func(ctx context.Context, _ *model.State) error { return to.clear(ctx) },
				Undo:     func() { p.plane.looks = true },
				Progress: func(step Progress) { steps += string(step.Step) + " " },
			})
			want := "programmed verified enter rolled-back "
			if fails == nil {
				want = "programmed verified enter in-force "
				p.kernel, p.next = p.next, p.kernel
			}
			if !errors.Is(err, fails) || steps != want {
				t.Errorf("%s, %v", steps, err)
			}
			p.settled()
		}
		p.stop()
	})
}

// Who gives up gets what was there before; when the engine ends, the new plane is closed.
func TestEngine_switchIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		for _, at := range []string{"rows read", "pool set", "frontend set"} {
			ctx, cancel := context.WithCancel(t.Context())
			steps, err := p.change(ctx, false, dataplane.Config{Fault: func(operation string) error {
				if operation == at {
					cancel()
				}
				return nil
			}})
			if !errors.Is(err, context.Canceled) || !strings.HasSuffix(steps, "rolled-back") {
				t.Errorf("at %s: %s, %v", at, steps, err)
			}
			p.settled()
		}
		stopped := false
		_, err := p.change(t.Context(), false, dataplane.Config{Fault: func(string) error {
			if !stopped {
				stopped = true
				p.stop()
			}
			return nil
		}})
		if calls := p.next.Calls(); !errors.Is(err, ErrStopped) || calls[len(calls)-1] != "close" {
			t.Errorf("%v, %v", err, calls)
		}
	})
}

// What cannot be removed of the old plane keeps nobody from using the new one, and is tried again.
func TestEngine_switchCannotClear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		made, err := p.next.New(dataplane.Config{})
		if err != nil {
			t.Fatal(err)
		}
		to := &sole{Dataplane: made, other: p.kernel}
		err = p.engine.Switch(t.Context(), Switch{To: to, InForce: func(context.Context, *model.State) error {
			to.looks = true
			return fmt.Errorf("%w: %w", dataplane.ErrPartial, errBroken)
		}})
		if err != nil || p.engine.Status().Error == "" {
			t.Errorf("%v, %+v", err, p.engine.Status())
		}
		bubble.Pass(time.Minute)
		p.kernel, p.next = p.next, p.kernel
		p.settled()
		if got := p.engine.Status(); got.Error != "" {
			t.Errorf("%+v", got)
		}
		p.stop()
	})
}

// short is a plane that cannot have some rows in force.
type short struct {
	dataplane.Dataplane
	lacks atomic.Int32 // so many
}

func (p *short) Sync(ctx context.Context, s *model.State) error {
	s = s.Clone()
	all := slices.SortedFunc(maps.Keys(s.Frontends), model.Key.Compare)
	n := min(int(p.lacks.Load()), len(all))
	for _, key := range all[:n] {
		delete(s.Frontends, key)
	}
	if err := p.Dataplane.Sync(ctx, s); err != nil || n == 0 {
		return err
	}
	return fmt.Errorf("%w: %v", dataplane.ErrPartial, all[:n])
}

func (p *short) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

// What the plane in force cannot do, the new one need not do either, but all else; and it is tried again.
func TestEngine_switchLacksRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before, fromRows := &short{}, true
		before.lacks.Store(1)
		p := newPair(t, func(o *Options) {
			before.Dataplane = o.Plane
			o.Plane = before
		})
		p.send(web(1, "10.244.1.2"))
		p.send(web(2, "10.244.1.2"))
		synctest.Wait()
		change := func(lacks int32) (to *short, said string, err error) {
			made, err := p.next.New(dataplane.Config{})
			if err != nil {
				t.Fatal(err)
			}
			to = &short{Dataplane: made}
			to.lacks.Store(lacks)
			err = p.engine.Switch(t.Context(), Switch{
				To: to, Lacks: func() bool { return fromRows },
				InForce: func(context.Context, *model.State) error { return nil },
				Undo:    func() { p.plane.looks = true },
				Progress: func(step Progress) {
					said += fmt.Sprintf("%s %t ", step.Step, step.Err == nil)
					if step.Step == StepProgrammed {
						p.send(web(3, "10.244.1.2"))
						synctest.Wait()
					}
				},
			})
			return to, said, err
		}
		if _, said, err := change(2); err == nil || !strings.Contains(err.Error(), "does not hold what it should") {
			t.Errorf("%s: %v", said, err)
		}
		fromRows = false // but what another plane has left
		if _, said, err := change(1); !errors.Is(err, dataplane.ErrPartial) {
			t.Errorf("%s: %v", said, err)
		}
		fromRows = true
		to, said, err := change(1)
		if want := "programmed false verified false in-force true "; said != want || err != nil {
			t.Errorf("%s: %v", said, err)
		}
		to.lacks.Store(0)
		bubble.Pass(time.Minute)
		p.kernel = p.next
		p.converged()
		p.stop()
	})
}
