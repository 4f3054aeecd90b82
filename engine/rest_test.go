package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// dearPlane takes a while for every change, and notes when it began.
type dearPlane struct {
	dataplane.Dataplane
	spend func()

	mu    sync.Mutex
	began []time.Time
}

func (p *dearPlane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	p.mu.Lock()
	p.began = append(p.began, time.Now())
	p.mu.Unlock()
	p.spend()
	return p.Dataplane.Apply(ctx, s, c)
}

// since is when it began, in milliseconds after a time.
func (p *dearPlane) since(start time.Time) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for _, at := range p.began {
		all = append(all, fmt.Sprint(at.Sub(start).Milliseconds()))
	}
	return strings.Join(all, " ")
}

func (p *dearPlane) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = nil
}

// dear starts an Engine for whose plane every change takes so long.
func dear(t *testing.T, took time.Duration, change func(*Options)) (*rig, *dearPlane) {
	r, p := newRig(t), &dearPlane{spend: func() { bubble.Work(took) }}
	start := time.Now()
	r.start(func(o *Options) {
		o.work = func() time.Duration { return time.Since(start) } // as if sleeping were work
		p.Dataplane, o.Plane = o.Plane, p
		o.AuditInterval, o.MaxRest = 10*time.Hour, time.Second
		if change != nil {
			change(o)
		}
	})
	r.send(web(1))
	r.converged()
	return r, p
}

// Where changes are programmed quickly, none waits. Where that takes long all the time, it gets a part of a
// processor, but no change waits for more than MaxRest.
func TestEngine_rests(t *testing.T) {
	quick := func(n int) string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprint(50*i))
		}
		return strings.Join(all, " ")
	}
	for _, c := range []struct {
		took    time.Duration
		maxRest time.Duration
		want    string // when changes are programmed that come each 50 ms, 39 of them
	}{
		{time.Millisecond, time.Second, quick(39)},
		{10 * time.Millisecond, time.Second, "0 50 100 150 200 250 300 350 400 480 560 640 720 800 880 960 1040 1120 1200 1280 1360 1440 1520 1600 1680 1760 1840 1920"},
		{30 * time.Millisecond, time.Second, "0 50 260 500 740 980 1220 1460 1700 1940"},
		{30 * time.Millisecond, 100 * time.Millisecond, "0 50 180 310 440 570 700 830 960 1090 1220 1350 1480 1610 1740 1870 2000"},
		{300 * time.Millisecond, time.Second, "0 1300 2600"},
		{40 * time.Millisecond, 0, quick(39)},
	} {
		t.Run(fmt.Sprint(c.took, c.maxRest), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, p := dear(t, c.took, func(o *Options) { o.MaxRest = c.maxRest })
				start := time.Now()
				for i := range 39 {
					r.send(web(i%4+1, fmt.Sprintf("10.244.1.%d", i+1)))
					bubble.Pass(50 * time.Millisecond)
				}
				r.converged()
				if got := p.since(start); got != c.want {
					t.Errorf("programmed after %s ms\nwant             %s", got, c.want)
				}
				quiet := time.Now()
				p.forget()
				r.send(web(1, "10.244.2.1"))
				r.converged()
				if got := p.since(quiet); got != "0" {
					t.Errorf("after a quiet time a change is programmed after %s ms, want at once", got)
				}
				r.stop()
			})
		})
	}
}

// One that is slow once in a while is not held to be slow.
func TestEngine_oneSlowChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := dear(t, 0, nil)
		n := 0
		p.spend = func() {
			took := 50 * time.Microsecond
			if n++; n%20 == 0 {
				took = 6 * time.Millisecond
			}
			bubble.Work(took)
		}
		start := time.Now()
		var want []string
		for i := range 100 {
			want = append(want, fmt.Sprint(10*i))
			r.send(web(1, fmt.Sprintf("10.244.1.%d", i+1)))
			bubble.Pass(10 * time.Millisecond)
		}
		r.converged()
		if got := p.since(start); got != strings.Join(want, " ") {
			t.Errorf("programmed after %s ms, want every one at once", got)
		}
		r.stop()
	})
}

// resting is an Engine whose plane rests for a second, while a change waits.
func resting(t *testing.T, change func(*Options)) (*rig, *dearPlane) {
	r, p := dear(t, 100*time.Millisecond, change)
	r.send(web(1, "10.244.1.1"))
	bubble.Pass(100 * time.Millisecond)
	r.send(web(1, "10.244.1.2"))
	synctest.Wait()
	return r, p
}

