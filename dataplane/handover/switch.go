package handover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Loop is the goroutine that calls the methods of the plane, one after another.
type Loop interface {
	// Between has the loop call f between two changes, and returns its error.
	Between(ctx context.Context, f func(context.Context, Turn) error) error
	// Stopped is closed when the loop has ended.
	Stopped() <-chan struct{}
}

// Turn is what f may do, until it returns.
type Turn interface {
	// State is lent; nil: the objects of the cluster have not arrived yet.
	State() *model.State
	// Replaced tells that the plane is another one. Unless it holds all rows, the loop calls Sync. partial is why some
	// rows are not in force.
	Replaced(holds bool, partial error)
	// Failed has the loop call Sync again after an error.
	Failed(context.Context, error)
	// Resync calls Sync at once.
	Resync(context.Context) error
	// AuditSoon has the next audit come at once.
	AuditSoon()
}

// ErrStarting says that there is nothing yet to be programmed.
var ErrStarting = errors.New("the objects of the cluster have not arrived yet")

// Step is one of those that Switch takes.
type Step string

// The steps, in order. RolledBack comes instead of all that have not come yet.
const (
	Programmed Step = "programmed" // the new plane holds all rows
	Verified   Step = "verified"   // it has been read back
	Learned    Step = "carried"    // it has the sessions of the old one
	Activated  Step = "in-force"
	RolledBack Step = "rolled-back" // nothing is left of it but what connections need
	Cleared    Step = "cleared"     // nothing is left of the old plane but what connections need
)

// Progress is a step that has been done.
type Progress struct {
	Step             Step
	Frontends, Pools int         // that are programmed
	Clients          int         // whose sessions were learned
	Connections      int         // that need what a plane has left that was rolled back
	Left             []Remainder // of the old plane
	Took             time.Duration
	Err              error // of a step that could not be done, or not for all rows, and does not end the switch
}

// Switch puts another plane in force, make before break. Up to the point marked with a line the plane in force stays,
// and a failure undoes the switch. After it, failed steps are tried again.
//
//	Switch ─► new plane: Standby, Learn the sessions of the old one ─► Sync, Audit, beside the loop, which goes on with
//	          changes
//	loop   ─► new plane: Apply what has changed since ─► Learn the sessions that came since ─► Active ─► Learn again
//	────────── error: Close of the new plane, and Sync of the old one, which removes what the new one has left
//	       ─► the old plane is kept, or closed
//	Switch ─► what it has left is drained or removed, beside the loop
//
// Planes may have objects of the kernel in common. Then the loop does all of it, so that changes wait for it. After an
// error the plane before is in force, and nothing of the other one is in the kernel any more but the objects that
// connections need. The end of the context is such an error, up to the moment from which the new plane is in force.
func (h *Handover) Switch(ctx context.Context, loop Loop, open func() (*Plane, error), progress func(Progress)) error {
	if h.InForce() == nil {
		return ErrStarting
	}
	h.on(began) // first: only the Handover knows that a plane that was taken back carries connections
	to, err := open()
	if err != nil {
		h.on(abandoned)
		return err
	}
	w := &switching{Handover: h, loop: loop, to: to, progress: progress, began: time.Now()}
	if _, err = to.SetStage(ctx, nil, dataplane.Standby); err == nil {
		err = loop.Between(ctx, w.begin)
	}
	if err != nil { // nothing is programmed yet
		err = errors.Join(err, h.Discard(to))
		h.on(abandoned)
		return err
	}
	if err = w.program(ctx); err == nil {
		err = loop.Between(ctx, w.finish)
	}
	if err != nil {
		err = errors.Join(err, w.rollBack(context.WithoutCancel(ctx)))
	} else {
		w.clearOld(context.WithoutCancel(ctx))
	}
	return err
}

// switching is a Switch that goes on.
type switching struct {
	*Handover
	loop     Loop
	to       *Plane
	progress func(Progress)
	base     *model.State // that the new plane holds, or shall hold first; nil: the loop does it
	began    time.Time    // the step that goes on
	inferior bool         // the plane in force cannot have some rows in force: the new one need not be better
	missing  int          // how many of them an audit sees
	partial  error        // why some rows are not in force; nil: all are
	clients  int          // whose sessions the new plane has
	lost     error        // why these are not all
}

