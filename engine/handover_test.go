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
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

// pair is a rig whose plane may be changed for another one of the same kernel, and back.
type pair struct {
	*rig
	hand   *handover.Handover
	refuse atomic.Bool // to remove what the plane that is not in force has left
}

const other = "other"

func newPair(t *testing.T, wrap func(dataplane.Dataplane) dataplane.Dataplane) *pair {
	p := &pair{rig: newRig(t)}
	p.start(func(o *Options) {
		o.AuditInterval = 10 * time.Hour
		p.hand = handover.New(handover.Options{
			Drivers: []dataplane.Driver{p.driver(memory.Name), p.driver(other)}, DrainTime: time.Hour, Log: o.Log,
		})
		if wrap != nil {
			o.Plane = wrap(o.Plane)
		}
		p.hand.Start(&handover.Plane{Dataplane: o.Plane, Name: memory.Name})
		o.Plane = p.hand
	})
	return p
}

func (p *pair) driver(name string) dataplane.Driver {
	d := p.kernel.Driver(name, memory.Tracked)
	remove := d.Remove
	d.Remove = func(ctx context.Context, c dataplane.Config) error {
		if p.refuse.Load() {
			return errBroken
		}
		return remove(ctx, c)
	}
	return d
}

// next is the name of the plane that is not in force.
func (p *pair) next() string {
	if p.hand.InForce().Name == other {
		return memory.Name
	}
	return other
}

// open opens a plane of the kernel.
func (p *pair) open(name string, c dataplane.Config) dataplane.Dataplane {
	made, err := p.driver(name).Open(c)
	if err != nil {
		p.t.Fatal(err)
	}
	return made
}

// change switches to the other plane, and tells which steps that took.
func (p *pair) change(ctx context.Context, together bool, c dataplane.Config) (steps string, err error) {
	to := &handover.Plane{Dataplane: p.open(p.next(), c), Name: p.next()}
	if together {
		to.Behind = p.hand.InForce().Name
	}
	return p.changeTo(ctx, to, nil)
}

func (p *pair) changeTo(ctx context.Context, to *handover.Plane, did func(handover.Progress)) (steps string, err error) {
	var all []string
	err = p.hand.Switch(ctx, p.engine, func() (*handover.Plane, error) { return to, nil }, func(step handover.Progress) {
		text := string(step.Step)
		if step.Err != nil {
			text += "!"
		}
		all = append(all, text)
		if did != nil {
			did(step)
		}
	})
	return strings.Join(all, " "), err
}

// settled expects that the plane in force holds all rows, and that nothing is left of the other one.
func (p *pair) settled() {
	p.t.Helper()
	bubble.Pass(time.Minute)
	r, err := p.open(p.hand.InForce().Name, dataplane.Config{}).Audit(p.t.Context(), p.state, dataplane.Full)
	if err != nil || len(r.Drifts) > 0 {
		p.t.Fatalf("%v, %v", r.Drifts, err)
	}
	if left, _ := p.driver(p.next()).Inspect(); left.Rules && p.hand.InForce().Behind == "" {
		p.t.Fatalf("something is left of %s", p.next())
	}
}

