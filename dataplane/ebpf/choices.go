package ebpf

import (
	"net/netip"

	"github.com/vishvananda/netlink"
)

// way is where packets go: by a device, and there to a prefix.
type way struct {
	device int
	to     netip.Prefix
}

// choices are the addresses of one family that stand for clients on a way: of those that were offered one with the
// highest rank, and of these the first.
type choices map[way]choice

type choice struct {
	netip.Addr
	rank int
}

func (c choices) offer(device int, to netip.Prefix, rank int, a netip.Addr) {
	w := way{device, to.Masked()}
	if had, known := c[w]; !known || rank > had.rank {
		c[w] = choice{a, rank}
	}
}

// into leaves out what a wider prefix says as well: most devices have one address.
func (c choices) into(out nodeAddrs) {
	for w, a := range c {
		if c.wider(w) != a.Addr {
			out[addrKey(w.device, w.to)] = a.Addr
		}
	}
}

// wider is what the next wider prefix says; not valid: there is none.
func (c choices) wider(w way) netip.Addr {
	for bits := w.to.Bits() - 1; bits >= 0; bits-- {
		if a, ok := c[way{w.device, netip.PrefixFrom(w.to.Addr(), bits).Masked()}]; ok {
			return a.Addr
		}
	}
	return netip.Addr{}
}

// reaches are the prefixes to which an address goes before others of its device: those that it has in common with what
// is there, of which the longest one counts.
func reaches(have netlink.Addr, a netip.Addr) (out []netip.Prefix) {
	ones, _ := have.Mask.Size()
	if a.Is6() {
		for bits := range ones {
			out = append(out, netip.PrefixFrom(a, bits+1))
		}
		return out
	}
	if have.Peer == nil {
		return []netip.Prefix{netip.PrefixFrom(a, ones)}
	}
	ones, _ = have.Peer.Mask.Size()
	peer, _ := netip.AddrFromSlice(have.Peer.IP)
	return []netip.Prefix{netip.PrefixFrom(peer.Unmap(), ones)}
}
