package nftables

import (
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

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
