package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

// vandalise deletes all frontends.
func (r *rig) vandalise() { r.kernel.Do(func(rows *model.State) { clear(rows.Frontends) }) }

func TestEngine_foreignChangeWakesTheAudit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		foreign := make(chan dataplane.ExternalChange)
		var rounds []Round
		r.start(func(o *Options) {
			o.AuditInterval, o.ExternalChanges = 10*time.Hour, foreign
			o.Observer = observerFunc(func(round Round) { rounds = append(rounds, round) })
		})
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.vandalise()
		foreign <- dataplane.ExternalChange{What: "replaced table nat", Process: "iptables", PID: 6, Only: "iptables -t nat"}
		foreign <- dataplane.ExternalChange{What: "deleted table ip fairlead", Process: "nft", PID: 7}
		bubble.Pass(time.Second)
		r.converged()
		if log := r.log.String(); !strings.Contains(log, `by="nft (process 7)"`) {
			t.Error(log)
		}
		r.stop()
		for _, round := range rounds {
			if len(round.Drifts) > 0 && len(round.ExternalChanges) == 1 {
				return
			}
		}
		t.Errorf("no round tells who it was: %+v", rounds)
	})
}

// vandal undoes all that is programmed, and the kernel tells of it.
func (r *rig) vandal(foreign chan<- dataplane.ExternalChange, end time.Time) {
	for ; time.Now().Before(end); bubble.Work(50 * time.Millisecond) {
		r.vandalise()
		select {
		case foreign <- dataplane.ExternalChange{What: "deleted table ip fairlead", Process: "nft", PID: 7}:
		default:
		}
	}
}

// count is how often a method of the plane was called.
func (r *rig) count(method string) (n int) {
	for _, call := range r.kernel.Calls() {
		if call == method {
			n++
		}
	}
	return n
}

// A program that undoes every repair makes repairs rare and is named, and the health check says that rules are undone.
// Changes of the cluster go on.
func TestEngine_undone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		foreign := make(chan dataplane.ExternalChange)
		r.start(func(o *Options) { o.ExternalChanges = foreign })
		r.send(web(1, "10.244.1.2"))
		r.converged()
		before, start := r.count("sync"), time.Now()
		go r.vandal(foreign, start.Add(5*time.Minute))
		for i, healthy := range []bool{true, false, false, false} {
			bubble.Pass(50 * time.Second)
			r.send(web(2, fmt.Sprint("10.244.1.", i+1)))
			bubble.Pass(5 * time.Millisecond)
			if !strings.Contains(r.kernel.String(), fmt.Sprint("10.244.1.", i+1)) {
				t.Errorf("a change does not come through: %s", r.kernel)
			}
			s := r.engine.Status()
			if u := s.Undone; r.engine.Healthy() != healthy || u == nil || u.Author != "nft (process 7)" || u.Since.Sub(start) > time.Second ||
				!u.Rarer {
				t.Errorf("after %v: healthy %v, want %v; undone %+v", time.Since(start), r.engine.Healthy(), healthy, u)
			}
		}
		if n := r.count("sync") - before; n < 10 || n > 15 {
			t.Errorf("%d repairs in 200 s, want some, and ever more rarely", n)
		}
		bubble.Pass(time.Until(start.Add(5*time.Minute + LongestPause + 2*auditInterval)))
		if got := r.kernel.String(); got != r.state.String() {
			t.Errorf("when nobody undoes it any more the kernel is\n%s", got)
		}
		bubble.Pass(repairHolds + 2*auditInterval)
		if s := r.engine.Status(); s.Undone != nil || !r.engine.Healthy() {
			t.Errorf("when the repair has held: %+v", s)
		}
		r.stop()
		for text, want := range map[string]int{"another program undoes the repairs": 1, "repairs hold again": 1} {
			if n := strings.Count(r.log.String(), text); n != want {
				t.Errorf("%q was logged %d times, want %d:\n%s", text, n, want, r.log.String())
			}
		}
	})
}

// Where a program undoes repairs only now and then, each is repaired at once.
func TestEngine_undoneNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(nil)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		for range 100 {
			r.vandalise()
			bubble.Pass(2 * auditInterval)
			if got := r.kernel.String(); got != r.state.String() {
				t.Fatalf("not repaired after a second:\n%s", got)
			}
			bubble.Pass(repairHolds)
		}
		if !r.engine.Healthy() {
			t.Errorf("%+v", r.engine.Status())
		}
		r.stop()
	})
}

