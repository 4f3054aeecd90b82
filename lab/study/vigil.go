package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// vigil finds out when connections begin to end in another way than before. They are begun one after the other, whether
// or not those before have ended: so one without an answer does not delay the next.
type vigil struct {
	site  *Site
	to    netip.AddrPort
	since time.Time
	want  func(testbed.Outcome) bool
	// surely is how many connections in sequence must end as wanted: 1 for what a server says, more for what silence
	// means.
	surely int
}

// Connections are half a millisecond apart, and later 2 % of the time that they have gone on, so that those of what
// takes long do not slow it down.
const (
	vigilInterval = 500 * time.Microsecond
	vigilSpread   = 50
	vigilTimeout  = 100 * time.Millisecond // of one connection
)

// attempt is one connection.
type attempt struct {
	began  time.Time
	wanted bool
	err    error
}

// await returns when the first connection began that ended as wanted and that no other one has followed.
func (v vigil) await(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	seen := make(chan attempt)
	go v.look(ctx, seen)
	var first, contrary time.Time
	for wanted := 0; ; {
		var g attempt
		select {
		case g = <-seen:
		case <-v.site.Proxy.Ended():
			return 0, errors.New("the proxy has ended")
		case <-ctx.Done():
			waited := time.Since(v.since).Round(time.Millisecond)
			return 0, fmt.Errorf("%s has not changed within %s: %w", v.to, waited, context.Cause(ctx))
		}
		switch {
		case g.err != nil:
			return 0, g.err
		case !g.wanted && g.began.After(contrary):
			contrary = g.began
			if !first.After(contrary) {
				first, wanted = time.Time{}, 0
			}
		case g.wanted && g.began.After(contrary):
			if wanted++; first.IsZero() || g.began.Before(first) {
				first = g.began
			}
		}
		if wanted >= v.surely {
			return first.Sub(v.since), nil
		}
	}
}

// look begins connections until ctx ends.
func (v vigil) look(ctx context.Context, seen chan<- attempt) {
	for {
		began := time.Now()
		go func() {
			o, err := v.site.Bed.Probe(ctx, testbed.Probe{From: ClientPod, To: v.to, Timeout: vigilTimeout})
			select {
			case seen <- attempt{began, v.want(o), err}:
			case <-ctx.Done():
			}
		}()
		select {
		case <-time.After(max(vigilInterval, began.Sub(v.since)/vigilSpread)):
		case <-ctx.Done():
			return
		}
	}
}
