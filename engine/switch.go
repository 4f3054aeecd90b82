package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// A data plane is changed make before break. Up to the point marked with a line the plane in force stays there, and
// whatever fails is undone; from then on what fails is tried again, as everything is.
//
//	Switch ─► To.Learn: the sessions of the plane in force ─► To.Sync, To.Apply: what has changed since, To.Audit:
//	          beside the loop, which goes on with changes
//	loop   ─► To.Apply: what has changed since ─► To.Learn: who has come since ─► To.SetStage(Active)
//	────────── error: To.Close, Undo, and Sync of the plane that stays
//	       ─► To is in force ─► Close of the one before
//	Switch ─► InForce, beside the loop

// Switch says to which data plane, and what its maker knows of both. The functions are called one after the other;
// those that are nil do nothing.
type Switch struct {
	To dataplane.Dataplane
	// Together says that both planes have objects of the kernel in common. Then the loop programs To and reads it back, so
	// that changes wait for it.
	Together bool
	// Lacks reports, in the loop, whether there are rows that the plane in force cannot have in force: then To need not be
	// better. nil: an error of it that wraps dataplane.ErrPartial means that.
	Lacks func() bool
	// InForce removes what the other plane has left, while To follows changes; the State is its own. An error, which wraps
	// dataplane.ErrPartial, has To.Sync called again.
	InForce func(context.Context, *model.State) error
	// Undo is called by the loop after a failure, when To has been closed: the next Sync of the plane that stays is to
	// remove what To has left.
	Undo func()
	// Progress is told what has been done. It must be quick.
	Progress func(Progress)
}

// SwitchStep is one of those that a Switch takes.
type SwitchStep string

// The steps, in order. RolledBack comes instead of all after it.
const (
	StepProgrammed SwitchStep = "programmed" // To holds all rows
	StepVerified   SwitchStep = "verified"   // it has been read back
	StepCarried    SwitchStep = "carried"    // To remembers of clients with affinity what the other plane does
	StepInForce    SwitchStep = "in-force"
	StepRolledBack SwitchStep = "rolled-back" // nothing is left of To
)

// Progress is a step that has been done.
type Progress struct {
	Step    SwitchStep
	Rows    Rows // that are programmed
	Clients int  // that were carried over
	Took    time.Duration
	Err     error // of a step that could not be done, or not for all rows, and keeps nobody from going on
}

// ErrStarting says that there is nothing yet to be programmed.
var ErrStarting = errors.New("the objects of the cluster have not arrived yet")

// Switch lets the Engine go on with another data plane, which it owns from now on: after an error it is closed, nothing
// of it is in the kernel any more, and the one before is in force as ever. The end of the context is such an error,
// up to the moment from which To is in force.
func (e *Engine) Switch(ctx context.Context, s Switch) error {
	if s.Progress == nil {
		s.Progress = func(Progress) {}
	}
	w := &switching{Switch: s, engine: e, began: time.Now()}
	if err := e.order(ctx, func(ctx context.Context, _ View) error { return w.begin(ctx) }); err != nil {
		return errors.Join(err, s.To.Close())
	}
	err := w.program(ctx)
	if err == nil {
		err = e.order(ctx, func(ctx context.Context, _ View) error { return w.finish(ctx) })
	}
	if err != nil {
		err = errors.Join(err, w.rollBack(ctx))
	} else {
		w.clear(context.WithoutCancel(ctx))
	}
	debug.FreeOSMemory() // reading and programming everything takes several times what remains
	return err
}

// switching is a Switch that goes on.
type switching struct {
	Switch
	engine    *Engine
	base      *model.State // that To holds, or shall hold first; nil: the loop does it
	began     time.Time    // the step that goes on
	tolerates bool         // what the plane in force cannot do, To need not do either
	missing   int          // how much of it an audit of that sees
	partial   error        // why some rows are not in force; nil: all are
	clients   int          // that To remembers
	forgot    error        // why these are not all
}

func (w *switching) begin(ctx context.Context) error {
	if w.engine.state == nil {
		return ErrStarting
	}
	w.inherit(ctx)
	if err := w.indulge(ctx); err != nil {
		return err
	}
	if !w.Together {
		w.base = w.engine.state.Clone()
	}
	return nil
}