// An audit that takes longer than it may says nothing about the kernel. It gets more time, and does not lead to a Sync.
func TestEngine_auditTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := newRig(t), &longAudit{took: 100 * time.Second}
		r.start(func(o *Options) { p.Dataplane, o.Plane = o.Plane, p })
		r.send(web(1, "10.244.1.2"))
		bubble.Pass(time.Hour)
		if n := r.count("sync"); n != 1 || p.completed.Load() == 0 {
			t.Errorf("%d calls of Sync, want the first one; %d audits came to their end", n, p.completed.Load())
		}
		r.vandalise()
		bubble.Pass(5 * time.Minute)
		if got := r.kernel.String(); got != r.state.String() {
			t.Errorf("not repaired:\n%s", got)
		}
		r.stop()
	})
}

// longAudit takes its time, or all that it gets.
type longAudit struct {
	dataplane.Dataplane
	took      time.Duration
	completed atomic.Int64
}

var errDone = errors.New("done")

func (p *longAudit) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	ctx, end := context.WithDeadlineCause(ctx, time.Now().Add(p.took), errDone)
	defer end()
	if <-ctx.Done(); !errors.Is(context.Cause(ctx), errDone) {
		return dataplane.Report{}, ctx.Err()
	}
	p.completed.Add(1)
	return p.Dataplane.Audit(ctx, s, d)
}

// A kernel that cannot be read back has Sync called ever more rarely. Changes are programmed at once between.
func TestEngine_auditFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var fails atomic.Bool
		fails.Store(true)
		r.start(func(o *Options) { o.Plane = unreadable{o.Plane, &fails} })
		r.send(web(1, "10.244.1.2"))
		bubble.Pass(time.Hour)
		before := r.count("sync")
		bubble.Pass(10 * time.Minute)
		if n := r.count("sync") - before; n < 15 || n > 25 {
			t.Errorf("%d calls of Sync in ten minutes, want those that are due every 30 s", n)
		}
		r.send(web(2, "10.244.1.2"))
		bubble.Pass(againBackoff)
		if got := r.kernel.String(); got != r.state.String() {
			t.Errorf("a change has to wait: %s", got)
		}
		fails.Store(false)
		bubble.Pass(maxBackoff)
		r.vandalise()
		bubble.Pass(2 * auditInterval)
		if got := r.kernel.String(); got != r.state.String() {
			t.Errorf("not repaired: %s", got)
		}
		r.stop()
	})
}

// unreadable is a plane that audits may fail of.
type unreadable struct {
	dataplane.Dataplane
	fails *atomic.Bool
}

func (p unreadable) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if p.fails.Load() {
		return r, errBroken
	}
	return p.Dataplane.Audit(ctx, s, d)
}

// fullAudit takes its time when it is asked for every row.
type fullAudit struct {
	dataplane.Dataplane
	times int
}

func (p *fullAudit) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	if d == dataplane.Full {
		p.times++
		bubble.Work(time.Second / 2)
	}
	return p.Dataplane.Audit(ctx, s, d)
}

// Endless changes that do not concern Fairlead leave the audits of each interval as they are.
func TestEngine_innocentChangesHaveABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, plane := newRig(t), &fullAudit{}
		foreign := make(chan dataplane.ExternalChange)
		r.start(func(o *Options) {
			plane.Dataplane, o.ExternalChanges = o.Plane, foreign
			o.Plane = plane
		})
		r.send(web(1, "10.244.1.2"))
		r.converged()
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); bubble.Pass(50 * time.Millisecond) {
			select {
			case foreign <- dataplane.ExternalChange{What: "something"}:
			default:
			}
		}
		synctest.Wait()
		if plane.times < 2 || plane.times > 6 {
			t.Errorf("%d audits of every row, of 0.5 s each, in ten minutes", plane.times)
		}
		r.vandalise()
		bubble.Pass(2 * time.Second)
		if got := r.kernel.String(); got != r.state.String() {
			t.Errorf("not repaired after two seconds:\n%s", got)
		}
		r.stop()
	})
}

func TestControl_audit(t *testing.T) {
	r := newRig(t)
	socket := filepath.Join(t.TempDir(), "control")
	r.start(func(o *Options) {
		o.ControlSocket, o.AuditInterval = socket, 10*time.Hour
		o.About = func() About { return About{Plane: "memory"} }
	})
	defer r.stop()
	r.send(web(1, "10.244.1.2"))
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	ask := func() (a Audited) {
		t.Helper()
		text, err := Ask(t.Context(), socket, "/audit")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &a); err != nil {
			t.Fatal(err)
		}
		return a
	}
	if a := ask(); a.Plane != "memory" || a.Rows != r.state.Rows() || len(a.Drifts) != 0 {
		t.Errorf("%+v", a)
	}
	r.vandalise()
	if a := ask(); len(a.Drifts) != 1 || !strings.Contains(a.Drifts[0].String(), "10.96.0.1:80/tcp") || !a.Repaired {
		t.Errorf("%+v", a)
	}
	if a := ask(); len(a.Drifts) != 0 {
		t.Errorf("after the repair: %+v", a)
	}
	r.setFault(func(string) error { return errBroken })
	if _, err := Ask(t.Context(), socket, "/audit"); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("a kernel that cannot be read: %v", err)
	}
}

