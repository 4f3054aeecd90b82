package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nodeAddrs are what clients are hidden behind: an address of each family that the node has, that of packets which
// leave by the default route. Where there is none, it is the first one of the first device that has one.
func (d *devices) nodeAddrs() (out []netip.Addr, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		a, err := d.nodeAddr(family)
		if err != nil {
			return nil, fmt.Errorf("find an address to hide clients behind: %w", err)
		}
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out, nil
}

func (d *devices) nodeAddr(family int) (a netip.Addr, err error) {
	route, err := d.defaultRoute(family)
	if err != nil {
		return a, err
	}
	if a, ok := netip.AddrFromSlice(route.Src); ok {
		return a.Unmap(), nil
	}
	addrs, err := d.netlink.AddrList(nil, family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return a, err
	}
	best := -1
	for _, have := range addrs {
		candidate, ok := netip.AddrFromSlice(have.IP)
		if !ok || have.Scope != unix.RT_SCOPE_UNIVERSE || have.Flags&unusable != 0 {
			continue
		}
		if rank := rankOf(have, route.LinkIndex); rank > best {
			a, best = candidate.Unmap(), rank
		}
	}
	return a, nil
}

const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED

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
	routes, err := d.netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
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