// indulge finds out what To need not be able to do.
func (w *switching) indulge(ctx context.Context) error {
	e := w.engine
	if w.tolerates = e.partial && (w.Lacks == nil || w.Lacks()); !w.tolerates {
		return nil
	}
	r, err := e.options.Plane.Audit(ctx, e.state, dataplane.Full)
	if err != nil && !errors.Is(err, dataplane.ErrPartial) {
		return fmt.Errorf("read the data plane in force back: %w", err)
	}
	w.missing = len(r.Drifts)
	return nil
}

// program has To hold all rows, and reads them back, unless the loop is to do that.
func (w *switching) program(ctx context.Context) error {
	if w.base == nil {
		return nil
	}
	if err := w.sync(ctx, w.base); err != nil {
		return err
	}
	now, err := w.look(ctx)
	if err == nil {
		err = w.follow(ctx, now)
	}
	if err == nil {
		err = w.verify(ctx, now)
	}
	return err
}

// look is how the State is now.
func (w *switching) look(ctx context.Context) (now *model.State, err error) {
	err = w.engine.order(ctx, func(_ context.Context, v View) error {
		if v.State == nil {
			return ErrStarting
		}
		now = v.State.Clone()
		return nil
	})
	return now, err
}

func (w *switching) sync(ctx context.Context, s *model.State) error {
	if err := w.note(&w.partial, w.To.Sync(ctx, s)); err != nil {
		return fmt.Errorf("program the new data plane: %w", err)
	}
	w.did(Progress{Step: StepProgrammed, Rows: count(s), Err: w.partial})
	return nil
}

// note forgives rows that To cannot have in force if the plane before cannot either, and notes why.
func (w *switching) note(why *error, err error) error {
	if errors.Is(err, dataplane.ErrPartial) && w.tolerates {
		*why = err
		return nil
	}
	*why = nil
	return err
}

// did tells of a step, and begins the next one.
func (w *switching) did(p Progress) {
	now := time.Now()
	p.Took = now.Sub(w.began)
	w.began = now
	w.Progress(p)
}

// finish puts To in force. The loop calls it, so that no change comes between.
func (w *switching) finish(ctx context.Context) error {
	e := w.engine
	if e.state == nil {
		return ErrStarting
	}
	if err := w.catchUp(ctx, e.state); err != nil {
		return err
	}
	if err := w.enter(ctx); err != nil {
		return err
	}
	old := e.options.Plane
	w.swap()
	if err := old.Close(); err != nil {
		e.options.Log.Warn("close the data plane that was replaced", "error", err)
	}
	w.base = e.state.Clone()
	return nil
}

// enter has To take packets. Who comes while it takes in whom the plane before knows is carried over after that.
func (w *switching) enter(ctx context.Context) error {
	_ = w.carry(ctx)
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := w.To.SetStage(ctx, w.engine.state, dataplane.Active)
	var partial error
	if err := w.note(&partial, err); err != nil {
		return fmt.Errorf("bring the new data plane into force: %w", err)
	}
	w.partial = cmp.Or(partial, w.partial)
	failed := w.carry(ctx)
	if err := errors.Join(w.forgot, failed); w.clients > 0 || err != nil {
		w.did(Progress{Step: StepCarried, Clients: w.clients, Err: err})
	}
	return nil
}

// catchUp has To hold what the plane in force does.
func (w *switching) catchUp(ctx context.Context, now *model.State) error {
	if w.base != nil {
		return w.follow(ctx, now)
	}
	if err := w.sync(ctx, now); err != nil {
		return err
	}
	return w.verify(ctx, now)
}

// follow has To do what has changed since it was programmed.
func (w *switching) follow(ctx context.Context, now *model.State) error {
	change := model.Diff(w.base, now)
	w.base = now
	if change.Empty() {
		return nil
	}
	var partial error
	if err := w.note(&partial, w.To.Apply(ctx, now, change)); err != nil {
		return fmt.Errorf("program what has changed meanwhile: %w", err)
	}
	w.partial = cmp.Or(partial, w.partial) // what Sync could not do nobody has tried again
	return nil
}

