package kube

import (
	"context"
	"time"

	"k8s.io/utils/clock"
)

// endingClock ends with its context all waiting by After: the Reflector waits by it between attempts,
// and would not notice that it should stop.
type endingClock struct {
	clock.RealClock
	ctx context.Context
}

func (c endingClock) After(d time.Duration) <-chan time.Time {
	ctx, cancel := context.WithTimeout(c.ctx, d)
	over := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() {
		cancel()
		over <- time.Now()
	})
	return over
}
