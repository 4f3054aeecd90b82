// Package addrs delivers the addresses of this machine's interfaces, on which NodePorts are served.
//
//	kernel ── RTM_NEWADDR, RTM_DELADDR ──► "something changed" ──► list all ──► Batch{Addrs}
//
// A notification is only an occasion to list the addresses anew: what was lost in an overflow of the socket, or
// happened without a listener, is then seen too.
package addrs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

var _ source.Source = (*Source)(nil)

// quiet is how long to wait for more: an interface that comes up brings several addresses.
const quiet = 50 * time.Millisecond

// retryInterval is how long to wait before the kernel is asked again after an error.
const retryInterval = time.Second

// Source watches the addresses of one network namespace or, on Windows, of the machine.
type Source struct {
	kernel
	due    time.Time    // when to list; zero: when something changes
	said   []netip.Addr // what Next has returned; nil before its first time
	failed bool         // the last listing
}

// object is what Problems are about.
const object = "node addresses"

// Next implements source.Source. Each batch has all addresses. If the kernel does not tell them later
// on, that is a Problem, which is told once, and it is asked again.
func (s *Source) Next(ctx context.Context) (service.Batch, error) {
	for {
		if err := s.wait(ctx); err != nil {
			return service.Batch{}, err
		}
		addrs, err := s.list()
		switch {
		case errors.Is(err, errInterrupted): // they changed meanwhile
			s.due = time.Now().Add(quiet)
		case err != nil && s.said == nil:
			return service.Batch{}, err
		case err != nil && s.failed:
			s.due = time.Now().Add(retryInterval)
		case err != nil:
			s.due, s.failed = time.Now().Add(retryInterval), true
			return service.Batch{Problems: []service.Problem{{Object: object, Reason: err.Error()}}}, nil
		case s.failed:
			s.said, s.failed = addrs, false
			return service.Batch{Addrs: addrs, Resolved: []string{object}}, nil
		case s.said == nil || !slices.Equal(addrs, s.said):
			s.said = addrs
			return service.Batch{Addrs: addrs}, nil
		}
	}
}

// wait blocks until the addresses should be listed. The kernel keeps notifications meanwhile.
func (s *Source) wait(ctx context.Context) error {
	for {
		var due <-chan time.Time
		if !s.due.IsZero() {
			due = time.After(time.Until(s.due))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-s.updates:
			if !ok { // the socket broke, as it does when the kernel has more to say than fits
				s.unsubscribe()
			}
			if s.due.IsZero() {
				s.due = time.Now().Add(quiet)
			}
		case <-due:
			s.due = time.Time{}
			return nil
		}
	}
}
