package engine

import (
	"context"
	"sync/atomic"

	"fairlead.dev/fairlead/service"
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
	r := &request{ctx: ctx, f: f, answer: make(chan error, 1)}
	select {
	case e.requests <- r:
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

// Configure gives the Table new options, which are in force, as far as the kernel obeys, once the
// loop has gone round again, at once. Its error is service.Table.Configure's.
func (e *Engine) Configure(ctx context.Context, o service.Options) error {
	return e.Do(ctx, func(_ context.Context, v View) error {
		e.again = true
		return v.Table.Configure(o)
	})
}
