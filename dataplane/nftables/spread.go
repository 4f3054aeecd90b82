package nftables

import (
	"cmp"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// A share says how many slots a backend, or a block, has.
type share struct {
	netip.AddrPort
	slots int
}

const (
	// mostSlots is how many slots for each backend a pool has in which each weight has as many as it says.
	mostSlots = 32
	// blockSlots is how many slots a block has.
	blockSlots = 16
	// leastBlocks is how many slots and blocks a pool has at least that has blocks. What it takes to fill the last block
	// makes one connection in as many go to another backend than the weights say.
	leastBlocks = 100
	// maxBlocks bounds the backends of a pool with blocks. One with more of them has no blocks, and rounded weights.
	maxBlocks = 1 << 14
)

// spread is how many slots each backend has. Without parts that is all. Otherwise some slots are blocks, of sixteen
// parts each, and a connection that comes to a block comes to one of its parts: a heavy backend has a slot where it
// would have sixteen parts. So there are at most 31 elements for each backend, and some 200 more, whatever the weights.
func spread(backends []model.Backend) (slots, parts []share) {
	divisor, total := 0, 0
	for _, b := range backends {
		divisor = gcd(int(b.Weight), divisor)
		total += int(b.Weight)
	}
	total /= divisor
	most := mostSlots * len(backends)
	if total > most && len(backends) <= maxBlocks {
		return inBlocks(backends, divisor, total)
	}
	scale := max(1, (total+most-1)/most)
	for _, b := range backends {
		slots = append(slots, share{b.AddrPort(), max(1, int(b.Weight)/divisor/scale)})
	}
	return slots, nil
}

// inBlocks gives a backend a slot for each sixteen parts that it has, and the rest of its parts to blocks.
func inBlocks(backends []model.Backend, divisor, total int) (slots, parts []share) {
	times := (leastBlocks*blockSlots + total - 1) / total
	all := make([]share, len(backends))
	for i, b := range backends {
		all[i] = share{b.AddrPort(), int(b.Weight) / divisor * times}
	}
	fill(all, -total*times&(blockSlots-1))
	rest := 0
	for _, s := range all {
		if n := s.slots / blockSlots; n > 0 {
			slots = append(slots, share{s.AddrPort, n})
		}
		if n := s.slots % blockSlots; n > 0 {
			parts = append(parts, share{s.AddrPort, n})
			rest += n
		}
	}
	blocks := make([]share, rest/blockSlots, rest/blockSlots+len(slots))
	for i := range blocks {
		blocks[i] = share{block(i), 1}
	}
	return append(blocks, slots...), parts
}

// fill gives more parts to the heaviest, to whom they matter least.
func fill(all []share, more int) {
	if more == 0 {
		return
	}
	heaviest := make([]*share, len(all))
	for i := range all {
		heaviest[i] = &all[i]
	}
	slices.SortStableFunc(heaviest, func(a, b *share) int { return cmp.Compare(b.slots, a.slots) })
	for i := range more {
		heaviest[i%len(heaviest)].slots++
	}
}

// block stands for a block among the backends of slots. It comes before all of them.
func block(i int) netip.AddrPort { return netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(i)) }

// isBlock tells blocks from backends, none of which has that address.
func isBlock(a netip.AddrPort) bool { return a.Addr() == netip.IPv4Unspecified() }

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
