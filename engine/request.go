package engine

import (
	"context"
	"sync/atomic"
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
