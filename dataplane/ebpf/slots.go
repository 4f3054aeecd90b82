package ebpf

import (
	"math"
	"math/bits"
	"slices"

	"fairlead.dev/fairlead/model"
)

// spread writes the slots of a pool's backends, which clients choose by a table; nil: each at random, by its weight.
func spread(slots []objectsSlot, backends []model.Backend, by *turns) {
	switch {
	case by != nil:
		fillHashed(slots, backends, by.first)
	case len(backends) > 0:
		fill(slots, backends)
	}
}

// fill writes n backends into n slots by the alias method (Walker 1977; the construction is Vose's, 1991). A program
// then chooses by weight in constant time: it takes a slot at random, and with one more comparison the slot's own
// backend or its alias.
//
// Weights 1, 1 and 4 make shares of 1/6, 1/6 and 4/6. Each of the three slots stands for 2/6:
//
//	slot 0: 1/6 backend 0, the rest backend 2     slot 1: 1/6 backend 1, the rest backend 2     slot 2: backend 2
//
// A backend whose share is less than a slot is poor: it leaves the rest of its slot to one that is rich. That one has
// so much less to give, and may be poor by then. Each turn of the loop finishes one slot, so the cost is linear.
func fill(slots []objectsSlot, backends []model.Backend) {
	total := uint64(0)
	for i, b := range backends {
		slots[i] = objectsSlot{Backend: endpoint(b.AddrPort()), Share: math.MaxUint32}
		total += uint64(b.Weight)
	}
	n := uint64(len(backends))
	if total == n*uint64(backends[0].Weight) && even(backends) {
		return
	}
	// left is what each backend has to give, in parts of which a slot has total.
	left := make([]uint64, n)
	var poor, rich []int
	for i, b := range backends {
		left[i] = uint64(b.Weight) * n
		if left[i] < total {
			poor = append(poor, i)
		} else {
			rich = append(rich, i)
		}
	}
	for len(poor) > 0 && len(rich) > 0 {
		p, r := poor[len(poor)-1], rich[len(rich)-1]
		poor = poor[:len(poor)-1]
		slots[p].Alias = uint32(r)
		slots[p].Share = uint32(scale(left[p], total))
		if left[r] -= total - left[p]; left[r] < total {
			rich = rich[:len(rich)-1]
			poor = append(poor, r)
		}
	}
}

func even(backends []model.Backend) bool {
	return !slices.ContainsFunc(backends, func(b model.Backend) bool { return b.Weight != backends[0].Weight })
}

// scale is part/total in 2^-32; part is the smaller one.
func scale(part, total uint64) uint64 {
	high, low := bits.Mul64(part, 1<<32)
	quotient, _ := bits.Div64(high, low, total)
	return quotient
}

// class is how many slots are set aside for a pool of n: at most a quarter more, so that they fit others later.
func class(n uint32) uint32 {
	if n <= 8 {
		return n
	}
	step := uint32(1) << (bits.Len32(n-1) - 3)
	return (n + step - 1) / step * step
}

// spans hands out ranges of numbers below a limit.
type spans struct {
	next, limit uint32
	free        map[uint32][]uint32 // by class: where such ranges begin
	discarded   []span              // no longer in use, but by programs that run at this moment
}

type span struct{ first, class uint32 }

func newSpans(limit uint32) spans { return spans{limit: limit, free: map[uint32][]uint32{}} }

// take reports false if there is no room.
func (s *spans) take(n uint32) (first uint32, ok bool) {
	c := class(n)
	if free := s.free[c]; len(free) > 0 {
		s.free[c] = free[:len(free)-1]
		return free[len(free)-1], true
	}
	if s.limit-s.next < c {
		return 0, false
	}
	first = s.next
	s.next += c
	return first, true
}

// discard gives a range back. It is free after the next call of settle.
func (s *spans) discard(first, n uint32) {
	if n == 0 {
		return
	}
	s.discarded = append(s.discarded, span{first, class(n)})
}

func (s *spans) settle() {
	for _, r := range s.discarded {
		s.free[r.class] = append(s.free[r.class], r.first)
	}
	s.discarded = s.discarded[:0]
}
