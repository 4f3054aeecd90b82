package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// A share says how many slots a backend has.
type share struct {
	netip.AddrPort
	slots int
}

// A pool may have fewSlots, or mostSlots for each backend if that is more. So pools of up to eight backends have exact
// weights, as 256 is the greatest one. In others at most one connection in a hundred goes to another backend than the
// weights say. The worst case is few heavy backends among many light ones, each of which has one slot at least.
const (
	fewSlots  = 2048
	mostSlots = 40
)

// spread is how many slots each backend has: as many as its weight without what all weights have in common, or that
// times what there may be of all.
func spread(backends []model.Backend) []share {
	divisor, total := 0, 0
	for _, b := range backends {
		divisor = gcd(int(b.Weight), divisor)
		total += int(b.Weight)
	}
	most := min(total/divisor, max(fewSlots, mostSlots*len(backends)))
	slots := make([]share, 0, len(backends))
	for _, b := range backends {
		slots = append(slots, share{b.AddrPort(), max(1, (int(b.Weight)*most+total/2)/total)})
	}
	return slots
}

// arrange puts what has shares, sorted by address, into slots, and leaves as many as it can where they were in old.
func arrange(old []netip.AddrPort, shares []share) []netip.AddrPort {
	n, left := 0, make([]int, len(shares))
	for k, s := range shares {
		n, left[k] = n+s.slots, s.slots
	}
	slots := make([]netip.AddrPort, n)
	for i := range min(n, len(old)) {
		k, ok := slices.BinarySearchFunc(shares, old[i], func(s share, a netip.AddrPort) int { return s.Compare(a) })
		if ok && left[k] > 0 {
			slots[i] = old[i]
			left[k]--
		}
	}
	i := 0
	for k, s := range shares {
		for ; left[k] > 0; left[k]-- {
			for slots[i].IsValid() {
				i++
			}
			slots[i] = s.AddrPort
		}
	}
	return slots
}

// packed is a list of backends in a fraction of the memory: there may be a million of them.
type packed struct {
	bytes []byte // of each the length of its address, this, and the port; of one that is missing zeros
	each  int
}

const portBytes = 2

func pack(list []netip.AddrPort) packed {
	p := packed{each: 1 + portBytes}
	for _, a := range list {
		p.each = max(p.each, 1+a.Addr().BitLen()/8+portBytes)
	}
	p.bytes = make([]byte, len(list)*p.each)
	for i, a := range list {
		b, addr := p.at(i), a.Addr().AsSlice()
		b[0] = byte(len(addr))
		copy(b[1:], addr)
		binary.BigEndian.PutUint16(b[p.each-portBytes:], a.Port())
	}
	return p
}

func (p packed) at(i int) []byte { return p.bytes[i*p.each : (i+1)*p.each] }

func (p packed) len() int { return len(p.bytes) / max(p.each, 1) }

func (p packed) list() []netip.AddrPort {
	all := make([]netip.AddrPort, p.len())
	for i := range all {
		b := p.at(i)
		if a, ok := netip.AddrFromSlice(b[1 : 1+b[0]]); ok {
			all[i] = netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[p.each-portBytes:]))
		}
	}
	return all
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
