package takeover

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// drainAlias begins the alias of kube-ipvs0 while IPVS drains; the deadline follows.
const drainAlias = "fairlead: drains until "

// dummy is kube-ipvs0, which holds the addresses of all Services so that packets to them reach IPVS.
type dummy struct {
	link     netlink.Link
	addrs    map[netip.Addr]netlink.Addr
	deadline time.Time // as the alias says; zero: it does not
}

// findDummy is nil if there is none, or it is the caller's by its alias.
func findDummy(own string) (*dummy, error) {
	link, err := netlink.LinkByName(dummyLink)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", dummyLink, err)
	}
	if own != "" && link.Attrs().Alias == own {
		return nil, nil
	}
	d := &dummy{link: link, addrs: map[netip.Addr]netlink.Addr{}}
	if at, ok := strings.CutPrefix(link.Attrs().Alias, drainAlias); ok {
		d.deadline, _ = time.Parse(time.RFC3339, at) // what cannot be read begins anew
	}
	list, err := addresses(link)
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			d.addrs[addr.Unmap()] = a
		}
	}
	return d, nil
}

// until is the deadline; zero if nothing drains.
func (d *dummy) until() time.Time {
	if d == nil {
		return time.Time{}
	}
	return d.deadline
}

// addresses are those of a link, or of all.
func addresses(link netlink.Link) (list []netlink.Addr, err error) {
	for range nftTries {
		list, err = netlink.AddrList(link, netlink.FAMILY_ALL)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return list, nil
}

func (d *dummy) setDeadline(at time.Time) error {
	d.deadline = at
	if err := netlink.LinkSetAlias(d.link, drainAlias+at.UTC().Format(time.RFC3339)); err != nil {
		return fmt.Errorf("note the deadline at link %s: %w", dummyLink, err)
	}
	return nil
}

// unprefer makes local processes that ask an address of the link keep the node's own address. An
// address is its own first choice as a source, and a connection that has it would need it to its end.
func (d *dummy) unprefer() error {
	sources, err := d.sources()
	if err != nil {
		return err
	}
	var errs []error
	for addr, a := range d.addrs {
		source, ok := sources[addr.Is6()]
		if !ok || a.Scope == int(netlink.SCOPE_LINK) {
			continue
		}
		if err := d.setSource(addr, source); err != nil {
			errs = append(errs, fmt.Errorf("keep local processes from using %s of %s: %w", addr, dummyLink, err))
		}
	}
	return errors.Join(errs...)
}

// sources are the node's first address of each family, true for IPv6.
func (d *dummy) sources() (map[bool]net.IP, error) {
	list, err := addresses(nil)
	if err != nil {
		return nil, err
	}
	sources := map[bool]net.IP{}
	for _, a := range list {
		v6 := a.IP.To4() == nil
		const unwanted = unix.IFA_F_TEMPORARY | unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE
		if sources[v6] == nil && a.LinkIndex != d.link.Attrs().Index &&
			a.Scope == int(netlink.SCOPE_UNIVERSE) && a.Flags&unwanted == 0 {
			sources[v6] = a.IP
		}
	}
	return sources, nil
}

// setSource replaces the route to a local address by one that prefers another source. IPv6 knows only
// routes beside each other, of which the one that the kernel made goes first, and none on a link that
// is down, as this one is.
func (d *dummy) setSource(addr netip.Addr, source net.IP) error {
	route := d.route(addr)
	route.Src = source
	if addr.Is4() {
		return netlink.RouteReplace(route)
	}
	route.LinkIndex = loopback
	if err := netlink.RouteAdd(route); ignore(err, unix.EEXIST) != nil {
		return err
	}
	return ignore(netlink.RouteDel(d.route(addr)), unix.ESRCH)
}

// loopback is the index of lo.
const loopback = 1

func (d *dummy) route(addr netip.Addr) *netlink.Route {
	r := &netlink.Route{
		LinkIndex: d.link.Attrs().Index,
		Dst:       &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		Table:     unix.RT_TABLE_LOCAL,
		Type:      unix.RTN_LOCAL,
		Protocol:  unix.RTPROT_KERNEL,
	}
	if addr.Is4() {
		r.Scope = netlink.SCOPE_HOST
	}
	return r
}

// drop takes an address from the link, and our route to it.
func (d *dummy) drop(addr netip.Addr) error {
	a := d.addrs[addr]
	delete(d.addrs, addr)
	err := errors.Join(ignore(netlink.AddrDel(d.link, &a), unix.EADDRNOTAVAIL), d.dropRoute(addr))
	if err != nil {
		return fmt.Errorf("take %s from %s: %w", addr, dummyLink, err)
	}
	return nil
}

func (d *dummy) dropRoute(addr netip.Addr) error {
	route := d.route(addr)
	if addr.Is6() {
		route.LinkIndex = loopback
	}
	return ignore(netlink.RouteDel(route), unix.ESRCH)
}

func (d *dummy) remove() error {
	var errs []error
	for addr := range d.addrs {
		errs = append(errs, d.dropRoute(addr))
	}
	if err := netlink.LinkDel(d.link); err != nil && !errors.As(err, &netlink.LinkNotFoundError{}) {
		errs = append(errs, fmt.Errorf("delete link %s: %w", dummyLink, err))
	}
	return errors.Join(errs...)
}

func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}