// begin has the new plane learn. The loop calls it.
func (w *switching) begin(ctx context.Context, t Turn) error {
	s := t.State()
	if s == nil {
		return ErrStarting
	}
	w.learn(ctx, s)
	if !w.to.shares(w.InForce()) {
		w.base = s.Clone()
	}
	if w.inferior = w.lacks; !w.inferior {
		return nil
	}
	r, err := w.Dataplane.Audit(ctx, s, dataplane.Full)
	if !dataplane.Known(err) {
		return fmt.Errorf("read the data plane in force back: %w", err)
	}
	w.missing = len(r.Drifts)
	return nil
}

// program has the new plane hold all rows, and reads them back, unless the loop is to do that.
func (w *switching) program(ctx context.Context) error {
	if w.base == nil {
		return nil
	}
	if err := w.sync(ctx, w.base); err != nil {
		return err
	}
	now, err := w.now(ctx)
	if err == nil {
		err = w.follow(ctx, now)
	}
	if err == nil {
		err = w.verify(ctx, now)
	}
	return err
}

// learn has the new plane take in, with its first Sync, the sessions of the plane in force. A switch goes on without.
func (w *switching) learn(ctx context.Context, s *model.State) {
	known := dataplane.NewSessions(s)
	failed := known.Add(w.Sessions(ctx, s))
	w.clients = known.Len() // of which the new plane may have some, if it has served before
	_, err := w.to.Learn(ctx, s, each(known))
	w.lost = errors.Join(failed, err)
}

// each are sessions that were read without an error.
func each(known *dataplane.Sessions) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		for one := range known.All() {
			if !yield(one, nil) {
				return
			}
		}
	}
}

// now is the State at this moment.
func (w *switching) now(ctx context.Context) (now *model.State, err error) {
	err = w.loop.Between(ctx, func(_ context.Context, t Turn) error {
		if t.State() == nil {
			return ErrStarting
		}
		now = t.State().Clone()
		return nil
	})
	return now, err
}

func (w *switching) sync(ctx context.Context, s *model.State) error {
	w.to.served = true
	if err := w.tolerate(&w.partial, w.hold(ctx, w.to, s)); err != nil {
		return fmt.Errorf("program the new data plane: %w", err)
	}
	w.did(Progress{Step: Programmed, Frontends: len(s.Frontends), Pools: len(s.Pools), Err: w.partial})
	return nil
}

// tolerate accepts that the new plane cannot have some rows in force if the plane before cannot either, and notes why.
func (w *switching) tolerate(why *error, err error) error {
	if errors.Is(err, dataplane.ErrPartial) && w.inferior {
		*why = err
		return nil
	}
	*why = nil
	return err
}

// did reports a step, and begins the next one.
func (w *switching) did(p Progress) {
	now := time.Now()
	p.Took = now.Sub(w.began)
	w.began = now
	w.progress(p)
}

// follow programs what has changed since the new plane was programmed.
func (w *switching) follow(ctx context.Context, now *model.State) error {
	change := model.Diff(w.base, now)
	w.base = now
	if change.Empty() {
		return nil
	}
	var partial error
	if err := w.tolerate(&partial, w.to.Apply(ctx, now, change)); err != nil {
		return fmt.Errorf("program the changes since then: %w", err)
	}
	w.partial = cmp.Or(partial, w.partial) // Apply does not try again what Sync could not do
	return nil
}

// verify reads the new plane back. Differences may come from another program, or from a change meanwhile, so they are
// programmed once more.
func (w *switching) verify(ctx context.Context, s *model.State) error {
	r, err := w.to.Audit(ctx, s, dataplane.Full)
	if err == nil && len(r.Drifts) > 0 {
		if err = w.tolerate(&w.partial, w.to.Repair(ctx, s, r)); err == nil {
			r, err = w.to.Audit(ctx, s, dataplane.Full)
		}
	}
	if err != nil {
		return fmt.Errorf("read the new data plane back: %w", err)
	}
	if n := len(r.Drifts); n > 0 && (w.partial == nil || n > w.missing) {
		more := ""
		if n > 1 {
			more = fmt.Sprintf(" and %d more", n-1)
		}
		err := fmt.Errorf("the kernel differs from the rows of the new data plane: %s%s", r.Drifts[0], more)
		return errors.Join(err, w.partial)
	}
	w.did(Progress{Step: Verified, Frontends: len(s.Frontends), Pools: len(s.Pools), Err: w.partial})
	return nil
}

