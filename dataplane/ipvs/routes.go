package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routes are local routes through the loopback interface. They are in the kernel's table for the node's own addresses:
// packets that pass the node take no further look-up for them.
type routes struct {
	handle *netlink.Handle
	nodes  map[bool]netlink.Addr // the node's first address of each family, true for IPv6, once it was asked for
	mtus   map[int]int           // of interfaces, once they were asked for
	// sources are those of the routes as they were made, or found at first. wrong are routes to which another program has
	// given another source.
	sources map[netip.Prefix]string
	wrong   map[netip.Prefix]netlink.Route
}

func newRoutes(handle *netlink.Handle) *routes {
	return &routes{
		handle: handle, nodes: map[bool]netlink.Addr{}, mtus: map[int]int{},
		sources: map[netip.Prefix]string{}, wrong: map[netip.Prefix]netlink.Route{},
	}
}

// protocol marks our routes ("ip route show table local proto 250").
const protocol = 250

const localTable = unix.RT_TABLE_LOCAL

func (*routes) claim() error { return nil }

func (r *routes) load([]netlink.Addr) (map[netip.Prefix]bool, error) {
	clear(r.nodes)
	clear(r.mtus)
	clear(r.wrong)
	held := map[netip.Prefix]bool{}
	all, err := r.list()
	for i := range all {
		p, ok := prefixOf(all[i].Dst)
		if !ok {
			continue
		}
		source := all[i].Src.String()
		if known, ok := r.sources[p]; ok && known != source {
			r.wrong[p] = all[i]
			continue
		}
		held[p], r.sources[p] = true, source
	}
	return held, err
}

func (r *routes) list() (all []netlink.Route, err error) {
	filter := netlink.Route{Table: localTable, Protocol: protocol}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		some, err := list(func() ([]netlink.Route, error) {
			return r.handle.RouteListFiltered(family, &filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		all = append(all, some...)
	}
	return all, nil
}

func (r *routes) add(p netip.Prefix) error {
	if wrong, ok := r.wrong[p]; ok {
		if err := r.handle.RouteDel(&wrong); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
		delete(r.wrong, p)
	}
	route := routeTo(p)
	r.adapt(route, p.Addr())
	err := r.handle.RouteAppend(route)
	if errors.Is(err, unix.EEXIST) {
		err = nil
	}
	if err == nil {
		r.sources[p] = route.Src.String()
	}
	return err
}

func (r *routes) remove(p netip.Prefix) error {
	delete(r.sources, p)
	err := r.handle.RouteDel(routeTo(p))
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func (r *routes) clear() error {
	all, err := r.list()
	for _, route := range all {
		if gone := r.handle.RouteDel(&route); gone != nil && !errors.Is(gone, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("delete local route %s: %w", route.Dst, gone))
		}
	}
	return err
}

// adapt gives a route the source address and the MTU that packets of this node's processes would have if the address
// were not local. Left to itself the kernel takes the destination for the source, and the MTU of lo: IPVS refuses what
// is larger than the MTU of the way to the backend (ensure_mtu_is_adequate in net/netfilter/ipvs/ip_vs_xmit.c).
func (r *routes) adapt(route *netlink.Route, a netip.Addr) {
	found, err := r.handle.RouteGet(a.AsSlice())
	switch {
	case err != nil || len(found) == 0: // no process here can have sent packets there; what is still sent is masqueraded
	case found[0].Type == unix.RTN_LOCAL: // it is local already, by another way
		node := r.node(a.Is6())
		if node.IPNet != nil {
			route.Src, route.MTU = node.IP, r.mtu(node.LinkIndex)
		}
	default:
		route.Src, route.MTU = found[0].Src, cmp.Or(found[0].MTU, r.mtu(found[0].LinkIndex))
	}
}

// mtu is that of an interface; 0: it is not known.
func (r *routes) mtu(index int) int {
	if _, known := r.mtus[index]; !known {
		if link, err := r.handle.LinkByIndex(index); err == nil {
			r.mtus[index] = link.Attrs().MTU
		}
	}
	return r.mtus[index]
}

// node is the node's first address of a family; zero: it has none.
func (r *routes) node(v6 bool) netlink.Addr {
	if addr, known := r.nodes[v6]; known {
		return addr
	}
	family := netlink.FAMILY_V4
	if v6 {
		family = netlink.FAMILY_V6
	}
	but, _ := r.handle.LinkByName(dummyName)
	addrs, _ := list(func() ([]netlink.Addr, error) { // without one the kernel chooses
		return r.handle.AddrList(nil, family)
	})
	r.nodes[v6] = netlink.Addr{}
	for _, a := range addrs {
		const unwanted = unix.IFA_F_TEMPORARY | unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE
		proxys := but != nil && a.LinkIndex == but.Attrs().Index
		if !proxys && a.Scope == int(netlink.SCOPE_UNIVERSE) && a.Flags&unwanted == 0 {
			r.nodes[v6] = a
			break
		}
	}
	return r.nodes[v6]
}

// loopbackIndex is that of lo in every network namespace.
const loopbackIndex = 1

func routeTo(p netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		LinkIndex: loopbackIndex, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: localTable, Protocol: protocol,
	}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	if size == 32 {
		addr = addr.Unmap()
	}
	return netip.PrefixFrom(addr, bits), ok
}