// lackingPlane cannot put the frontends of the first Service in force.
type lackingPlane struct{ dataplane.Dataplane }

func (p lackingPlane) Sync(ctx context.Context, s *model.State) error {
	s = s.Clone()
	maps.DeleteFunc(s.Frontends, func(k model.Key, _ model.Frontend) bool {
		return k.Addr == netip.MustParseAddr("10.96.0.1")
	})
	if err := p.Dataplane.Sync(ctx, s); err != nil {
		return err
	}
	return fmt.Errorf("%w: %w", dataplane.ErrPartial, errBroken)
}

func (p lackingPlane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p lackingPlane) Apply(ctx context.Context, s *model.State, _ model.Change) error {
	return p.Sync(ctx, s)
}

// A refused row does not hide external changes of other rows, and is not reported as one.
func TestEngine_auditsWhileRowsLack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.Plane = lackingPlane{o.Plane} })
		r.send(web(1, "10.244.1.2"))
		r.send(web(2, "10.244.1.2"))
		bubble.Pass(time.Hour)
		if s := r.engine.Status(); s.Drifts != 0 || s.Error == "" || !r.engine.Healthy() {
			t.Errorf("nobody has done anything: %+v", s)
		}
		whole, before := r.kernel.String(), len(r.kernel.Calls())
		bubble.Pass(10 * time.Minute)
		calls := map[string]int{}
		for _, call := range r.kernel.Calls()[before:] {
			calls[call]++
		}
		if n := calls["sync"]; n < 15 || n > 30 {
			t.Errorf("%d calls of Sync in ten minutes, want those that are due every 30 s", n)
		}
		for i := range 3 { // not when the retry is due
			bubble.Pass(7 * time.Second)
			r.vandalise()
			bubble.Pass(2 * auditInterval)
			if got := r.kernel.String(); got != whole {
				t.Errorf("not repaired after a second:\n%s\nwant:\n%s", got, whole)
			}
			if n := r.engine.Status().Drifts; n != i+1 {
				t.Errorf("%d differences told, want %d", n, i+1)
			}
		}
		r.stop()
		log := r.log.String()
		if !strings.Contains(log, `drift="frontend 10.96.0.2:`) {
			t.Error("the log does not tell what was done")
		}
		if strings.Contains(log, `drift="frontend 10.96.0.1:`) {
			t.Error("somebody is blamed for what could not be programmed")
		}
	})
}

// Rows that could not be programmed are no external change.
func TestControl_auditOfWhatIsNotProgrammed(t *testing.T) {
	r := newRig(t)
	socket := filepath.Join(t.TempDir(), "control")
	var observed atomic.Int64 // differences
	r.start(func(o *Options) {
		o.ControlSocket, o.Plane = socket, lackingPlane{o.Plane}
		o.AuditInterval = 10 * time.Hour
		o.Observer = observerFunc(func(round Round) { observed.Add(int64(len(round.Drifts))) })
	})
	defer r.stop()
	r.send(web(1, "10.244.1.2"))
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	text, err := Ask(t.Context(), socket, "/audit")
	if err != nil {
		t.Fatal(err)
	}
	var a Audited
	if err := json.Unmarshal(text, &a); err != nil {
		t.Fatal(err)
	}
	if len(a.Drifts) != 0 || a.Error != "" || len(a.Refused) != 1 || !strings.Contains(a.Refused[0].Object, "10.96.0.1") {
		t.Errorf("a row that cannot be in force: %+v", a)
	}
	r.setFault(func(operation string) error { // the kernel can be read
		if operation == "rows read" {
			return nil
		}
		return errBroken
	})
	r.send(web(2, "10.244.1.2"))
	for r.engine.Status().WaitingSince.IsZero() {
		if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := Ask(t.Context(), socket, "/audit"); err == nil || !strings.Contains(err.Error(), errBroken.Error()) {
		t.Errorf("the kernel is unknown, and the answer %s %v", text, err)
	}
	if n := observed.Load(); n != 0 {
		t.Errorf("somebody is blamed for %d differences", n)
	}
}

// observerFunc is told of rounds.
type observerFunc func(Round)

func (f observerFunc) Round(r Round)      { f(r) }
func (observerFunc) Answered(string, int) {}
func (observerFunc) Arrived(Changes)      {}