// finish puts the new plane in force. The loop calls it, so that no change comes between.
func (w *switching) finish(ctx context.Context, t Turn) error {
	s := t.State()
	if s == nil {
		return ErrStarting
	}
	if err := w.catchUp(ctx, s); err != nil {
		return err
	}
	if err := w.activate(ctx, s); err != nil {
		return err
	}
	old := w.InForce()
	w.put(w.to)
	w.lacks = w.partial != nil
	w.programmed.Store(true)
	t.Replaced(true, w.partial)
	w.did(Progress{Step: Activated})
	if err := w.Discard(old); err != nil {
		w.options.Log.Warn("cannot close the data plane that was replaced", "error", err)
	}
	w.base = s.Clone()
	return nil
}

// catchUp has the new plane hold what the plane in force does.
func (w *switching) catchUp(ctx context.Context, now *model.State) error {
	if w.base != nil {
		return w.follow(ctx, now)
	}
	if err := w.sync(ctx, now); err != nil {
		return err
	}
	return w.verify(ctx, now)
}

// activate has the new plane take packets. It learns before that and after: clients may come meanwhile.
func (w *switching) activate(ctx context.Context, s *model.State) error {
	_ = w.learnNew(ctx, s)
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := w.to.SetStage(ctx, s, dataplane.Active)
	var partial error
	if err := w.tolerate(&partial, err); err != nil {
		return fmt.Errorf("bring the new data plane into force: %w", err)
	}
	w.partial = cmp.Or(partial, w.partial)
	failed := w.learnNew(ctx, s)
	if err := errors.Join(w.lost, failed); w.clients > 0 || err != nil {
		w.did(Progress{Step: Learned, Clients: w.clients, Err: err})
	}
	return nil
}

// learnNew has the new plane take in the sessions that came since.
func (w *switching) learnNew(ctx context.Context, s *model.State) error {
	n, err := w.to.Learn(ctx, s, w.Sessions(ctx, s))
	w.clients += n
	return err
}

// clearOld removes what the old plane has left. That may take as long as it took to program it. An audit then sees at
// once whether all of the new plane is still there.
func (w *switching) clearOld(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-w.loop.Stopped():
			cancel()
		case <-ctx.Done():
		}
	}()
	w.on(activated)
	w.mu.Lock()
	failed := w.clear(ctx, w.base, w.learnInLoop)
	left := w.left
	w.mu.Unlock()
	w.did(Progress{Step: Cleared, Left: left, Err: failed})
	_ = w.loop.Between(ctx, func(ctx context.Context, t Turn) error { // if it has ended, the next process does it
		t.AuditSoon()
		if failed != nil {
			t.Failed(ctx, failed)
		}
		return nil
	})
}

// learnInLoop reads sessions beside the loop, and has the loop learn them.
func (w *switching) learnInLoop(
	ctx context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	known := dataplane.NewSessions(s)
	if err = known.Add(others); known.Len() == 0 {
		return 0, err
	}
	failed := w.loop.Between(ctx, func(ctx context.Context, t Turn) (err error) {
		if t.State() != nil {
			n, err = w.Learn(ctx, t.State(), each(known))
		}
		return err
	})
	return n, errors.Join(err, failed)
}

// rollBack leaves nothing of the new plane. Failed removals are tried again.
func (w *switching) rollBack(ctx context.Context) error {
	done := false
	err := w.loop.Between(ctx, func(ctx context.Context, t Turn) error {
		done = true
		return w.undo(ctx, t)
	})
	if !done { // the loop has ended
		w.on(abandoned)
		return errors.Join(err, w.to.Close())
	}
	w.mu.Lock()
	connections := 0
	for _, r := range w.left {
		if r.Plane == w.to.Name {
			connections += r.Connections
		}
	}
	w.mu.Unlock()
	w.did(Progress{Step: RolledBack, Connections: connections, Err: err})
	return err
}

// undo has the plane that stays learn the sessions of the new one, which may have served for a while, and remove what
// the new one has left.
func (w *switching) undo(ctx context.Context, t Turn) error {
	if s := t.State(); s != nil {
		if _, err := w.Learn(ctx, s, w.to.Sessions(ctx, s)); err != nil {
			w.options.Log.Debug("clients with session affinity may get other backends", "error", err)
		}
	}
	err := w.Discard(w.to)
	w.on(abandoned)
	if failed := t.Resync(ctx); failed != nil {
		err = errors.Join(err, fmt.Errorf("remove leftovers of the new data plane: %w", failed))
	}
	return err
}
