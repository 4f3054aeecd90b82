package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"fairlead.dev/fairlead/lab/eventually"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// vethSpec is a cable: one end stays in the namespace that makes it, the other becomes eth0 of peer.
type vethSpec struct {
	name   string
	master int // index of the bridge that gets this end; 0: none
	peer   *netns
	near   net.HardwareAddr // of this end; nil: random
	far    net.HardwareAddr // of eth0; nil: random
}

// addVeth lays a cable and returns the indexes of its ends. Both are up and carry packets.
func (n *netns) addVeth(v vethSpec) (near, far int, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex, attrs.HardwareAddr, attrs.Flags = v.name, v.master, v.near, net.FlagUp
	link := &netlink.Veth{
		LinkAttrs:        attrs,
		PeerName:         "eth0",
		PeerHardwareAddr: v.far,
		PeerNamespace:    netlink.NsFd(v.peer.file.Fd()),
	}
	if err := n.link.LinkAdd(link); err != nil {
		return 0, 0, fmt.Errorf("add interface %s: %w", v.name, err)
	}
	if v.master != 0 {
		// Where br_netfilter is loaded, the bridge itself carries a pod's redirected packet back to it.
		if err := n.link.LinkSetHairpin(link, true); err != nil {
			return 0, 0, fmt.Errorf("set hairpin mode of %s: %w", v.name, err)
		}
	}
	eth0, err := v.peer.link.LinkByName("eth0")
	if err != nil {
		return 0, 0, fmt.Errorf("find eth0: %w", err)
	}
	if err := v.peer.link.LinkSetUp(eth0); err != nil {
		return 0, 0, fmt.Errorf("set eth0 up: %w", err)
	}
	for _, index := range []int{link.Index, v.master} {
		if index == 0 {
			continue
		}
		if err := n.awaitCarrier(index); err != nil {
			return 0, 0, fmt.Errorf("set interface %s up: %w", v.name, err)
		}
	}
	return link.Index, eth0.Attrs().Index, nil
}

// awaitCarrier returns when an interface carries packets. The kernel's link watch makes it do so some
// time, up to a second, after the other end came up, and what is sent before is lost; since Linux 6.8
// to ask for the link's state is to have the work done (rtnl_getlink in net/core/rtnetlink.c).
func (n *netns) awaitCarrier(index int) error {
	return eventually.Poll(context.Background(), func() error {
		link, err := n.link.LinkByIndex(index)
		if err == nil && link.Attrs().OperState != netlink.OperUp {
			err = fmt.Errorf("interface %s is %s", link.Attrs().Name, link.Attrs().OperState)
		}
		return err
	})
}

// addBridge makes a bridge that is up and knows no timers: ports forward at once.
func (n *netns) addBridge(name string, mac net.HardwareAddr) (int, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.Flags = name, mac, net.FlagUp
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: new(bool)}
	if err := n.link.LinkAdd(bridge); err != nil {
		return 0, fmt.Errorf("add bridge %s: %w", name, err)
	}
	return bridge.Index, nil
}

// addAddr gives an interface an address that can be used at once.
func (n *netns) addAddr(index int, p netip.Prefix) error {
	addr := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	err := n.link.AddrAdd(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, addr)
	if err == nil && p.Addr().Is6() {
		err = n.awaitLocal(index, p.Addr())
	}
	if err != nil {
		return fmt.Errorf("add address %s: %w", p, err)
	}
	return nil
}

// awaitLocal returns when the kernel takes packets to an IPv6 address for its own. Even without
// duplicate address detection, joining the groups of neighbour discovery and adding the local route
// are left to a work queue, the route last (addrconf_dad_work in net/ipv6/addrconf.c).
func (n *netns) awaitLocal(index int, a netip.Addr) error {
	return eventually.Poll(context.Background(), func() error {
		routes, err := n.link.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{OifIndex: index})
		if err == nil && (len(routes) == 0 || routes[0].Type != unix.RTN_LOCAL) {
			err = errors.New("it has no local route")
		}
		return err
	})
}

