package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// pauses are how long a watcher waits after each of some errors in a row.
func pauses(t *testing.T, errs ...error) []time.Duration {
	var r restraint
	var all []time.Duration
	for _, err := range errs {
		r.failed(err)
		start := time.Now()
		if !r.wait(t.Context()) {
			t.Error("interrupted")
		}
		all = append(all, time.Since(start))
	}
	return all
}

func TestRestraint(t *testing.T) {
	broken := apierrors.NewInternalError(syscall.EIO)
	synctest.Test(t, func(t *testing.T) {
		for i, d := range pauses(t, slices.Repeat([]error{broken}, 12)...) {
			least := min(firstRestraint<<i, maxRestraint)
			if d < least || d > 2*least {
				t.Errorf("pause %d is %v, want %v and up to as much again", i, d, least)
			}
		}
		for wish, want := range map[int]time.Duration{7: 7 * time.Second, 3600: 2 * maxRestraint} {
			if d := pauses(t, apierrors.NewTooManyRequests("", wish))[0]; d != want {
				t.Errorf("the server wishes for %d s and gets %v, want %v", wish, d, want)
			}
		}
		for _, err := range []error{
			fmt.Errorf("dial: %w", syscall.ECONNREFUSED),
			apierrors.NewResourceExpired(""),
		} {
			if d := pauses(t, slices.Repeat([]error{err}, 10)...)[9]; d != 0 {
				t.Errorf("%v after %v", d, err)
			}
		}
		for _, err := range []error{
			apierrors.NewUnauthorized(""),
			apierrors.NewForbidden(schema.GroupResource{}, "", nil),
			&tls.CertificateVerificationError{Err: syscall.EIO},
		} {
			all := pauses(t, slices.Repeat([]error{err}, 5)...)
			if slices.Max(all[:quickRefusals]) != 0 || slices.Min(all[quickRefusals:]) < refusedPause {
				t.Errorf("%v after %v", all, err)
			}
		}
	})
}

func TestRestraint_ends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r restraint
		for range 10 {
			r.failed(apierrors.NewServiceUnavailable(""))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if r.wait(ctx) {
			t.Error("a server in trouble may be asked again after one second")
		}
		r.works()
		if start := time.Now(); !r.wait(t.Context()) || time.Since(start) != 0 {
			t.Error("one that works may not")
		}
	})
}
