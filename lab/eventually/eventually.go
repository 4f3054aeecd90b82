// Package eventually is the one way in which a test waits for what no event announces. It tries again and again, and
// gives up when its patience is used up. Patience is counted in seconds of an idle machine: a second counts as a
// fraction of one while a fixed piece of work takes longer than on an idle machine. This is sound because patience only
// bounds a failure. A test that passes goes on as soon as the state is there, however patient it is.
//
//	try ──nil──► the test goes on
//	 ▲  └─error─► charge the time, divided by the slowness ──► nothing left: fail with the last error
//	 └───────────── sleep 1 to 50 ms ◄────┘
//
// Within a bubble of testing/synctest, where work takes no time, the machine is never slow.
package eventually

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Between two tries passes this much time: little at first, for most of what is awaited comes soon.
const quickest, longest = 50 * time.Microsecond, 50 * time.Millisecond

// TB is what a test offers; testing is not imported because programs wait, too.
type TB interface {
	Fatalf(format string, args ...any)
	Helper()
}

// Taking is how long something takes by design, however fast the machine is. Patience begins afterwards.
type Taking time.Duration

// True waits until is reports true.
func True(t TB, what string, is func() bool) {
	t.Helper()
	Taking(0).True(t, what, is)
}

// True waits as the function True does.
func (d Taking) True(t TB, what string, is func() bool) {
	t.Helper()
	d.Nil(t, what, func() error {
		if is() {
			return nil
		}
		return errors.New("it is not so")
	})
}

// Equal waits until get returns what is wanted.
func Equal[T comparable](t TB, what string, want T, get func() T) {
	t.Helper()
	Nil(t, what, func() error {
		if got := get(); got != want {
			return fmt.Errorf("got\n%v\nwant\n%v", got, want)
		}
		return nil
	})
}

// Nil waits until try returns nil. A failure names the last error.
func Nil(t TB, what string, try func() error) {
	t.Helper()
	Taking(0).Nil(t, what, try)
}

// Nil waits as the function Nil does.
func (d Taking) Nil(t TB, what string, try func() error) {
	t.Helper()
	if err := d.Poll(context.Background(), try); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// Poll waits until try returns nil, the patience is used up or the context is done. It returns the last error of try.
func Poll(ctx context.Context, try func() error) error { return Taking(0).Poll(ctx, try) }

// Poll waits as the function Poll does.
func (d Taking) Poll(ctx context.Context, try func() error) error {
	p := begin(time.Duration(d))
	for pause := quickest; ; pause = min(2*pause, longest) {
		err := try()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("%w, waited for %v, last: %w", ctx.Err(), p.waited(), err)
		case p.over():
			return fmt.Errorf("waited in vain for %v, last: %w", p.waited(), err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// Receive waits for a value on the channel, or for its end.
func Receive[T any](t TB, what string, c <-chan T) (v T) {
	t.Helper()
	for p := begin(0); !p.over(); {
		select {
		case v = <-c:
			return v
		case <-time.After(longest):
		}
	}
	t.Fatalf("%s: nothing came", what)
	return v
}

// Context is done when patience is used up.
func Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	go func() {
		p := begin(0)
		for !p.over() {
			select {
			case <-ctx.Done():
				return
			case <-time.After(remeasure):
			}
		}
		cancel(fmt.Errorf("waited in vain for %v", p.waited()))
	}()
	return ctx, func() { cancel(context.Canceled) }
}

// Patience is a limit for what cannot be prolonged once it has begun, such as the deadline of a connection. The machine
// counts as slow, for a load may come later.
func Patience() time.Duration { return time.Duration(float64(base) * max(slownessAtStart(), 3)) }
