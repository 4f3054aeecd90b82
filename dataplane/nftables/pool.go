package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// pool is a model.Pool in the kernel.
type pool struct {
	number uint32
	slots  []netip.AddrPort // in the order of the kernel's slots; invalid: a slot that is missing
	sticky *sticky          // with affinity only
	users  []model.Key
	local  []netip.Addr // addresses with a hairpin element
}

// sticky is what a pool with affinity has besides: its slots are elements of choices, which name a
// backend by its handle, so that a client's memory outlives any change of the slots.
type sticky struct {
	number  uint32
	indexes ids
	handles map[netip.AddrPort]handle
}

// A staleHandle names a backend that has left its pool. Its elements go when no client remembers it.
type staleHandle struct {
	handle
	of *sticky // nil: not known
}

// setPool makes the kernel hold a pool, but for the slots that it loses, see trim. Its frontends follow
// when their number changes.
func (t *table) setPool(id model.PoolID, want model.Pool) error {
	p, old := t.pools[id], t.pools[id]
	if p == nil || (p.sticky != nil) != (want.Affinity > 0) {
		var err error
		if p, err = t.newPool(want.Affinity > 0); err != nil {
			return fmt.Errorf("pool %s: %w", id, err)
		}
		t.pools[id] = p
	}
	before := p.slots
	p.slots = arrange(before, want.Serving())
	if err := t.setHandles(p); err != nil {
		return fmt.Errorf("pool %s: %w", id, err)
	}
	for i, backend := range p.slots {
		t.setSlot(p, i, at(before, i), backend)
	}
	t.setHairpin(p, want)
	if old != nil {
		if err := t.reclass(old, p, want); err != nil {
			return err
		}
	}
	if len(p.slots) < len(before) {
		t.surplus = append(t.surplus, surplus{p, before})
	}
	t.dropHandles(p)
	if old != nil && old != p {
		t.deletePoolElements(old)
	}
	return nil
}

// surplus are slots beyond those that a pool has now.
type surplus struct {
	*pool
	before []netip.AddrPort
}

// trim deletes the slots that pools have lost, when no frontend chooses among them any more.
func (t *table) trim() {
	for _, s := range t.surplus {
		for i := len(s.slots); i < len(s.before); i++ {
			t.setSlot(s.pool, i, s.before[i], netip.AddrPort{})
		}
	}
	t.surplus = nil
}

func (t *table) newPool(affinity bool) (*pool, error) {
	number, err := t.numbers.take()
	if err != nil || !affinity {
		return &pool{number: number}, err
	}
	s := &sticky{indexes: ids{max: maxIndex}, handles: map[netip.AddrPort]handle{}}
	s.number, err = t.stickies.take()
	return &pool{number: number, sticky: s}, err
}

func at(slots []netip.AddrPort, i int) (a netip.AddrPort) {
	if i < len(slots) {
		a = slots[i]
	}
	return a
}

// setSlot changes one slot; an invalid backend stands for no element.
func (t *table) setSlot(p *pool, i int, old, backend netip.AddrPort) {
	if old == backend {
		return
	}
	m := slots
	if p.sticky != nil {
		m = choices
	}
	key := slotKey(p.number, i)
	if old.IsValid() {
		t.Element(unix.NFT_MSG_DELSETELEM, m, key, nil)
	}
	if !backend.IsValid() {
		return
	}
	if old.IsValid() {
		t.Tx.Join()
	}
	data := nf.EncodeBackend
	if p.sticky != nil {
		data = func(b netip.AddrPort) []byte { return nf.Native(uint32(p.sticky.handles[b])) }
	}
	t.Element(unix.NFT_MSG_NEWSETELEM, m, key, data(backend))
}

func slotKey(number uint32, i int) []byte {
	return binary.NativeEndian.AppendUint32(nf.Native(number), uint32(i))
}

