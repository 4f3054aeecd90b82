package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// dummy is the interface of kube-proxy's mode ipvs, with an address for each that shall be local. Its alias says that
// it is ours; until it has that it is kube-proxy's, and package takeover takes care of it.
type dummy struct {
	handle   *netlink.Handle
	excluded []netip.Prefix // addresses that stay as they are
	link     netlink.Link   // nil: there is none of ours
	held     map[netip.Prefix]bool
}

const dummyName = "kube-ipvs0"

// DummyAlias is the alias of the interface kube-ipvs0 when it is ours.
const DummyAlias = "fairlead: data plane ipvs"

// claim makes the interface, or makes kube-proxy's ours with all the addresses on it. It stays down: its addresses are
// local all the same.
func (d *dummy) claim() error {
	link, err := d.find()
	if err == nil && link == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = dummyName
		if err := d.handle.LinkAdd(&netlink.Dummy{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("make interface %s: %w", dummyName, err)
		}
		link, err = d.find()
	}
	if err != nil || link == nil {
		return err
	}
	if link.Attrs().Alias != DummyAlias {
		if err := d.handle.LinkSetAlias(link, DummyAlias); err != nil {
			return fmt.Errorf("set the alias of interface %s: %w", dummyName, err)
		}
	}
	d.link = link
	return nil
}

// find is nil if there is none.
func (d *dummy) find() (netlink.Link, error) {
	link, err := d.handle.LinkByName(dummyName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", dummyName, err)
	}
	return link, nil
}

func (d *dummy) load(addrs []netlink.Addr) (map[netip.Prefix]bool, error) {
	d.held = map[netip.Prefix]bool{}
	if err := d.findOwn(); err != nil || d.link == nil {
		return d.held, err
	}
	for _, a := range addrs {
		p, ok := prefixOf(a.IPNet)
		ours := ok && a.LinkIndex == d.link.Attrs().Index
		if ours && !p.Addr().IsLinkLocalUnicast() && !d.excludes(p.Addr()) {
			d.held[p] = true
		}
	}
	return d.held, nil
}

// findOwn sets link.
func (d *dummy) findOwn() error {
	link, err := d.find()
	if d.link = nil; link != nil && link.Attrs().Alias == DummyAlias {
		d.link = link
	}
	return err
}

func (d *dummy) excludes(a netip.Addr) bool {
	return slices.ContainsFunc(d.excluded, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (d *dummy) add(p netip.Prefix) error {
	if d.link == nil {
		return fmt.Errorf("interface %s is gone", dummyName)
	}
	return d.handle.AddrReplace(d.link, addressOn(p))
}

func (d *dummy) remove(p netip.Prefix) error {
	if d.link == nil {
		return nil
	}
	err := d.handle.AddrDel(d.link, addressOn(p))
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENODEV) {
		err = nil
	}
	return errors.Join(err, d.removeRoute(p))
}

// removeRoute deletes the route to an address that package takeover has put in the place of the kernel's, while
// connections through kube-proxy's servers ended.
func (d *dummy) removeRoute(p netip.Prefix) error {
	route := routeTo(p)
	route.Protocol = unix.RTPROT_KERNEL
	if p.Addr().Is4() {
		route.LinkIndex = d.link.Attrs().Index
	}
	err := d.handle.RouteDel(route)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// release leaves the interface to kube-proxy.
func (d *dummy) release() error {
	if err := d.findOwn(); err != nil || d.link == nil {
		return err
	}
	if err := d.handle.LinkSetAlias(d.link, ""); err != nil {
		return fmt.Errorf("delete the alias of interface %s: %w", dummyName, err)
	}
	return nil
}

func (d *dummy) clear() error {
	err := d.findOwn()
	if err != nil || d.link == nil {
		return err
	}
	for p := range d.held { // with their routes; what else is on the interface goes with it
		err = errors.Join(err, d.remove(p))
	}
	if gone := d.handle.LinkDel(d.link); gone != nil && !errors.Is(gone, unix.ENODEV) {
		err = errors.Join(err, fmt.Errorf("delete interface %s: %w", dummyName, gone))
	}
	d.link = nil
	return err
}

// addressOn makes IPv6 addresses deprecated, so that masquerading takes none of them for a source: it looks
// at the addresses of all interfaces.
func addressOn(p netip.Prefix) *netlink.Addr {
	n := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	a := &netlink.Addr{IPNet: n}
	if p.Addr().Is6() {
		a.Flags, a.ValidLft = unix.IFA_F_NODAD, math.MaxUint32
	}
	return a
}
