package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nodeAddrs are what clients are hidden behind, by the device that packets leave by, and there by the next hop, or for
// IPv6 by where they go. Device 0 stands for those that have no address of their own.
type nodeAddrs map[packetsNodeAddrKey]netip.Addr

func addrKey(device int, to netip.Prefix) packetsNodeAddrKey {
	to = to.Masked()
	k := packetsNodeAddrKey{Device: uint32(device), To: packetsAddr(address(to.Addr()))}
	bits := to.Bits()
	if to.Addr().Is4() {
		k.V4 = 1
		bits += 128 - 32
	}
	k.Bits = uint32(8*(unsafe.Offsetof(k.To)-unsafe.Offsetof(k.Device))) + uint32(bits)
	return k
}

// anywhere has all addresses of a family.
func anywhere(v4 bool) netip.Prefix {
	if v4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// put makes a map hold these addresses in place of others. A device whose addresses do not fit uses those of device 0.
func (n nodeAddrs) put(m *ebpf.Map, others nodeAddrs) error {
	keys := slices.SortedFunc(maps.Keys(n), func(a, b packetsNodeAddrKey) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Bits, b.Bits))
	})
	for _, key := range keys {
		if others[key] == n[key] {
			continue
		}
		err := insist(func() error { return m.Put(key, packetsAddr(address(n[key]))) })
		if errors.Is(err, unix.ENOSPC) {
			break
		}
		if err != nil {
			return err
		}
	}
	for key := range others {
		if _, stays := n[key]; stays {
			continue
		}
		if err := ignoreMissing(m.Delete(key)); err != nil {
			return err
		}
	}
	return nil
}

// of reports whether a device has one.
func (n nodeAddrs) of(device int) bool {
	_, v4 := n[addrKey(device, anywhere(true))]
	_, v6 := n[addrKey(device, anywhere(false))]
	return v4 || v6
}

// String lists them by device.
func (n nodeAddrs) String() string {
	var lines []string
	for key, a := range n {
		line := fmt.Sprintf("%d %s", key.Device, a)
		if key != addrKey(int(key.Device), anywhere(a.Is4())) {
			line += " to " + objectsAddr(key.To).addr().String()
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

// nodeAddrs are what the node has. MASQUERADE takes an address of the device by which a packet leaves, and so does this
// plane. For IPv4 it is one with the next hop in its subnet (the smallest, should subnets overlap), else the first one.
// The route's preferred source does not count. For IPv6 it is the one with the longest prefix in common with the
// destination. That is rule 8 of RFC 6724, and rule 6 as far as it tells unique local addresses from others.
//
// Devices without an address use that of the default route: its preferred source, or else the first address of its
// device. Where there is none, it is the first address of the first device that has one.
//
// For direct answers the first ones of all are there, too, by the numbers -1, -2 …
func (d *devices) nodeAddrs() (nodeAddrs, error) {
	out := nodeAddrs{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		if err := d.addFamily(out, family); err != nil {
			return nil, fmt.Errorf("find addresses for source NAT: %w", err)
		}
	}
	return out, nil
}

// addFamily offers each usable address to the devices and destinations that it may serve. The one with the highest rank
// wins; of equal ranks, the first.
func (d *devices) addFamily(out nodeAddrs, family int) error {
	route, err := d.defaultRoute(family)
	if err != nil {
		return err
	}
	addrs, err := d.addrs(family)
	if err != nil {
		return err
	}
	c, everywhere := choices{}, anywhere(family == netlink.FAMILY_V4)
	if a, ok := netip.AddrFromSlice(route.Src); ok {
		c.offer(0, everywhere, preferred, a.Unmap())
		c.offer(route.LinkIndex, everywhere, preferred, a.Unmap())
	}
	n, seen := 0, map[int]int{}
	for _, have := range addrs {
		a, ok := netip.AddrFromSlice(have.IP)
		a = a.Unmap()
		if !ok || have.Scope != unix.RT_SCOPE_UNIVERSE || have.Flags&unusable != 0 || a.IsLinkLocalUnicast() {
			continue
		}
		if n++; d.answers && n <= int(packetsAnsweringOWN_ADDRS) {
			c.offer(-n, everywhere, 0, a)
		}
		rank := rankOf(have, have.LinkIndex)
		c.offer(0, everywhere, rankOf(have, route.LinkIndex), a)
		c.offer(have.LinkIndex, everywhere, rank, a)
		if seen[have.LinkIndex]++; seen[have.LinkIndex] > weighed {
			continue
		}
		for _, to := range reaches(have, a) {
			c.offer(have.LinkIndex, to, rank, a)
		}
	}
	c.into(out)
	return nil
}

const (
	weighed   = 32 // addresses of one device; others are taken only if they are the first choice for everything
	unusable  = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	preferred = 4 // before every rank
)

// rankOf prefers the device of the default route, and what the kernel does not change by itself.
func rankOf(a netlink.Addr, index int) (rank int) {
	if a.LinkIndex == index {
		rank += 2
	}
	if a.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_SECONDARY) == 0 {
		rank++
	}
	return rank
}

// defaultRoute is the one that is taken first; the zero Route if there is none.
func (d *devices) defaultRoute(family int) (netlink.Route, error) {
	_, everything, _ := net.ParseCIDR(map[int]string{netlink.FAMILY_V4: "0.0.0.0/0", netlink.FAMILY_V6: "::/0"}[family])
	filter := &netlink.Route{Dst: everything, Table: unix.RT_TABLE_MAIN}
	routes, err := whole(func() ([]netlink.Route, error) {
		return d.netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return netlink.Route{}, err
	}
	routes = slices.DeleteFunc(routes, func(r netlink.Route) bool { return r.Type != unix.RTN_UNICAST })
	if len(routes) == 0 {
		return netlink.Route{}, nil
	}
	r := slices.MinFunc(routes, func(a, b netlink.Route) int { return cmp.Compare(a.Priority, b.Priority) })
	if r.LinkIndex == 0 && len(r.MultiPath) > 0 {
		r.LinkIndex = r.MultiPath[0].LinkIndex
	}
	return r, nil
}
