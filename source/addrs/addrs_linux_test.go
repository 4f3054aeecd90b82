package addrs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/nstest"
)

// namespace runs a test in a network namespace with a link.
func namespace(t *testing.T, test func(t *testing.T, link netlink.Link)) {
	t.Helper()
	nstest.Run(t, func(t *testing.T) {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}
		if err := netlink.LinkAdd(link); err != nil {
			t.Error(err)
			return
		}
		test(t, link)
	})
}

func addr(text string, flags int) *netlink.Addr {
	a, err := netlink.ParseAddr(text)
	if err != nil {
		panic(err)
	}
	a.Flags = flags
	return a
}

// next is what a Next on some other thread returns.
func next(ctx context.Context, s *Source) (addrs []netip.Addr, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		b, e := s.Next(ctx)
		addrs, err = b.Addrs, e
	}()
	<-done
	return addrs, err
}

func TestSource_follows(t *testing.T) {
	namespace(t, func(t *testing.T, link netlink.Link) {
		s, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		expect := func(want ...string) {
			t.Helper()
			ctx, cancel := eventually.Context(t.Context())
			defer cancel()
			got, err := next(ctx, s)
			if fmt.Sprint(got) != fmt.Sprint(want) || err != nil {
				t.Errorf("got %v, %v; want %v", got, err, want)
			}
		}
		expect()
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		must(netlink.AddrAdd(link, addr("192.0.2.1/24", 0)))
		must(netlink.AddrAdd(link, addr("fd00::1/64", unix.IFA_F_NODAD)))
		must(netlink.AddrAdd(link, addr("198.51.100.7/32", 0)))
		expect("192.0.2.1", "198.51.100.7", "fd00::1")
		must(netlink.AddrDel(link, addr("192.0.2.1/24", 0)))
		expect("198.51.100.7", "fd00::1")

		// More changes than the socket's buffer holds between two reads.
		for i := range 3000 {
			must(netlink.AddrAdd(link, addr(fmt.Sprintf("10.0.%d.%d/32", i>>8, i&255), 0)))
			must(netlink.AddrDel(link, addr(fmt.Sprintf("10.0.%d.%d/32", i>>8, i&255), 0)))
		}
		must(netlink.AddrAdd(link, addr("192.0.2.2/24", 0)))
		for seen := false; !seen && !t.Failed(); {
			ctx, cancel := eventually.Context(t.Context())
			got, err := next(ctx, s)
			cancel()
			must(err)
			seen = slices.Contains(got, netip.MustParseAddr("192.0.2.2"))
		}
		must(netlink.AddrDel(link, addr("192.0.2.2/24", 0))) // by a subscription of the same namespace
		expect("198.51.100.7", "fd00::1")

		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if got, err := next(ctx, s); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, %v without a change", got, err)
		}
		before := runtime.NumGoroutine()
		must(netlink.AddrAdd(link, addr("192.0.2.3/24", 0))) // the library has something to deliver
		must(s.Close())
		err = eventually.Poll(t.Context(), func() error {
			if now := runtime.NumGoroutine(); now > before-2 {
				return fmt.Errorf("%d goroutines before Close, %d after", before, now)
			}
			return nil
		})
		must(err)
	})
}

// The addresses on kube-ipvs0 are those of Services.
func TestSource_leavesServices(t *testing.T) {
	namespace(t, func(t *testing.T, link netlink.Link) {
		services := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}, PeerName: "c"}
		err := errors.Join(netlink.LinkAdd(services), netlink.AddrAdd(services, addr("10.96.0.1/32", 0)),
			netlink.AddrAdd(link, addr("192.0.2.1/24", 0)))
		if err != nil {
			t.Error(err)
			return
		}
		s, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		if got, err := next(t.Context(), s); err != nil || fmt.Sprint(got) != "[192.0.2.1]" {
			t.Errorf("got %v, %v", got, err)
		}
	})
}

// A kernel that goes on not telling is one problem.
func TestSource_fails(t *testing.T) {
	namespace(t, func(t *testing.T, _ netlink.Link) {
		s, err := New()
		if err == nil {
			_, err = next(t.Context(), s)
		}
		if err != nil {
			t.Error(err)
			return
		}
		own := s.namespace
		defer func() {
			s.namespace = own
			s.Close()
		}()
		s.unsubscribe()
		s.namespace = math.MaxInt32 // where it cannot subscribe
		for i, want := range []int{1, 0} {
			s.due = time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			if b, err := s.Next(ctx); len(b.Problems) != want {
				t.Errorf("call %d: %v, %v, want %d", i, b.Problems, err, want)
			}
			cancel()
		}
	})
}

// An address on a link that is up is tentative until the kernel knows that no other machine has it.
func TestSource_tentative(t *testing.T) {
	namespace(t, func(t *testing.T, link netlink.Link) {
		peer, err := netlink.LinkByName("b")
		if err == nil {
			err = errors.Join(netlink.LinkSetUp(link), netlink.LinkSetUp(peer), netlink.AddrAdd(link, addr("fd00::1/64", 0)))
		}
		if err != nil {
			t.Error(err)
			return
		}
		s, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		ctx, cancel := eventually.Context(t.Context())
		defer cancel()
		for i, want := 0, netip.MustParseAddr("fd00::1"); ; i++ {
			got, err := next(ctx, s)
			if err != nil {
				t.Error(err)
				return
			}
			if i == 0 && slices.Contains(got, want) {
				t.Errorf("%v is delivered while it is tentative", want)
			}
			if slices.Contains(got, want) {
				return
			}
		}
	})
}