func TestEngine_servesWhileItRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := resting(t, nil)
		start := time.Now()
		for range 3 {
			err := r.engine.Do(t.Context(), func(_ context.Context, v View) error {
				if got := r.kernel.String(); got != v.State.String() {
					t.Errorf("a request sees\n%s\nwhile the kernel holds\n%s", v.State, got)
				}
				return nil
			})
			if err != nil || time.Since(start) > 0 {
				t.Fatalf("a request was answered after %v: %v", time.Since(start), err)
			}
		}
		if s := r.engine.Status(); !s.WaitingSince.Equal(start) {
			t.Errorf("a change waits since %v by the status, want %v", s.WaitingSince, start)
		}
		bubble.Pass(1100 * time.Millisecond)
		if s := r.engine.Status(); !s.WaitingSince.IsZero() {
			t.Errorf("when the rest is over, a change waits since %v", s.WaitingSince)
		}
		if got := p.since(start); got != "-100 550" {
			t.Errorf("programmed after %s ms, want 550", got)
		}
		r.converged()
		r.stop()
	})
}

func TestEngine_auditsWhileItRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := resting(t, func(o *Options) { o.AuditInterval = 10 * time.Millisecond })
		before := r.kernel.String()
		r.kernel.Do(func(s *model.State) { clear(s.Frontends) })
		bubble.Pass(20 * time.Millisecond)
		if got := r.kernel.String(); got != before {
			t.Errorf("in the rest the kernel is\n%s\nwant it repaired, without the change that waits:\n%s", got, before)
		}
		r.converged()
		r.stop()
	})
}

func TestEngine_endsWhileItRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := resting(t, nil)
		start := time.Now()
		r.stop()
		if took := time.Since(start); took > 0 {
			t.Errorf("it took %v", took)
		}
	})
}

// New settings and new parts do not wait for a rest to end.
func TestEngine_changedWhileItRests(t *testing.T) {
	settings := Settings{Table: masquerade(), AuditInterval: time.Hour}
	for name, change := range map[string]func(*rig) error{
		"settings": func(r *rig) error {
			if err := r.want.Configure(settings.Table); err != nil {
				return err
			}
			r.state, _, _ = r.want.Update(service.Batch{})
			return r.engine.Configure(r.t.Context(), settings)
		},
		"plane": func(r *rig) error {
			return r.engine.Between(r.t.Context(), func(_ context.Context, t handover.Turn) error {
				t.Replaced(false, nil)
				return nil
			})
		},
		"source": func(r *rig) error {
			next := script{make(chan service.Batch, 1), make(chan error, 1)}
			next.batches <- web(2, "10.244.2.2")
			r.want = newTable(r.t) // what the old source said, and what waits of it, is forgotten
			r.state, _, _ = r.want.Update(web(2, "10.244.2.2"))
			return r.engine.Replace(r.t.Context(), Parts{Source: next, Table: newTable(r.t)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, _ := resting(t, nil)
				if err := change(r); err != nil {
					t.Fatal(err)
				}
				bubble.Pass(200 * time.Millisecond) // for a last Apply
				if got, want := r.kernel.String(), r.state.String(); got != want {
					t.Errorf("the kernel holds\n%s\nwant\n%s", got, want)
				}
				r.stop()
			})
		})
	}
}

// How long it rests can be changed while it runs.
func TestEngine_configureTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := dear(t, 100*time.Millisecond, func(o *Options) { o.MaxRest = 0 })
		for _, rest := range []time.Duration{0, time.Second, 500 * time.Millisecond, time.Hour} {
			if err := r.engine.Configure(t.Context(), Settings{AuditInterval: 10 * time.Hour, MaxRest: rest}); err != nil {
				t.Fatal(err)
			}
			r.converged()
			p.forget()
			start := time.Now()
			for i := range 2 {
				r.send(web(1, fmt.Sprintf("10.244.%d.%d", rest/time.Millisecond%200, i+1)))
				bubble.Pass(time.Millisecond)
			}
			r.converged()
			want := fmt.Sprint("0 ", (100*time.Millisecond + min(rest, 8*100*time.Millisecond-250*time.Millisecond)).Milliseconds())
			if got := p.since(start); got != want {
				t.Errorf("with rests of %v: programmed after %s ms, want %s", rest, got, want)
			}
		}
		r.stop()
	})
}

func TestEngine_failsWhileItRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := resting(t, nil)
		r.setFault(func(string) error { return errBroken })
		bubble.Pass(10 * time.Second)
		if s := r.engine.Status(); s.Failures == 0 || s.WaitingSince.IsZero() {
			t.Errorf("the status is %+v, want failures", s)
		}
		r.setFault(nil)
		r.converged()
		r.stop()
	})
}