// setHandles gives each backend of a pool with affinity a handle.
func (t *table) setHandles(p *pool) error {
	if p.sticky == nil {
		return nil
	}
	for _, b := range p.slots {
		if _, ok := p.sticky.handles[b]; ok {
			continue
		}
		index, err := p.sticky.indexes.take()
		if err != nil {
			return err
		}
		h := newHandle(p.sticky.number, index)
		p.sticky.handles[b] = h
		t.backends[h] = b
		t.Element(unix.NFT_MSG_NEWSETELEM, backends, nf.Native(uint32(h)), nf.EncodeBackend(b))
	}
	return nil
}

// dropHandles makes the handles stale whose backends are in no slot any more.
func (t *table) dropHandles(p *pool) {
	if p.sticky == nil || len(p.sticky.handles) == 0 {
		return
	}
	serving := make(map[netip.AddrPort]bool, len(p.slots))
	for _, b := range p.slots {
		serving[b] = true
	}
	for b, h := range p.sticky.handles {
		if !serving[b] {
			t.stale = append(t.stale, staleHandle{handle: h, of: p.sticky})
			delete(p.sticky.handles, b)
		}
	}
}

// setHairpin keeps an element for each backend of this node.
func (t *table) setHairpin(p *pool, want model.Pool) {
	old := p.local
	p.local = nil
	for _, b := range want.Backends {
		if b.Local && b.Weight > 0 && (len(p.local) == 0 || p.local[len(p.local)-1] != b.Addr) {
			p.local = append(p.local, b.Addr)
			t.need(hairpin, pair(b.Addr))
		}
	}
	for _, a := range old {
		t.release(hairpin, pair(a))
	}
}

func pair(a netip.Addr) string {
	b := a.AsSlice()
	return string(append(b, b...))
}

// reclass leads the frontends of a pool to the pool that takes its place, and to the class of its size.
func (t *table) reclass(old, p *pool, want model.Pool) error {
	for _, key := range slices.Clone(old.users) {
		was := t.byID[t.rows[key].token.Class()]
		now := was
		now.slots, now.affinity = len(p.slots), want.Affinity
		if now == was && old == p {
			return nil // all of them have that size
		}
		if err := t.setToken(key, now, p); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) deletePool(id model.PoolID) {
	if p := t.pools[id]; p != nil {
		t.deletePoolElements(p)
		delete(t.pools, id)
	}
}

func (t *table) deletePoolElements(p *pool) {
	for i, backend := range p.slots {
		t.setSlot(p, i, backend, netip.AddrPort{})
	}
	for _, a := range p.local {
		t.release(hairpin, pair(a))
	}
	t.numbers.give(p.number)
	if p.sticky != nil {
		p.slots = nil
		t.dropHandles(p)
		t.stickies.give(p.sticky.number)
	}
}

// arrange puts backends into slots, each as often as its weight asks for, and leaves as many as it
// can where they were in old.
func arrange(old []netip.AddrPort, backends []model.Backend) []netip.AddrPort {
	left, n := shares(backends)
	slots := make([]netip.AddrPort, n)
	for i := range min(n, len(old)) {
		k, ok := slices.BinarySearchFunc(backends, old[i], func(b model.Backend, a netip.AddrPort) int {
			return b.AddrPort().Compare(a)
		})
		if ok && left[k] > 0 {
			slots[i] = old[i]
			left[k]--
		}
	}
	i := 0
	for k, b := range backends {
		for ; left[k] > 0; left[k]-- {
			for slots[i].IsValid() {
				i++
			}
			slots[i] = b.AddrPort()
		}
	}
	return slots
}

// maxSlots bounds the slots of a pool whose weights have no common divisor.
const maxSlots = 1 << 14

// shares is how many slots each backend gets, and how many there are in all.
func shares(backends []model.Backend) (each []int, n int) {
	divisor, total := 0, 0
	for _, b := range backends {
		divisor = gcd(int(b.Weight), divisor)
		total += int(b.Weight)
	}
	scale := max(1, total/max(divisor, 1)/max(maxSlots, len(backends)))
	each = make([]int, len(backends))
	for i, b := range backends {
		each[i] = max(1, int(b.Weight)/divisor/scale)
		n += each[i]
	}
	return each, n
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
