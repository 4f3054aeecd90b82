package ebpf

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/model"
)

// ownAddrs are those that the node's own connections may come from. Which one a socket will have is not known when it
// connects; but mostly a row that allows some sources only allows all of them or none.
type ownAddrs []netip.Addr

// flags say whether that is so. Of a row for which it matters which one it is, and where they are not known, none is
// set.
func (o ownAddrs) flags(key model.Key, f model.Frontend) objectsFlags {
	if f.Allow == nil {
		return 0
	}
	var allowed, all int
	for _, a := range o {
		if a.Is4() != key.Addr.Is4() {
			continue
		}
		all++
		if f.Allows(a) {
			allowed++
		}
	}
	switch {
	case all == 0:
		return 0
	case allowed == all:
		return objectsFlagsNODE_ALLOWED
	case allowed == 0:
		return objectsFlagsNODE_DENIED
	}
	return 0
}

// ownAddrs leaves out what no connection to a Service comes from.
func (d *devices) ownAddrs() (out ownAddrs, err error) {
	addrs, err := d.addrs(netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	for _, have := range addrs {
		a, ok := netip.AddrFromSlice(have.IP)
		if a = a.Unmap(); ok && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// learnNode is for rows that are about to be written. Where another plane serves all packets, it knows better.
func (p *Plane) learnNode() (err error) {
	if p.serve == TC {
		p.left.node, err = p.devices.ownAddrs()
	}
	return err
}

// knowsNode reports whether the rows in the kernel say of the node's addresses what they should.
func (p *Plane) knowsNode(s *model.State) bool {
	now, err := p.devices.ownAddrs()
	if err != nil || slices.Equal(now, p.left.node) {
		return true
	}
	for key, f := range s.Frontends {
		if p.left.node.flags(key, f) != now.flags(key, f) {
			return false
		}
	}
	return true
}
