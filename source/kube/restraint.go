package kube

import (
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// restraint spares a server that answers, but that it is overloaded or broken, or that it does not know us:
// of all nodes' questions each costs it something. A server that does not answer at all is not hurt by
// being asked often.
type restraint struct {
	mu       sync.Mutex
	backoff  *wait.Backoff // nil: it is neither overloaded nor broken
	refusals int           // of us, in a row
	until    time.Time
}

// The pauses after answers that say so: the first one doubles up to client-go's longest.
const (
	firstRestraint = 500 * time.Millisecond
	maxRestraint   = 30 * time.Second
)

// Credentials are often renewed within seconds of their end, so that the first refusals do not count.
// Then between one and two of these pass.
const (
	quickRefusals = 3
	refusedPause  = 5 * time.Second
)

// failed takes in an error.
func (r *restraint) failed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var delay time.Duration
	switch {
	case overloaded(err):
		delay = r.step(err)
	case refusesUs(err):
		if r.refusals++; r.refusals > quickRefusals {
			delay = wait.Jitter(refusedPause, 1)
		}
	}
	r.until = time.Now().Add(delay)
}

func overloaded(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
}

func refusesUs(err error) bool {
	var certificate *tls.CertificateVerificationError
	return apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) || errors.As(err, &certificate)
}

// step is the next pause, or longer if the server wishes so (Retry-After). A load balancer in front of it may wish for
// hours, and the server may be back long before.
func (r *restraint) step(err error) time.Duration {
	if r.backoff == nil {
		r.backoff = &wait.Backoff{Duration: firstRestraint, Factor: 2, Jitter: 1, Cap: maxRestraint, Steps: math.MaxInt32}
	}
	delay := r.backoff.Step()
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		delay = max(delay, min(time.Duration(seconds)*time.Second, 2*maxRestraint))
	}
	return delay
}

// works ends the restraint.
func (r *restraint) works() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backoff, r.refusals, r.until = nil, 0, time.Time{}
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
