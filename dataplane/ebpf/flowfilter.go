package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// flowFilter tells programs which keys the table of flows may have; see bpf/flows.h. The packets of a flow whose key is
// in the table and not noted would go astray. So a list is in force only after a pass through the whole table that
// began with an empty list. Keys that are added meanwhile are noted in both lists. Several processes may look through
// one table, or one of them through a previous one. The last that was synced says which table counts, and one process
// at a time begins a list.
//
//	reset ─► none is in force      begin ─► add … add ─► finish: the new list is
type flowFilter struct {
	memory   *packetsNotes // of the kernel
	unmap    func()
	grace    grace
	dir      string // locked by who begins a list
	table    uint32 // the number of the table that this process has
	previous uint32 // the list that was in force when the pass began; 0: none was
	pass     uint32 // a random number for it; 0: it makes no list
}

// openFlowFilter has no list in force. A process that begins a list locks dir.
func openFlowFilter(m, table *ebpf.Map, dir string) (*flowFilter, error) {
	info, err := table.Info()
	if err != nil {
		return nil, fmt.Errorf("the number of %s: %w", packetsMapTranslations, err)
	}
	id, ok := info.ID()
	if !ok {
		return nil, fmt.Errorf("the kernel does not report the number of %s", packetsMapTranslations)
	}
	memory, unmap, err := mapped[packetsNotes](m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", packetsMapNoted, err)
	}
	n := &flowFilter{memory: &memory[0], unmap: unmap, dir: dir, table: uint32(id)}
	if n.grace, err = newGrace(); err != nil {
		unmap()
		return nil, err
	}
	n.reset()
	return n, nil
}

// ignoreFlowFilter has no list in force that another version may have made. Whatever the layout, the word comes first.
func ignoreFlowFilter(m *ebpf.Map) error {
	words, unmap, err := mapped[uint64](m)
	if err != nil {
		return fmt.Errorf("%s: %w", packetsMapNoted, err)
	}
	defer unmap()
	atomic.StoreUint64(&words[0], 0)
	return nil
}

// word has InForce in its lower half, and Pass in the upper one.
func (n *flowFilter) word() *uint64 { return (*uint64)(unsafe.Pointer(&n.memory.InForce)) }

// reset has no list in force, nor any that is being made: who has used the table may have noted nothing, or have had
// another one.
func (n *flowFilter) reset() {
	atomic.StoreUint32(&n.memory.Table, n.table)
	n.pass = newPass()
	atomic.StoreUint64(n.word(), n.said(0))
	n.pass = 0
}

func newPass() uint32 { return 1 + rand.Uint32N(math.MaxUint32) }

// begin empties the list that is not in force. A pass of another process, should there be one, makes no list any more:
// it may be about the same one. If another one is just here, this pass makes none.
func (n *flowFilter) begin() error {
	n.pass = 0
	dir, err := n.lock()
	if dir == nil {
		return err
	}
	defer dir.Close()
	word := atomic.LoadUint64(n.word())
	if atomic.LoadUint32(&n.memory.Table) != n.table {
		return nil
	}
	n.previous, n.pass = uint32(word), newPass()
	if !atomic.CompareAndSwapUint64(n.word(), word, n.said(n.previous)) {
		n.pass = 0
		return nil
	}
	if err := n.empty(); err != nil {
		n.pass = 0
		return err
	}
	return nil
}

// empty clears the next list when no program reads it any more that has found it in force. Keys that programs have
// noted there before are in the table when empty returns, where this pass finds them.
func (n *flowFilter) empty() error {
	if err := n.grace.wait(); err != nil {
		return err
	}
	clear(n.memory.Lists[n.next()-1][:])
	return n.grace.wait()
}

// lock keeps others from beginning a list, until what it returns is closed. It is nil if another process has the lock,
// or has removed the directory, which will be there again.
func (n *flowFilter) lock() (*os.File, error) {
	dir, err := os.Open(n.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		return dir, nil
	}
	dir.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock %s: %w", n.dir, err)
}

func (n *flowFilter) said(inForce uint32) uint64 { return uint64(n.pass)<<32 | uint64(inForce) }

// next is the list that is made: 1 or 2.
func (n *flowFilter) next() uint32 {
	if n.previous == 1 {
		return 2
	}
	return 1
}

// add notes what is in the table. If the pass is no longer the last one that began, that is in vain, and does no harm.
func (n *flowFilter) add(key *packetsTuple) {
	if n.pass != 0 {
		n.memory.Lists[n.next()-1][noteOf(key)] = 1
	}
}

// addToBoth notes what is about to be put into the table, and once more what was, as programs do.
func (n *flowFilter) addToBoth(key *packetsTuple) {
	for i := range n.memory.Lists {
		n.memory.Lists[i][noteOf(key)] = 1
	}
}

// finish puts the new list in force, unless another pass has begun.
func (n *flowFilter) finish() {
	if n.pass == 0 {
		return
	}
	atomic.CompareAndSwapUint64(n.word(), n.said(n.previous), n.said(n.next()))
}

func (n *flowFilter) close() error {
	n.unmap()
	return n.grace.close()
}

// noteOf is what the programs' function note_of says.
func noteOf(key *packetsTuple) uint32 {
	two := func(high, low uint32) uint64 { return uint64(high)<<32 | uint64(low) }
	a, b := key.Src.Addr.Word, key.Dst.Addr.Word
	h := two(a[2], a[3])*0x9e3779b97f4a7c15 + two(b[2], b[3])*0xc2b2ae3d27d4eb4f
	h += two(a[0], a[1])*0x165667b19e3779f9 + two(b[0], b[1])*0xd6e8feb86659fd93
	rest := uint64(key.Src.Port)<<32 | uint64(key.Dst.Port)<<16 | uint64(key.Hook)<<8 | uint64(key.Protocol)
	h += rest * 0xff51afd7ed558ccd
	h ^= h >> 32
	h *= 0x9fb21c651e98df25
	return uint32(h >> 46)
}
