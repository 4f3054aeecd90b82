package engine

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// rounds is an Observer that remembers.
type rounds struct {
	mu       sync.Mutex
	rounds   []Round
	answered []string
	arrived  []Changes
}

func (o *rounds) Round(r Round) {
	o.mu.Lock()
	defer o.mu.Unlock()
	// Lent slices are copied, and then overwritten by the lender.
	r.Happened, r.Arrived = slices.Clone(r.Happened), slices.Clone(r.Arrived)
	o.rounds = append(o.rounds, r)
}

func (o *rounds) Arrived(c Changes) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.arrived = append(o.arrived, c)
}

func (o *rounds) Answered(path string, status int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answered = append(o.answered, fmt.Sprint(path, " ", status))
}

func (o *rounds) all() []Round {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.rounds)
}

func (o *rounds) answers() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.answered)
}

// take is the rounds since it was last called.
func (o *rounds) take() []Round {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.rounds
	o.rounds = nil
	return all
}

// observed starts an Engine that hardly audits.
func observed(t *testing.T) (*rig, *rounds) {
	r, o := newRig(t), &rounds{}
	r.start(func(options *Options) { options.Observer, options.AuditInterval = o, 10*time.Hour })
	return r, o
}

func TestObserver_verbs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, o := observed(t)
		problem := service.Problem{Object: "Service default/bad", Field: "spec", Reason: "is bad"}
		for i, want := range []Verb{Synced, Applied, Rested, Rested} {
			b := []service.Batch{web(1, "10.244.1.2"), web(1), web(1), {Problems: []service.Problem{problem}}}[i]
			r.send(b)
			synctest.Wait()
			got := o.take()
			if len(got) != 1 || got[0].Verb != want || got[0].Err != nil || len(got[0].Batch.Services) != len(b.Services) ||
				got[0].State == nil || got[0].Status.LastProgrammed.IsZero() || !slices.Equal(got[0].Problems, b.Problems) {
				t.Errorf("batch %d: %+v, want one round that did %q", i, got, want)
			}
		}
		r.stop()
	})
}

func TestObserver_drifts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, o := newRig(t), &rounds{}
		r.start(func(options *Options) { options.Observer = o })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		o.take()
		r.kernel.Do(func(s *model.State) { clear(s.Frontends) })
		bubble.Pass(auditInterval)
		r.stop()
		drifts := 0
		for _, round := range o.take() {
			drifts += len(round.Drifts)
			if len(round.Drifts) > 0 && round.Verb != Synced {
				t.Errorf("drifts without a repair: %+v", round)
			}
		}
		if drifts != 1 {
			t.Errorf("%d drifts, want 1", drifts)
		}
	})
}

// changed is a batch whose slices say when they happened.
func changed(b service.Batch, at time.Time) service.Batch {
	for _, s := range b.Slices.All() {
		s.Changed = at.UnixMicro()
	}
	return b
}

func TestObserver_whenThingsHappened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now()
		r, o := observed(t)
		// Events from before this process say nothing about its speed.
		r.send(changed(web(1, "10.244.1.2"), started.Add(-time.Hour)))
		r.converged()
		if got := o.take(); len(got) != 1 || len(got[0].Happened) != 0 || len(got[0].Arrived) != 1 {
			t.Fatalf("%+v", got)
		}
		// While the kernel refuses, changes wait; then each is told once.
		r.setFault(func(string) error { return errBroken })
		at := time.Now()
		r.send(changed(web(2, "10.244.1.3"), at))
		synctest.Wait()
		r.send(changed(web(3, "fd00::3"), at.Add(time.Microsecond)))
		synctest.Wait()
		got := o.take()
		for _, round := range got {
			if round.Happened != nil || round.Arrived != nil {
				t.Fatalf("not programmed, and yet %+v", round)
			}
		}
		if len(got) != 2 || got[0].Err == nil || got[0].Status.Failures != 1 {
			t.Fatalf("%+v", got)
		}
		r.setFault(nil)
		r.converged()
		var happened []Happening
		var arrived []time.Time
		for _, round := range o.take() {
			happened, arrived = append(happened, round.Happened...), append(arrived, round.Arrived...)
		}
		want := []Happening{{at, false}, {at.Add(time.Microsecond), true}}
		if !slices.Equal(happened, want) || len(arrived) != 2 {
			t.Errorf("%v, %v; want %v and two arrivals", happened, arrived, want)
		}
		r.stop()
	})
}

func TestObserver_refusedServers(t *testing.T) {
	noGoroutineLeft(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	at := taken.Addr().(*net.TCPAddr).AddrPort()
	r, o := newRig(t), &rounds{}
	r.start(func(options *Options) { options.Observer, options.HealthAddress = o, at })
	r.send(web(1, "10.244.1.2"))
	for range 3 {
		r.programmed()
	}
	r.stop()
	var refused []Refusal
	for _, round := range o.take() {
		refused = append(refused, round.Refused...)
	}
	if len(refused) != 1 || refused[0].Address != at || refused[0].Service != "" || refused[0].Err == nil {
		t.Errorf("%+v, want one refusal of %s", refused, at)
	}
}

// InForce has the version before the oldest slice that waits.
func TestInForce(t *testing.T) {
	var f inForce
	start := time.Now()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	for i, version := range []uint64{10, 0, 12, 15} {
		f.came(delivery{service.Batch{Version: version}, at(i)})
	}
	for _, step := range []struct {
		oldest time.Time
		want   uint64
	}{{at(0), 0}, {at(2), 10}, {at(3), 12}, {time.Time{}, 15}} {
		if f.follow(step.oldest, service.Barrier{}); f.Version != step.want {
			t.Errorf("while something waits since %s: %d, want %d", step.oldest.Sub(start), f.Version, step.want)
		}
	}
	for i := range 3 * maxDeliveries {
		f.came(delivery{service.Batch{Version: uint64(100 + i)}, at(10 + i)})
	}
	if f.follow(at(9), service.Barrier{}); f.Version != 15 || len(f.stamps) > maxDeliveries {
		t.Errorf("%d versions, in force %d", len(f.stamps), f.Version)
	}
	if f.follow(time.Time{}, service.Barrier{}); f.Version != uint64(99+3*maxDeliveries) {
		t.Errorf("in force is %d in the end", f.Version)
	}
}

// While the kernel refuses a change, its version is not in force.
func TestObserver_inForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, o := observed(t)
		version := func() uint64 {
			bubble.Pass(time.Second)
			all := o.all()
			return all[len(all)-1].InForce.Version
		}
		send := func(b service.Batch, version uint64) {
			b.Version = version
			r.send(b)
		}
		send(web(1, "10.244.1.2"), 10)
		if got := version(); got != 10 {
			t.Errorf("after the first batch %d is in force", got)
		}
		r.setFault(func(string) error { return errBroken })
		send(web(1, "10.244.1.3"), 11)
		if got := version(); got != 10 {
			t.Errorf("%d is in force, though the kernel refuses", got)
		}
		r.setFault(nil)
		if bubble.Pass(time.Minute); version() != 11 {
			t.Errorf("%d is in force in the end", version())
		}
		r.stop()
	})
}
