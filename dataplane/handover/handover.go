// Package handover keeps one data plane in force on a node, and lets another one take its place, whatever the two
// planes are. It is the Dataplane that the engine drives; the planes do not know of time, and not of each other.
//
//	engine ── Sync, Apply, Audit ──► Handover ──► plane in force ──► kernel
//	                                    │
//	          Switch, Replace ─────────►│ new plane: Standby ─► Active; the old one is kept while it carries connections
//	          leftovers of other planes │ Learn their sessions ─► Drain or Remove, again and again until none is left
//
// A Handover is a state machine. Its States say what is to be done about other planes; transitions has all steps:
//
//	           synced            cleared           began
//	Starting ─────────► Clearing ────────► Alone ─────────► Switching
//	                    │ ▲    ▲             ▲               │
//	             drains ▼ │    └─────────────│───────────────┘
//	                  Draining ──────────────┘   activated, abandoned
//	                           cleared
//
// At every moment a plane, or what an earlier process has left of one, serves every row that both planes hold. So the
// new rules are in the kernel before the old ones are removed, and sessions are learned before a client can miss them.
package handover

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Plane is a data plane that was opened.
type Plane struct {
	dataplane.Dataplane // with all that wraps it
	Name                string
	// Settings are compared: a plane with the same ones need not be opened anew.
	Settings any
	// Behind is the name of the plane that serves, as a part of this one, rows that this one cannot serve. Over is that
	// of the plane that has the rules for this one. The objects of both in the kernel are this plane's. Empty: there is
	// none.
	Behind, Over string
	// Process is the plane as far as connections pass through this process; nil: connections outlive the process.
	Process dataplane.Handover
	// Mark is what packets get whose source address is to be replaced.
	Mark uint32
	// Unprivileged says that the plane has no right to remove anything, and is in no other plane's way.
	Unprivileged bool
	// Instead is why this plane serves and not the one that is wanted, and what to do; empty: it is that one.
	Instead string

	served   bool // it has had rows, now or before it was kept
	stopping bool // it was told to take no new connections
}

// shares reports whether two planes have objects of the kernel in common.
func (p *Plane) shares(other *Plane) bool {
	within := func(a, b *Plane) bool { return b.Name == a.Behind || b.Name == a.Over }
	return p.Name == other.Name || within(p, other) || within(other, p)
}

// Options say what a Handover works with.
type Options struct {
	// Drivers are those of all planes that may have left something.
	Drivers []dataplane.Driver
	// Choose opens the first plane, for the rows of the first Sync. nil: Start is called.
	Choose func(context.Context, *model.State) (*Plane, error)
	// Cleared is called when nothing is left of other planes but what connections need. nil: nothing is.
	Cleared func(*Plane)
	// DrainTime is for how long connections may need what another plane has left.
	DrainTime time.Duration
	// Bulk is called before very many rows are programmed at once, and end afterwards. nil: nothing is.
	Bulk func() (end func())
	Log  *slog.Logger
}

// Handover is the data plane of a node. The loop calls the methods of Dataplane; Switch and Replace are for one other
// goroutine. InForce, Kept and Reopen may be called by any.
type Handover struct {
	dataplane.Dataplane // that of the plane in force, for the loop
	options             Options
	inForce             atomic.Pointer[Plane]
	programmed          atomic.Bool // this process has had rows in force
	lacks               bool        // the plane cannot have some rows in force; for the loop
	kept                kept

	// mu is held by the goroutine that removes what others have left: the loop, or that of Switch. The loop does not wait
	// for it.
	mu    sync.Mutex
	state State
	drain Schedule
	left  []Remainder
}

// New makes a Handover without a plane.
func New(o Options) *Handover {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Cleared == nil {
		o.Cleared = func(*Plane) {}
	}
	if o.Bulk == nil {
		o.Bulk = func() func() { return func() {} }
	}
	return &Handover{Dataplane: none{}, options: o}
}

// Start puts the first plane in force, before the loop begins.
func (h *Handover) Start(p *Plane) { h.put(p) }

// InForce is the plane in force; nil: none was chosen yet.
func (h *Handover) InForce() *Plane { return h.inForce.Load() }

func (h *Handover) put(p *Plane) {
	h.Dataplane = p.Dataplane
	h.inForce.Store(p)
}

// Reopen takes a plane back that is kept and has these settings, or opens one. Its Config tells what others have left.
func (h *Handover) Reopen(
	c dataplane.Config, settings any, open func(dataplane.Config) (*Plane, error),
) (*Plane, error) {
	if p := h.kept.take(settings); p != nil {
		return p, nil
	}
	unknown := map[string]error{}
	for _, d := range h.options.Drivers {
		left, err := d.Inspect()
		if err != nil { // the plane that is wanted may well work; clear will look again
			unknown[d.Name] = err
		}
		c.LocalnetWasOff = c.LocalnetWasOff || left.LocalnetWasOff
	}
	p, err := open(c)
	if err != nil {
		return nil, err
	}
	delete(unknown, p.Name)
	for name, err := range unknown {
		if !p.Unprivileged {
			h.options.Log.Warn("cannot check for leftovers of another data plane", "plane", name, "error", err)
		}
	}
	return p, nil
}

