package addrs

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// errInterrupted says that addresses have changed while they were listed.
var errInterrupted = netlink.ErrDumpInterrupted

// kernel is the Linux kernel, as it tells addresses.
type kernel struct {
	namespace netns.NsHandle
	netlink   *netlink.Handle
	updates   chan netlink.AddrUpdate // of the present subscription; nil: none
	done      chan struct{}           // ends the present subscription
}

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
	s := &Source{kernel: kernel{namespace: namespace, netlink: handle}, due: time.Now()}
	if err := s.subscribe(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (k *kernel) subscribe() error {
	updates, done := make(chan netlink.AddrUpdate), make(chan struct{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	o := netlink.AddrSubscribeOptions{Namespace: &k.namespace}
	if here, err := netns.Get(); err == nil {
		if here.Equal(k.namespace) { // to enter it again would need CAP_SYS_ADMIN
			o.Namespace = nil
		}
		_ = here.Close()
	}
	if err := netlink.AddrSubscribeWithOptions(updates, done, o); err != nil {
		return fmt.Errorf("node addresses: subscribe: %w", err)
	}
	k.updates, k.done = updates, done
	return nil
}

// unsubscribe ends the subscription, and with it the library's goroutines.
func (k *kernel) unsubscribe() {
	if k.updates == nil {
		return
	}
	close(k.done)
	for range k.updates { // it may be about to send one more
	}
	k.updates = nil
}

// Close ends the watching.
func (k *kernel) Close() error {
	k.unsubscribe()
	k.netlink.Close()
	return k.namespace.Close()
}

// list asks for all addresses that can be used. They come in the kernel's order, by interface, but
// the temporary and the deprecated ones last.
func (k *kernel) list() ([]netip.Addr, error) {
	if k.updates == nil { // before listing, or a change between both would be missed
		if err := k.subscribe(); err != nil {
			return nil, err
		}
	}
	list, err := k.netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	services, err := k.serviceLink()
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
func (k *kernel) serviceLink() (int, error) {
	link, err := k.netlink.LinkByName(kubeProxyLink)
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