// The latency of a change that waits for a rest is counted from its arrival.
func TestObserver_whenTheEngineRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &rounds{}
		r, _ := dear(t, 100*time.Millisecond, func(options *Options) { options.Observer = o })
		o.take()
		start := time.Now()
		var sent []time.Time
		var happened []Happening
		for i := range 4 {
			at := time.Now().Add(-time.Millisecond)
			sent, happened = append(sent, time.Now()), append(happened, Happening{At: at})
			r.send(changed(web(1, fmt.Sprintf("10.244.1.%d", i+1)), at))
			bubble.Pass(200 * time.Millisecond)
			if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		r.converged()
		r.stop()
		var got []Round
		for _, round := range o.take() {
			if round.Verb != Rested {
				got = append(got, round)
			} else if len(round.Arrived) > 0 || len(round.Happened) > 0 {
				t.Errorf("nothing was programmed, and yet %+v", round)
			}
		}
		if len(got) != 2 || got[1].Verb != Applied {
			t.Fatalf("%d rounds, want two; %+v", len(got), got)
		}
		arrived := slices.Concat(got[0].Arrived, got[1].Arrived)
		all := slices.Concat(got[0].Happened, got[1].Happened)
		if !slices.Equal(arrived, sent) || !slices.Equal(all, happened) {
			t.Errorf("arrived %v, happened %v, want %v and %v", since(start, arrived), all, since(start, sent), happened)
		}
	})
}

func since(start time.Time, times []time.Time) (all []time.Duration) {
	for _, at := range times {
		all = append(all, at.Sub(start))
	}
	return all
}

// The rest follows from a plane's processor time, not from the time that it waits.
func TestEngine_restsAfterWork(t *testing.T) {
	for name, c := range map[string]struct {
		spend func()
		want  int // changes programmed of two
	}{
		"work": {func() {
			for begin := processorTime(); processorTime()-begin < 300*time.Millisecond; {
			}
		}, 1},
		//nolint:forbidigo // the clock of a bubble does not tell work from waiting, so that this wait must be real
		"waiting": {func() { time.Sleep(300 * time.Millisecond) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			p := &dearPlane{spend: c.spend}
			r := newRig(t)
			r.start(func(o *Options) { p.Dataplane, o.Plane, o.MaxRest = o.Plane, p, time.Hour })
			defer r.stop()
			r.send(web(1))
			r.programmed()
			for i := range 2 {
				r.send(web(1, fmt.Sprintf("10.244.1.%d", i+1)))
				r.taken(fmt.Sprintf("10.244.1.%d", i+1))
			}
			if got := len(strings.Fields(p.since(time.Now()))); got != c.want {
				t.Errorf("%d changes were programmed, want %d", got, c.want)
			}
		})
	}
}

// taken waits until the engine has programmed an endpoint of the first Service, or has it wait.
func (r *rig) taken(endpoint string) {
	r.t.Helper()
	eventually.Nil(r.t, "the batch is taken", func() error {
		return r.engine.Do(r.t.Context(), func(_ context.Context, v View) error {
			if r.engine.queue.Slices == 0 && !strings.Contains(v.State.String(), " "+endpoint+":") {
				return errors.New("it has not come")
			}
			return nil
		})
	})
}

// The size of turns follows what depends on it, whatever else they take.
func TestPace(t *testing.T) {
	const row = 100 * time.Microsecond
	for name, c := range map[string]struct {
		price time.Duration // of a turn, whatever its size
		row   time.Duration
		small bool // there are small turns, too
		want  [2]int
	}{
		"cheap":                      {0, time.Microsecond, true, [2]int{maxSize / 2, maxSize}},
		"dear rows":                  {10 * time.Millisecond, 10 * row, true, [2]int{minSize, minSize}},
		"a price, which is known":    {100 * time.Millisecond, row, true, [2]int{1200, 1700}},
		"a price, which is not":      {100 * time.Millisecond, row, false, [2]int{1200, 2300}},
		"a high price":               {1500 * time.Millisecond, row, true, [2]int{firstSize, dearSize}},
		"a high price, and no other": {1500 * time.Millisecond, row, false, [2]int{firstSize, dearSize}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPace()
			turn := func(rows int, full bool) {
				took := c.price + time.Duration(rows)*c.row
				p.took(&cost{took: took, work: took, shares: []share{{weight: rows}}, full: full})
			}
			for range 50 {
				if c.small {
					turn(3, false)
					turn(p.size, false) // all that there is, which is no small one
				}
				turn(p.size, true)
			}
			if p.size < c.want[0] || p.size > c.want[1] {
				t.Errorf("turns of %d rows, want %d to %d", p.size, c.want[0], c.want[1])
			}
		})
	}
}
