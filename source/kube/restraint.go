package kube

import (
	"context"
	"errors"
	"math"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// restraint spares a server that answers, but that it is overloaded or broken: of all nodes' questions
// each costs it something. A server that does not answer at all is not hurt by being asked often.
type restraint struct {
	mu      sync.Mutex
	backoff *wait.Backoff // nil: all is well
	until   time.Time
}

// The pauses after answers that say so: the first one doubles up to client-go's longest.
const (
	firstRestraint = 500 * time.Millisecond
	maxRestraint   = 30 * time.Second
)

// failed takes in an error. The server's own wish, Retry-After, is respected.
func (r *restraint) failed(err error) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return
	}
	code := status.Status().Code
	if code < http.StatusInternalServerError && code != http.StatusTooManyRequests {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.backoff == nil {
		r.backoff = &wait.Backoff{Duration: firstRestraint, Factor: 2, Jitter: 1, Cap: maxRestraint, Steps: math.MaxInt32}
	}
	delay := r.backoff.Step()
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		delay = max(delay, time.Duration(seconds)*time.Second)
	}
	r.until = time.Now().Add(delay)
}

// works ends the restraint.
func (r *restraint) works() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backoff, r.until = nil, time.Time{}
}

// wait returns false if ctx ended before the server may be asked again.
func (r *restraint) wait(ctx context.Context) bool {
	r.mu.Lock()
	delay := time.Until(r.until)
	r.mu.Unlock()
	return sleep(ctx, delay)
}

// sleep returns false if ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
