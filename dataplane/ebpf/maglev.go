package ebpf

import (
	"encoding/binary"
	"hash/fnv"
	"math"

	"fairlead.dev/fairlead/model"
)

// A pool whose scheduler is mh has its slots taken by a hash of the client's address, as IPVS does, and what is in them
// follows from the backends alone: all nodes send a client to the same backend, and when a backend goes, few
// clients of others move. This is the table of Maglev (Eisenbud et al., NSDI 2016, section 3.4).
//
// A socket's own address is not known when it connects. Its network namespace stands for it: a pod keeps its
// backend, which need not be the one that its packets would get.

// byClient is the scheduler's name.
const byClient = "mh"

func hashed(p model.Pool) uint32 {
	if p.Scheduler == byClient {
		return 1
	}
	return 0
}

// slotsFor is how many slots a pool with n backends that serve has.
func slotsFor(p model.Pool, n int) uint32 {
	if p.Scheduler != byClient {
		return uint32(n)
	}
	// A hundred for each backend, so that shares differ by a percent at most. Another size moves most clients, so there
	// are few, all of them primes.
	for _, size := range []uint32{4093, 65521, 1048573} {
		if uint64(n)*100 <= uint64(size) {
			return size
		}
	}
	return 16777213
}

// spread writes the slots of a pool.
func spread(slots []objectsSlot, p model.Pool, serving []model.Backend) {
	if p.Scheduler == byClient {
		fillMaglev(slots, serving)
	} else {
		fill(slots, serving)
	}
}

// candidate is a backend that takes slots: those of its own permutation, one for each unit of credit.
type candidate struct {
	backend    objectsEndpoint
	next, skip uint64
	credit     uint64
}

// fillMaglev has backends take slots in turn. In each round one has as many turns as its weight is of the greatest
// weight.
func fillMaglev(slots []objectsSlot, backends []model.Backend) {
	size, most := uint64(len(slots)), uint64(0)
	candidates := make([]candidate, len(backends))
	for i, b := range backends {
		e := endpoint(b.AddrPort())
		offset, skip := permutation(e, size)
		candidates[i] = candidate{backend: e, next: offset, skip: skip}
		most = max(most, uint64(b.Weight))
	}
	clear(slots)
	for left := size; ; {
		for i := range candidates {
			c := &candidates[i]
			if c.credit += uint64(backends[i].Weight); c.credit < most {
				continue
			}
			c.credit -= most
			for slots[c.next].Share != 0 {
				c.next = (c.next + c.skip) % size
			}
			slots[c.next] = objectsSlot{Backend: c.backend, Share: math.MaxUint32}
			if left--; left == 0 {
				return
			}
		}
	}
}

// permutation is the order in which a backend wants slots: where it begins, and how far it goes each time.
func permutation(e objectsEndpoint, size uint64) (offset, skip uint64) {
	h := fnv.New64a()
	var b [18]byte
	for i, word := range e.Addr.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	binary.NativeEndian.PutUint16(b[16:], e.Port)
	_, _ = h.Write(b[:]) // never fails
	x := h.Sum64()
	return mix(x) % size, mix(^x)%(size-1) + 1
}

// mix is the finalizer of MurmurHash3, as the programs have it.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// sameSlot compares all but what programs count there.
func sameSlot(a, b objectsSlot) bool {
	return a.Backend == b.Backend && a.Alias == b.Alias && a.Share == b.Share
}