func (n *netns) addRoute(r netlink.Route) error {
	if err := n.link.RouteReplace(&r); err != nil {
		return fmt.Errorf("add route to %s: %w", r.Dst, err)
	}
	return nil
}

// routeVia leads a prefix to the address of its own family among via.
func (n *netns) routeVia(to netip.Prefix, via []netip.Addr) error {
	return n.addRoute(netlink.Route{Dst: ipNet(to), Gw: addrOf(via, to.Addr().Is6()).AsSlice()})
}

// routeDirect leads a prefix to an interface on which its addresses answer.
func (n *netns) routeDirect(to netip.Prefix, index int) error {
	scope := netlink.SCOPE_LINK
	if to.Addr().Is6() {
		scope = netlink.SCOPE_UNIVERSE // IPv6 routes know no other
	}
	return n.addRoute(netlink.Route{Dst: ipNet(to), LinkIndex: index, Scope: scope})
}

// port is an interface of a namespace.
type port struct {
	*netns
	index int
}

// reach leads an address to the port behind which it is. The permanent neighbour entry saves the
// asking, and a place in the kernel's neighbour table, which for all namespaces together has one
// for each of 1024 others (net.ipv4.neigh.default.gc_thresh3).
func (p port) reach(a netip.Addr, mac net.HardwareAddr) error {
	if err := p.setNeighbour(a, mac); err != nil {
		return err
	}
	return p.routeDirect(hostPrefix(a), p.index)
}

func (p port) setNeighbour(a netip.Addr, mac net.HardwareAddr) error {
	neighbour := netlink.Neigh{
		LinkIndex: p.index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac,
	}
	if err := p.link.NeighSet(&neighbour); err != nil {
		return fmt.Errorf("set neighbour %s: %w", a, err)
	}
	return nil
}

// forget undoes reach, also where it was never done.
func (p port) forget(a netip.Addr) error {
	err := p.link.RouteDel(&netlink.Route{Dst: ipNet(hostPrefix(a))})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete route to %s: %w", a, err)
	}
	err = p.link.NeighDel(&netlink.Neigh{LinkIndex: p.index, IP: a.AsSlice()})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete neighbour %s: %w", a, err)
	}
	return nil
}

// routeNowhere answers packets to a prefix, unless a longer one matches, with "host unreachable".
func (n *netns) routeNowhere(to netip.Prefix) error {
	return n.addRoute(netlink.Route{Dst: ipNet(to), Type: unix.RTN_UNREACHABLE})
}

// routeDefault leads everything of one family to the node, on its side of a pod's cable. There it
// has no address, so that what it sends to pods carries its primary one; a link-local address and a
// neighbour entry stand for it, also in IPv4, which can do that since Linux 5.2.
func (p port) routeDefault(v6 bool) error {
	gateway := podGateway().AsSlice()
	r := netlink.Route{Dst: ipNet(anyPrefix(v6)), LinkIndex: p.index}
	if v6 {
		r.Gw = gateway
	} else {
		r.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: gateway}
	}
	return p.addRoute(r)
}

// podGateway stands for the node in its pods.
func podGateway() netip.Addr { return netip.MustParseAddr("fe80::1") }

// podGatewayMAC is the hardware address of every interface on which a node has pods.
func podGatewayMAC() net.HardwareAddr { return net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee} }

// linkLocal is a link-local address that belongs to an address.
func linkLocal(a netip.Addr) netip.Prefix {
	ll := [16]byte{0: 0xfe, 1: 0x80, 8: 1}
	last := a.As16()
	copy(ll[12:], last[12:])
	return netip.PrefixFrom(netip.AddrFrom16(ll), 64)
}

func anyPrefix(v6 bool) netip.Prefix {
	if v6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// lanOf is the LAN's range in the family of an address.
func lanOf(a netip.Addr) netip.Prefix {
	lan := netip.MustParsePrefix(lanCIDR)
	if a.Is6() {
		return embedPrefix(lan)
	}
	return lan
}

func lanPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, lanOf(a).Bits()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
