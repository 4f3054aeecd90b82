package ebpf

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// notes tell programs which keys the table of flows may have; see bpf/flows.h. A key that is there and not noted would
// be a flow whose packets go astray. So a list counts only after a pass through the whole table that began with an
// empty list, and whatever else is put into the table meanwhile is noted in both. A process that goes on beside another
// one may look through the same table, or a former one: the last that was opened says which one it is to be.
//
//	openNotes ─► none counts      begin ─► add … add ─► count: the new list does
type notes struct {
	memory *packetsNotes // of the kernel
	mapped []byte
	table  uint32 // the number of the table that this process has
	former uint32 // the list that counted when the pass began; 0: none did
	pass   uint32 // a number for it; 0: it makes no list
}

// openNotes has no list count: whoever has used the table may have noted nothing.
func openNotes(m, table *ebpf.Map) (*notes, error) {
	info, err := table.Info()
	if err != nil {
		return nil, fmt.Errorf("the number of %s: %w", packetsMapTranslations, err)
	}
	id, ok := info.ID()
	if !ok {
		return nil, fmt.Errorf("the kernel does not tell the number of %s", packetsMapTranslations)
	}
	page := os.Getpagesize()
	size := (int(unsafe.Sizeof(packetsNotes{})) + page - 1) / page * page
	b, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the memory of %s: %w", packetsMapNoted, err)
	}
	n := &notes{memory: (*packetsNotes)(unsafe.Pointer(&b[0])), mapped: b, table: uint32(id)}
	atomic.StoreUint32(&n.memory.Table, n.table)
	atomic.StoreUint64(n.word(), 0)
	return n, nil
}

// word has Counts in its lower half, and Pass in the upper one.
func (n *notes) word() *uint64 { return (*uint64)(unsafe.Pointer(&n.memory.Counts)) }

// begin empties the list that does not count. A pass of another process, should there be one, does not count any more:
// it may be about the same list.
func (n *notes) begin() {
	n.pass = 0
	for n.pass == 0 {
		word := atomic.LoadUint64(n.word())
		if atomic.LoadUint32(&n.memory.Table) != n.table {
			return
		}
		n.former, n.pass = uint32(word), 1+rand.Uint32N(math.MaxUint32)
		if !atomic.CompareAndSwapUint64(n.word(), word, n.said(n.former)) {
			n.pass = 0
		}
	}
	clear(n.memory.Lists[n.next()-1][:])
}

func (n *notes) said(counts uint32) uint64 { return uint64(n.pass)<<32 | uint64(counts) }

// next is the list that is made: 1 or 2.
func (n *notes) next() uint32 {
	if n.former == 1 {
		return 2
	}
	return 1
}

func (n *notes) add(key *packetsTuple) {
	if n.pass != 0 {
		n.memory.Lists[n.next()-1][noteOf(key)] = 1
	}
}

// count has the new list count, unless another pass has begun.
func (n *notes) count() {
	if n.pass == 0 {
		return
	}
	atomic.CompareAndSwapUint64(n.word(), n.said(n.former), n.said(n.next()))
}

func (n *notes) close() error { return unix.Munmap(n.mapped) }

// noteOf is what the programs' function note_of says.
func noteOf(key *packetsTuple) uint32 {
	some := func(a [4]uint32) uint64 { return uint64(a[0] + 3*a[1] + 7*a[2]) }
	a, b := key.Src.Addr.Word, key.Dst.Addr.Word
	h := uint64(a[3])*0x9e3779b97f4a7c15 + uint64(b[3])*0xc2b2ae3d27d4eb4f
	h += some(a)*0x165667b19e3779f9 + some(b)*0xd6e8feb86659fd93
	rest := uint64(key.Src.Port)<<32 | uint64(key.Dst.Port)<<16 | uint64(key.Hook)<<8 | uint64(key.Protocol)
	h += rest * 0xff51afd7ed558ccd
	h ^= h >> 32
	h *= 0x9fb21c651e98df25
	return uint32(h >> 46)
}
