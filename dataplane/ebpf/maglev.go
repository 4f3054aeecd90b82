package ebpf

import (
	"crypto/sha256"
	"encoding/binary"
	"hash/fnv"
	"math"

	"fairlead.dev/fairlead/model"
)

// A pool whose scheduler is mh has its backends chosen by a hash of the client's address, as IPVS does. The table of
// choices follows from the backends alone, so all nodes send a client to the same backend. When a backend goes, few
// clients of others move. This is the table of Maglev (Eisenbud et al., NSDI 2016, section 3.4).
//
//	pool ─► slots: one for each backend, which say where the table is ─► chunks: numbers of slots, by the client
//
// Pools with the same backends have one table.
//
// A socket's own address is not known when it connects. Its network namespace stands for it: a pod keeps its
// backend, which need not be the one that its packets would get.

const (
	// byClient is the scheduler's name.
	byClient  = "mh"
	chunkSize = len(objectsChunk{}.Turns)
)

// isHashed reports whether the client's address chooses. A turn has no room for more backends.
func isHashed(p model.Pool, serving int) bool {
	return p.Scheduler == byClient && serving > 0 && serving <= math.MaxUint16
}

// turnsFor is how many turns the table of n backends has: a hundred for each, so that shares differ by a percent
// at most. From 10,485 backends on they are fewer, but never less than sixteen. Another number of turns moves most
// clients, so there are few numbers, all of them primes. One backend needs but one turn.
func turnsFor(n int) int {
	if n == 1 {
		return 1
	}
	for _, size := range []int{1021, 4093, 16381, 65521, 262139} {
		if n*100 <= size {
			return size
		}
	}
	return 1048573
}

// chunksFor is how many chunks a table of n backends has.
func chunksFor(n int) uint32 { return 1 + uint32((turnsFor(n)+chunkSize-1)/chunkSize) }

// backendSet says which backends a table is for, and their weights.
type backendSet [sha256.Size]byte

func setOf(serving []model.Backend) (set backendSet) {
	if len(serving) == 1 { // whichever it is
		return set
	}
	h := sha256.New()
	var b [20]byte
	for _, backend := range serving {
		a := backend.Addr.As16()
		copy(b[:], a[:])
		binary.NativeEndian.PutUint16(b[16:], backend.Port)
		binary.NativeEndian.PutUint16(b[18:], backend.Weight)
		_, _ = h.Write(b[:]) // never fails
	}
	h.Sum(set[:0])
	return set
}

// turns is a table in the kernel.
type turns struct {
	set           backendSet
	first, chunks uint32
	pools         int // that choose by it
}

// turnsOf is the table of some backends, for one more pool. It makes one if there is none.
func (t *tables) turnsOf(serving []model.Backend) (*turns, error) {
	set := setOf(serving)
	if known := t.turns[set]; known != nil {
		known.pools++
		return known, nil
	}
	n := chunksFor(len(serving))
	first, err := t.take(&t.parts, n)
	if err != nil {
		return nil, err
	}
	copy(t.chunks[first:first+n], chunksOf(serving))
	made := &turns{set: set, first: first, chunks: n, pools: 1}
	t.turns[set] = made
	return made, nil
}

// discardTurns gives a table back that no pool chooses by any more; nil: the pool had none.
func (t *tables) discardTurns(had *turns) {
	if had == nil {
		return
	}
	if had.pools--; had.pools == 0 {
		t.parts.discard(had.first, had.chunks)
		delete(t.turns, had.set)
	}
}

// fillHashed writes the slots of a pool that chooses by the table that begins with a chunk.
func fillHashed(slots []objectsSlot, backends []model.Backend, table uint32) {
	for i, b := range backends {
		slots[i] = objectsSlot{Backend: endpoint(b.AddrPort()), Alias: table}
	}
}

// chunksOf is the table of some backends.
func chunksOf(backends []model.Backend) []objectsChunk {
	all := maglev(turnsFor(len(backends)), backends)
	chunks := make([]objectsChunk, chunksFor(len(backends)))
	chunks[0].Turns[0], chunks[0].Turns[1] = uint16(len(all)), uint16(len(all)>>16)
	for i, backend := range all {
		chunks[1+i/chunkSize].Turns[i%chunkSize] = backend
	}
	return chunks
}

// candidate is a backend that takes turns: those of its own permutation, one for each unit of credit.
type candidate struct{ next, skip, credit uint64 }

// maglev has backends take so many turns. In each round one takes as many as its weight is of the greatest weight.
//
// A client's hash is a place in the table, and the turn there is its backend. Each backend has an order of places that
// follows from its address alone. It begins somewhere, and goes on by a step that comes to all of them, as the size is
// a prime. In turn, each backend takes the first place of its order that is free:
//
//	a wants 3 0 2 4 1, b wants 0 4 3 2 1:   a takes 3, b 0, a 2, b 4, a 1   ─►   b a a a b
//
// If b goes, a gets its places and keeps its own. If c comes, it takes some of each, and few others change.
func maglev(size int, backends []model.Backend) []uint16 {
	most := uint64(0)
	candidates := make([]candidate, len(backends))
	for i, b := range backends {
		candidates[i].next, candidates[i].skip = permutation(endpoint(b.AddrPort()), uint64(size))
		most = max(most, uint64(b.Weight))
	}
	taken := make([]bool, size)
	turns := make([]uint16, size)
	for left := size; ; {
		for i := range candidates {
			c := &candidates[i]
			if c.credit += uint64(backends[i].Weight); c.credit < most {
				continue
			}
			c.credit -= most
			for taken[c.next] {
				c.next = (c.next + c.skip) % uint64(size)
			}
			taken[c.next], turns[c.next] = true, uint16(i)
			if left--; left == 0 {
				return turns
			}
		}
	}
}

// permutation is the order in which a backend wants turns: where it begins, and how far it goes each time.
func permutation(e objectsEndpoint, size uint64) (offset, skip uint64) {
	if size == 1 {
		return 0, 0
	}
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
