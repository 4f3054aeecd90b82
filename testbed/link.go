package testbed

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// vethSpec is a cable: one end stays in the namespace that makes it, the other becomes eth0 of peer.
type vethSpec struct {
	name   string
	master int // index of the bridge that gets this end; 0: none
	peer   *netns
	mac    net.HardwareAddr // of eth0; nil: random
}

// addVeth lays a cable and returns the index of the far end, eth0. Both ends are up.
func (n *netns) addVeth(v vethSpec) (int, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex, attrs.Flags = v.name, v.master, net.FlagUp
	link := &netlink.Veth{
		LinkAttrs:        attrs,
		PeerName:         "eth0",
		PeerHardwareAddr: v.mac,
		PeerNamespace:    netlink.NsFd(v.peer.file.Fd()),
	}
	if err := n.link.LinkAdd(link); err != nil {
		return 0, fmt.Errorf("add interface %s: %w", v.name, err)
	}
	if v.master != 0 {
		// Where br_netfilter is loaded, the bridge itself carries a pod's redirected packet back to it.
		if err := n.link.LinkSetHairpin(link, true); err != nil {
			return 0, fmt.Errorf("set hairpin mode of %s: %w", v.name, err)
		}
	}
	eth0, err := v.peer.link.LinkByName("eth0")
	if err != nil {
		return 0, fmt.Errorf("find eth0: %w", err)
	}
	if err := v.peer.link.LinkSetUp(eth0); err != nil {
		return 0, fmt.Errorf("set eth0 up: %w", err)
	}
	for _, index := range []int{link.Index, v.master} {
		if index == 0 {
			continue
		}
		if err := n.awaitCarrier(index); err != nil {
			return 0, fmt.Errorf("set interface %s up: %w", v.name, err)
		}
	}
	return eth0.Attrs().Index, nil
}

// awaitCarrier returns when an interface carries packets. The kernel's link watch makes it do so some
// time, up to a second, after the other end came up, and what is sent before is lost; since Linux 6.8
// to ask for the link's state is to have the work done (rtnl_getlink in net/core/rtnetlink.c).
func (n *netns) awaitCarrier(index int) error {
	return await(func() (bool, error) {
		link, err := n.link.LinkByIndex(index)
		return err == nil && link.Attrs().OperState == netlink.OperUp, err
	})
}

// addBridge makes a bridge that is up and knows no timers: ports forward at once.
func (n *netns) addBridge(name string) (int, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = name, net.FlagUp
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: new(bool)}
	if err := n.link.LinkAdd(bridge); err != nil {
		return 0, fmt.Errorf("add bridge %s: %w", name, err)
	}
	return bridge.Index, nil
}

// addPodBridge makes cbr0. Like the interface of a single pod it has the address that pods use as
// gateway and no other, so that the node's own packets to pods carry its primary address.
func (n *netns) addPodBridge() error {
	index, err := n.addBridge(podBridge)
	if err != nil {
		return err
	}
	return n.addAddr(index, podGateway())
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
	return await(func() (bool, error) {
		routes, err := n.link.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{OifIndex: index})
		return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL, nil
	})
}

// await polls what the kernel does soon and announces to nobody.
func await(done func() (bool, error)) error {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Microsecond) {
		if ok, err := done(); ok || err != nil {
			return err
		}
	}
	return errors.New("it is not in effect after 5s")
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

// unroute undoes routeDirect, also where it was never done.
func (n *netns) unroute(to netip.Prefix) error {
	err := n.link.RouteDel(&netlink.Route{Dst: ipNet(to)})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete route to %s: %w", to, err)
	}
	return nil
}

// routeNowhere answers packets to a prefix, unless a longer one matches, with "host unreachable".
func (n *netns) routeNowhere(to netip.Prefix) error {
	return n.addRoute(netlink.Route{Dst: ipNet(to), Type: unix.RTN_UNREACHABLE})
}

// routeDefault leads everything of one family to a link-local IPv6 gateway. IPv4 can do that since
// Linux 5.2; it saves a pod's node an IPv4 address for its side of the cable.
func (n *netns) routeDefault(v6 bool, index int) error {
	r := netlink.Route{Dst: ipNet(anyPrefix(v6)), LinkIndex: index}
	gateway := podGateway().Addr().AsSlice()
	if v6 {
		r.Gw = gateway
	} else {
		r.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: gateway}
	}
	return n.addRoute(r)
}

// podGateway is the address of a node on the interfaces of its pods.
func podGateway() netip.Prefix { return netip.MustParsePrefix("fe80::1/64") }

// linkLocal is a link-local address that belongs to an address.
func linkLocal(a netip.Addr) netip.Prefix {
	ll := [16]byte{0: 0xfe, 1: 0x80, 8: 1}
	last := a.As16()
	copy(ll[12:], last[12:])
	return netip.PrefixFrom(netip.AddrFrom16(ll), 64)
}

// macOf is a hardware address that belongs to an address, so that a neighbour entry stays right when
// a pod is replaced by one with the same address.
func macOf(a netip.Addr) net.HardwareAddr {
	last := a.As16()
	return binary.BigEndian.AppendUint32([]byte{0x0a, 0x58}, binary.BigEndian.Uint32(last[12:]))
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