// verify reads To back. What is not as it should be may have been changed by somebody else, or be about something that
// has just come, so that it is programmed once more.
func (w *switching) verify(ctx context.Context, s *model.State) error {
	r, err := w.To.Audit(ctx, s, dataplane.Full)
	if err == nil && len(r.Drifts) > 0 {
		if err = w.note(&w.partial, w.To.Repair(ctx, s, r)); err == nil {
			r, err = w.To.Audit(ctx, s, dataplane.Full)
		}
	}
	if err != nil {
		return fmt.Errorf("read the new data plane back: %w", err)
	}
	if n := len(r.Drifts); n > 0 && (w.partial == nil || n > w.missing) {
		err := fmt.Errorf("the new data plane does not hold what it should: %s%s", r.Drifts[0], andMore(n-1))
		return errors.Join(err, w.partial)
	}
	w.did(Progress{Step: StepVerified, Rows: count(s), Err: w.partial})
	return nil
}

func andMore(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// inherit has To take in, with its first Sync, who is known. It is no reason not to switch that it cannot be had.
func (w *switching) inherit(ctx context.Context) {
	s := w.engine.state
	known := dataplane.NewSessions(s)
	failed := known.Add(w.engine.options.Plane.Sessions(ctx, s))
	w.clients = known.Len() // of which To may know some, if it has served before
	_, err := w.To.Learn(ctx, s, func(yield func(dataplane.Session, error) bool) {
		for one := range known.All() {
			if !yield(one, nil) {
				return
			}
		}
	})
	w.forgot = errors.Join(failed, err)
}

// carry has To remember who has come since.
func (w *switching) carry(ctx context.Context) error {
	s := w.engine.state
	n, err := w.To.Learn(ctx, s, w.engine.options.Plane.Sessions(ctx, s))
	w.clients += n
	return err
}

// swap puts To in force. It is known to hold all rows.
func (w *switching) swap() {
	e := w.engine
	e.options.Plane = w.To
	e.dirty, e.backoff, e.retryAt, e.again = false, 0, time.Time{}, true
	e.partial, e.audits.lacking = w.partial != nil, nil
	e.rests.end()
	e.planeChanged()
	e.programmed(true)
	w.did(Progress{Step: StepInForce})
}

// clear removes what the other plane has left. That may take as long as it took to program it. An audit then sees at
// once whether all of To is still there.
func (w *switching) clear(ctx context.Context) {
	e := w.engine
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-e.stopped:
			cancel()
		case <-ctx.Done():
		}
	}()
	var failed error
	if w.InForce != nil {
		failed = w.InForce(ctx, w.base)
	}
	_ = e.order(ctx, func(ctx context.Context, _ View) error { // if it has stopped, the next process does it
		e.audits.due, e.again = time.Time{}, true
		if failed != nil {
			e.failed(ctx, failed)
		}
		return nil
	})
}

// rollBack leaves nothing of To. What cannot be removed is tried again, as all that fails.
func (w *switching) rollBack(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	done := false
	err := w.engine.order(ctx, func(ctx context.Context, _ View) error {
		done = true
		return w.undo(ctx)
	})
	if !done { // nobody goes on with the plane in force
		return errors.Join(err, w.To.Close())
	}
	w.did(Progress{Step: StepRolledBack, Err: err})
	return err
}

// returnSessions has the plane that stays remember who has met To. That may have been asked first for a while.
func (w *switching) returnSessions(ctx context.Context) {
	s := w.engine.state
	if s == nil {
		return
	}
	if _, err := w.engine.options.Plane.Learn(ctx, s, w.To.Sessions(ctx, s)); err != nil {
		w.engine.options.Log.Debug("clients with session affinity may get other backends", "error", err)
	}
}

func (w *switching) undo(ctx context.Context) error {
	e := w.engine
	w.returnSessions(ctx)
	err := w.To.Close()
	if w.Undo != nil {
		w.Undo()
	}
	e.dirty, e.again = true, true
	if e.state == nil {
		return err
	}
	if failed := e.sync(ctx, slog.LevelDebug); failed != nil {
		e.failed(ctx, failed)
		return errors.Join(err, fmt.Errorf("remove what the new data plane has left: %w", failed))
	}
	e.dirty, e.partial, e.backoff, e.retryAt = false, false, 0, time.Time{}
	return err
}
