package engine

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/model"
)

// request is a function that waits to be called by the loop.
type request struct {
	ctx    context.Context
	f      func(context.Context, View) error
	answer chan error
	taken  atomic.Bool // by the loop, or by an asker who has given up
}

func (r *request) serve(v View) {
	if r.taken.CompareAndSwap(false, true) {
		r.answer <- r.f(r.ctx, v)
	}
}

// Do has the loop call f, between two batches, and returns its error. It waits for the first batch,
// and for the programming that is under way; f is not called any more after Do has returned. f must
// be quick: while it runs, nothing is programmed.
func (e *Engine) Do(ctx context.Context, f func(context.Context, View) error) error {
	return e.ask(ctx, e.requests, f)
}

// order is Do for what need not wait for the first batch; before that, the View has no State.
func (e *Engine) order(ctx context.Context, f func(context.Context, View) error) error {
	return e.ask(ctx, e.orders, f)
}

func (e *Engine) ask(ctx context.Context, to chan *request, f func(context.Context, View) error) error {
	r := &request{ctx: ctx, f: f, answer: make(chan error, 1)}
	select {
	case to <- r:
	case <-e.stopped:
		return ErrStopped
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-r.answer:
		return err
	case <-e.stopped:
	case <-ctx.Done():
	}
	if !r.taken.CompareAndSwap(false, true) { // it is being served
		return <-r.answer
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return ErrStopped
}

// Between implements handover.Loop.
func (e *Engine) Between(ctx context.Context, f func(context.Context, handover.Turn) error) error {
	return e.order(ctx, func(ctx context.Context, _ View) error { return f(ctx, turnOf{e}) })
}

// Stopped implements handover.Loop.
func (e *Engine) Stopped() <-chan struct{} { return e.stopped }

// turnOf is what a change of the plane may do in the loop.
type turnOf struct{ *Engine }

// State implements handover.Turn.
func (e turnOf) State() *model.State { return e.state }

// Replaced implements handover.Turn.
func (e turnOf) Replaced(holds bool, partial error) {
	e.dirty, e.backoff, e.retryAt, e.again = !holds, 0, time.Time{}, true
	e.partial, e.audits.lacking = partial != nil, nil
	e.rests.end()
	e.recurrence = recurrence{}
	e.status.planeChanged()
	if holds {
		e.programmed(true)
	}
}

// Failed implements handover.Turn.
func (e turnOf) Failed(ctx context.Context, err error) {
	e.failed(ctx, err)
	e.again = true
}

// AuditSoon implements handover.Turn.
func (e turnOf) AuditSoon() { e.audits.due, e.again = time.Time{}, true }

// Resync implements handover.Turn.
func (e turnOf) Resync(ctx context.Context) error {
	e.dirty, e.again = true, true
	if e.state == nil {
		return nil
	}
	if err := e.sync(ctx, slog.LevelDebug); err != nil {
		e.failed(ctx, err)
		return err
	}
	e.dirty, e.partial, e.backoff, e.retryAt = false, false, 0, time.Time{}
	return nil
}
