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
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

var _ source.Source = (*Source)(nil)

// quiet is how long to wait for more: an interface that comes up brings several addresses.
const quiet = 50 * time.Millisecond

// retryInterval is how long to wait before the kernel is asked again after an error.
const retryInterval = time.Second

// Source watches the addresses of one network namespace.
type Source struct {
	namespace netns.NsHandle
	netlink   *netlink.Handle
	updates   chan netlink.AddrUpdate // of the present subscription; nil: none
	done      chan struct{}           // ends the present subscription
	due       time.Time               // when to list; zero: when something changes
	said      []netip.Addr            // what Next has returned; nil before its first time
	failed    bool                    // the last listing
}

// object is what Problems are about.
const object = "node addresses"

// New watches the network namespace of the calling thread, whichever thread calls Next later.
func New() (*Source, error) {
	namespace, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("node addresses: get network namespace: %w", err)
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("node addresses: %w", err), namespace.Close())
	}
	s := &Source{namespace: namespace, netlink: handle, due: time.Now()}
	if err := s.subscribe(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Source) subscribe() error {
	updates, done := make(chan netlink.AddrUpdate), make(chan struct{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	o := netlink.AddrSubscribeOptions{Namespace: &s.namespace}
	if here, err := netns.Get(); err == nil {
		if here.Equal(s.namespace) { // to enter it again would need CAP_SYS_ADMIN
			o.Namespace = nil
		}
		_ = here.Close()
	}
	if err := netlink.AddrSubscribeWithOptions(updates, done, o); err != nil {
		return fmt.Errorf("node addresses: subscribe: %w", err)
	}
	s.updates, s.done = updates, done
	return nil
}

// unsubscribe ends the subscription, and with it the library's goroutines.
func (s *Source) unsubscribe() {
	if s.updates == nil {
		return
	}
	close(s.done)
	for range s.updates { // it may be about to send one more
	}
	s.updates = nil
}

// Close ends the watching.
func (s *Source) Close() error {
	s.unsubscribe()
	s.netlink.Close()
	return s.namespace.Close()
}

// Next implements source.Source. Each batch has all addresses. If the kernel does not tell them later
// on, that is a Problem, and it is asked again.
func (s *Source) Next(ctx context.Context) (service.Batch, error) {
	for {
		if err := s.wait(ctx); err != nil {
			return service.Batch{}, err
		}
		addrs, err := s.list()
		switch {
		case errors.Is(err, netlink.ErrDumpInterrupted): // they changed meanwhile
			s.due = time.Now().Add(quiet)
		case err != nil && s.said == nil:
			return service.Batch{}, err
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

// list asks for all addresses that can be used. They come in the kernel's order, by interface, but
// the temporary and the deprecated ones last.
func (s *Source) list() ([]netip.Addr, error) {
	if s.updates == nil { // before listing, or a change between both would be missed
		if err := s.subscribe(); err != nil {
			return nil, err
		}
	}
	list, err := s.netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	services, err := s.serviceLink()
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(list, func(a, b netlink.Addr) int { return rank(a) - rank(b) })
	addrs := []netip.Addr{}
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); ok && usable(a) && a.LinkIndex != services && !slices.Contains(addrs, addr) {
			addrs = append(addrs, addr)
		}
	}
	return addrs, nil
}

// kubeProxyLink holds the addresses of all Services where kube-proxy's mode ipvs is or was, and as long
// as connections that it served live on. They are not the node's.
const kubeProxyLink = "kube-ipvs0"

// serviceLink is the index of that link; 0: there is none.
func (s *Source) serviceLink() (int, error) {
	link, err := s.netlink.LinkByName(kubeProxyLink)
	switch {
	case errors.As(err, &netlink.LinkNotFoundError{}):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("list addresses: link %s: %w", kubeProxyLink, err)
	}
	return link.Attrs().Index, nil
}

func rank(a netlink.Addr) int {
	if a.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_DEPRECATED) != 0 {
		return 1
	}
	return 0
}

// usable reports whether an address is known to be unique (RFC 4862, section 5.4); the kernel tells when that changes.
func usable(a netlink.Addr) bool {
	tentative := a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
	return !tentative && a.Flags&unix.IFA_F_DADFAILED == 0
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