func TestHandover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		if _, err := p.change(t.Context(), false, dataplane.Config{}); !errors.Is(err, handover.ErrStarting) {
			t.Fatal(err)
		}
		p.send(web(1, "10.244.1.2"))
		p.settled()
		for i := range 4 {
			steps, err := p.change(t.Context(), i%2 == 0, dataplane.Config{})
			if want := "programmed verified in-force cleared"; err != nil || steps != want {
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
func TestHandover_whileChangesCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.settled()
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
func TestHandover_fails(t *testing.T) {
	for _, together := range []bool{false, true} {
		t.Run(fmt.Sprint("together ", together), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, nil)
				p.send(web(1, "10.244.1.2"))
				p.send(web(2, "10.244.1.2", "10.244.1.3"))
				p.settled()
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
					if !errors.Is(err, errBroken) || k > 0 && !strings.HasSuffix(steps, "rolled-back") {
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

// A plane whose rows are refused, or do not arrive in the kernel, does not become active.
func TestHandover_verifies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.settled()
		_, err := p.changeTo(t.Context(), &handover.Plane{Dataplane: lossy{p.open(other, dataplane.Config{})}, Name: other}, nil)
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

// A cancelled change restores the old plane; when the engine ends, the new plane is closed.
func TestHandover_cancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.settled()
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
		stopped, calls := false, &called{}
		to := noted{p.open(other, dataplane.Config{Fault: func(string) error {
			if !stopped {
				stopped = true
				p.stop()
			}
			return nil
		}}), calls}
		_, err := p.changeTo(t.Context(), &handover.Plane{Dataplane: to, Name: other}, nil)
		if !errors.Is(err, ErrStopped) || calls.names[len(calls.names)-1] != "close" {
			t.Errorf("%v, %v", err, calls.names)
		}
	})
}

// The new plane becomes active although the old one's objects cannot be removed; the removal is tried again.
func TestHandover_cannotClear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.settled()
		p.refuse.Store(true)
		steps, err := p.change(t.Context(), false, dataplane.Config{})
		if err != nil || p.engine.Status().Error == "" || !strings.HasSuffix(steps, "in-force cleared!") {
			t.Errorf("%s: %v, %+v", steps, err, p.engine.Status())
		}
		p.refuse.Store(false)
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

// The new plane may lack the rows that the old plane lacks, but no others; they are tried again.
func TestHandover_lacksRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := &short{}
		before.lacks.Store(1)
		p := newPair(t, func(d dataplane.Dataplane) dataplane.Dataplane {
			before.Dataplane = d
			return before
		})
		p.send(web(1, "10.244.1.2"))
		p.send(web(2, "10.244.1.2"))
		synctest.Wait()
		change := func(lacks int32) (to *short, steps string, err error) {
			to = &short{Dataplane: p.open(other, dataplane.Config{})}
			to.lacks.Store(lacks)
			steps, err = p.changeTo(t.Context(), &handover.Plane{Dataplane: to, Name: other}, func(step handover.Progress) {
				if step.Step == handover.Programmed {
					p.send(web(3, "10.244.1.2"))
					synctest.Wait()
				}
			})
			return to, steps, err
		}
		if _, steps, err := change(2); err == nil || !strings.Contains(err.Error(), "the kernel differs from the rows") {
			t.Errorf("%s: %v", steps, err)
		}
		to, steps, err := change(1)
		if want := "programmed! verified! in-force cleared"; steps != want || err != nil {
			t.Errorf("%s: %v", steps, err)
		}
		to.lacks.Store(0)
		p.settled()
		p.stop()
	})
}

// A plane that goes on with what the one before has in the kernel finds what differs.
func TestHandover_replace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, nil)
		p.send(web(1, "10.244.1.2"))
		p.converged()
		before := p.engine.Status().InForceSince
		p.kernel.Do(func(s *model.State) { clear(s.Frontends) }) // a sync is needed to find this
		again := &handover.Plane{Dataplane: p.open(memory.Name, dataplane.Config{}), Name: memory.Name}
		if err := p.hand.Replace(t.Context(), p.engine, again); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := p.kernel.String(); got != p.state.String() {
			t.Fatalf("kernel:\n%s\nwant:\n%s", got, p.state)
		}
		if since := p.engine.Status().InForceSince; before.IsZero() || !since.After(before) {
			t.Errorf("the new plane is in force since %v, the old one was since %v", since, before)
		}
		p.send(web(2, "10.244.1.3"))
		p.converged()
		p.stop()
		if got := p.kernel.Calls(); !slices.Equal(got, []string{"sync", "close"}) {
			t.Fatal(got)
		}
	})
}