// Discard gives back a plane that Reopen has made, and that is not to be in force.
func (h *Handover) Discard(p *Plane) error {
	if p.served && h.kept.keep(p) {
		return nil
	}
	return p.Close()
}

// Replace puts a plane in force that goes on with what the one in force has in the kernel, such as one of the same name
// with other settings. The loop then calls Sync.
func (h *Handover) Replace(ctx context.Context, loop Loop, p *Plane) error {
	return loop.Between(ctx, func(ctx context.Context, t Turn) error {
		old := h.InForce()
		h.put(p)
		h.on(replaced)
		t.Replaced(false, nil)
		_, err := p.SetStage(ctx, t.State(), dataplane.Active) // it may have been kept
		if old == nil {
			return err
		}
		if old.Process != nil { // it may be kept, and what leads to it is the other's by now
			_, failed := old.SetStage(ctx, t.State(), dataplane.Standby)
			err = errors.Join(err, failed)
		}
		return errors.Join(err, h.Discard(old))
	})
}

// Sync implements dataplane.Dataplane.
func (h *Handover) Sync(ctx context.Context, s *model.State) error {
	if h.InForce() == nil {
		p, err := h.options.Choose(ctx, s)
		if err != nil {
			return err
		}
		h.put(p)
	}
	h.InForce().served = true
	h.learnEarlier(ctx, s)
	return h.synced(ctx, s, h.hold(ctx, h.Dataplane, s))
}

// hold has a plane hold the rows of s.
func (h *Handover) hold(ctx context.Context, p dataplane.Dataplane, s *model.State) error {
	const many = 10_000
	if len(s.Frontends) >= many {
		defer h.options.Bulk()()
	}
	return p.Sync(ctx, s)
}

// Repair implements dataplane.Dataplane.
func (h *Handover) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	return h.synced(ctx, s, h.Dataplane.Repair(ctx, s, r))
}

// synced removes what other planes have left, if the plane holds all rows. A failed removal is an ErrPartial: rows are
// served, and the next Sync tries again.
func (h *Handover) synced(ctx context.Context, s *model.State, err error) error {
	h.lacks = errors.Is(err, dataplane.ErrPartial)
	if err != nil && !h.lacks {
		return err
	}
	h.programmed.Store(true)
	if !h.mu.TryLock() {
		return err
	}
	defer h.mu.Unlock()
	if h.state = h.state.on(synced); h.state != Clearing {
		return err
	}
	return errors.Join(err, h.clear(ctx, s, h.Learn))
}

// Apply implements dataplane.Dataplane.
func (h *Handover) Apply(ctx context.Context, s *model.State, c model.Change) error {
	err := h.Dataplane.Apply(ctx, s, c)
	h.lacks = h.lacks || errors.Is(err, dataplane.ErrPartial)
	return err
}

// Audit implements dataplane.Dataplane. It also looks whether connections have ended that need what others have left.
func (h *Handover) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	drained := h.lookAgain(ctx, s)
	r, err := h.Dataplane.Audit(ctx, s, d)
	return r, cmp.Or(err, drained)
}

func (h *Handover) lookAgain(ctx context.Context, s *model.State) error {
	if !h.mu.TryLock() {
		return nil
	}
	defer h.mu.Unlock()
	if h.state == Switching || !h.drain.Due() {
		return nil
	}
	return h.clear(ctx, s, h.Learn)
}

// Close ends the connections of all planes, and leaves the kernel as it is.
func (h *Handover) Close() error { return errors.Join(h.kept.close(), h.Dataplane.Close()) }

// on lets the state machine go on.
func (h *Handover) on(e event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = h.state.on(e)
	switch {
	case e == activated || e == replaced: // the objects that others leave now stay for the full time
		h.drain = Schedule{}
	case h.state == Clearing: // no Sync may come for long
		h.drain.look = time.Now()
	}
}

// none serves until a plane is chosen.
type none struct{ dataplane.Base }

func (none) Sync(context.Context, *model.State) error                     { return nil }
func (none) Apply(context.Context, *model.State, model.Change) error      { return nil }
func (none) Repair(context.Context, *model.State, dataplane.Report) error { return nil }
func (none) Remove(context.Context) error                                 { return nil }
func (none) Close() error                                                 { return nil }
func (none) Audit(context.Context, *model.State, dataplane.Depth) (r dataplane.Report, err error) {
	return r, nil
}
