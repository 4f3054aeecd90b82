package nftables

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// pool is a model.Pool in the kernel.
type pool struct {
	number uint32
	size   size
	layout
	names *names        // with affinity or blocks; nil: slots lead to backends themselves
	lasts time.Duration // the affinity
	users []model.Key
}

// layout is which backend is where, in the order of the kernel's elements; an invalid one is missing.
type layout struct {
	slots []netip.AddrPort
	parts []netip.AddrPort // of the blocks among the slots, sixteen of each
}

func (l layout) backends() iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		for _, list := range [][]netip.AddrPort{l.slots, l.parts} {
			for _, b := range list {
				if b.IsValid() && !isBlock(b) && !yield(b) {
					return
				}
			}
		}
	}
}

// names are the handles of a pool's backends. Its slots are elements of choices, which name a backend by its handle, so
// that a client's memory outlives any change of the slots, and that a slot may name a block instead.
type names struct {
	number  uint32
	indexes ids
	handles map[netip.AddrPort]handle
}

// A staleHandle names a backend that has left its pool. Its elements go when no client remembers it.
type staleHandle struct {
	handle
	of *names // nil: not known
}

// setPool makes the kernel hold a pool, but for the slots that it loses, see trim. Its frontends follow when it takes
// another number.
func (t *table) setPool(id model.PoolID, want model.Pool) error {
	p, old := t.pools[id], t.pools[id]
	slots, parts := spread(want.Serving())
	named := want.Affinity > 0 || parts != nil // as isNamed
	if p == nil || (p.names != nil) != named || (p.lasts > 0) != (want.Affinity > 0) {
		var err error
		if p, err = t.newPool(named); err != nil {
			return fmt.Errorf("pool %s: %w", id, err)
		}
	}
	before, now := p.layout, layout{arrange(p.slots, slots), arrange(p.parts, parts)}
	if err := t.setHandles(p, now); err != nil {
		return fmt.Errorf("pool %s: %w", id, err)
	}
	t.pools[id], p.layout = p, now
	for i, backend := range p.parts { // before the slots that lead to them
		t.setPart(p, i, at(before.parts, i), backend)
	}
	for i, backend := range p.slots {
		t.setSlot(p, i, at(before.slots, i), backend)
	}
	t.setHairpin(p, want)
	if err := t.setMemory(p, want.Affinity); err != nil {
		return err
	}
	if err := t.redirect(old, p); err != nil {
		return err
	}
	if len(p.slots) < len(before.slots) || len(p.parts) < len(before.parts) {
		t.surplus = append(t.surplus, surplus{p, before})
	}
	t.dropHandles(p)
	if old != nil && old != p {
		t.deletePoolElements(old)
	}
	return nil
}

// isNamed reports whether the backends of a pool have names.
func isNamed(want model.Pool) bool {
	if want.Affinity > 0 {
		return true
	}
	_, parts := spread(want.Serving())
	return parts != nil
}

// surplus is what a pool had before, if that is more than it has now.
type surplus struct {
	*pool
	before layout
}

// trim deletes the slots that pools have lost, when nobody chooses among them any more.
func (t *table) trim() {
	for _, s := range t.surplus {
		for i := len(s.slots); i < len(s.before.slots); i++ {
			t.setSlot(s.pool, i, s.before.slots[i], netip.AddrPort{})
		}
		for i := len(s.parts); i < len(s.before.parts); i++ {
			t.setPart(s.pool, i, s.before.parts[i], netip.AddrPort{})
		}
	}
	t.surplus = nil
}

func (t *table) newPool(named bool) (*pool, error) {
	number, err := t.numbers.take()
	if err != nil || !named {
		return &pool{number: number}, err
	}
	n := &names{indexes: ids{max: maxIndex}, handles: map[netip.AddrPort]handle{}}
	if n.number, err = t.stickies.take(); err != nil {
		t.numbers.give(number)
	}
	return &pool{number: number, names: n}, err
}

func at(slots []netip.AddrPort, i int) (a netip.AddrPort) {
	if i < len(slots) {
		a = slots[i]
	}
	return a
}

// setSlot changes one slot; an invalid backend stands for no element.
func (t *table) setSlot(p *pool, i int, old, backend netip.AddrPort) {
	m := slots
	if p.names != nil {
		m = choices
	}
	t.setChoice(p, choice{m, slotKey(p.number, i)}, old, backend)
}

// setPart changes one part of a block.
func (t *table) setPart(p *pool, i int, old, backend netip.AddrPort) {
	t.setChoice(p, choice{choices, slotKey(uint32(p.names.block(i/blockSlots)), i%blockSlots)}, old, backend)
}

// A choice is an element of a map that leads to a backend.
type choice struct {
	set int
	key []byte
}

func (t *table) setChoice(p *pool, c choice, old, backend netip.AddrPort) {
	if old == backend {
		return
	}
	if old.IsValid() {
		t.Element(unix.NFT_MSG_DELSETELEM, c.set, c.key, nil)
	}
	if !backend.IsValid() {
		return
	}
	if old.IsValid() {
		t.Tx.Join()
	}
	data := nft.EncodeBackend(backend)
	if p.names != nil {
		data = nft.Native(uint32(p.names.of(backend)))
	}
	t.Element(unix.NFT_MSG_NEWSETELEM, c.set, c.key, data)
}

// of is the handle of a backend or of a block.
func (n *names) of(a netip.AddrPort) handle {
	if isBlock(a) {
		return n.block(int(a.Port()))
	}
	return n.handles[a]
}

// block is the handle of a block. They have the last indexes.
func (n *names) block(i int) handle { return newHandle(n.number, lastIndex-uint32(i)) }

func slotKey(number uint32, i int) []byte {
	return binary.NativeEndian.AppendUint32(nft.Native(number), uint32(i))
}

// setHandles gives all backends of a pool that has names handles, or none.
func (t *table) setHandles(p *pool, now layout) error {
	if p.names == nil {
		return nil
	}
	var missing []netip.AddrPort
	for b := range now.backends() {
		if _, ok := p.names.handles[b]; !ok {
			p.names.handles[b] = 0
			missing = append(missing, b)
		}
	}
	if len(missing) > p.names.indexes.left() {
		for _, b := range missing {
			delete(p.names.handles, b)
		}
		return errTooMany
	}
	for _, b := range missing {
		index, err := p.names.indexes.take()
		if err != nil {
			return err
		}
		h := newHandle(p.names.number, index)
		p.names.handles[b], t.backends[h] = h, b
		t.Element(unix.NFT_MSG_NEWSETELEM, backends, nft.Native(uint32(h)), nft.EncodeBackend(b))
	}
	return nil
}

// dropHandles makes the handles stale whose backends are in no slot any more.
func (t *table) dropHandles(p *pool) {
	if p.names == nil || len(p.names.handles) == 0 {
		return
	}
	serving := make(map[netip.AddrPort]bool, len(p.names.handles))
	for b := range p.backends() {
		serving[b] = true
	}
	for b, h := range p.names.handles {
		if !serving[b] {
			t.stale = append(t.stale, staleHandle{handle: h, of: p.names})
			delete(p.names.handles, b)
		}
	}
}

// setHairpin keeps an element for each backend of this node.
func (t *table) setHairpin(p *pool, want model.Pool) {
	var pairs []nft.Entry
	for _, b := range want.Backends {
		if a := string(b.Addr.AsSlice()); b.Local && b.Weight > 0 {
			pairs = append(pairs, nft.Entry{Set: hairpin, Key: a + a})
		}
	}
	pairs = slices.Compact(pairs) // backends are sorted: those of one address are neighbours
	if len(pairs) > 0 || t.Owns(p) {
		t.Own(p, pairs...)
	}
}

// redirect leads the frontends of a pool to the one that takes its place, and to all slots that it has now.
func (t *table) redirect(old, p *pool) error {
	was := p.size
	p.size = sizeOf(len(p.slots), p.names != nil)
	if err := t.choose(p.size); err != nil || old == nil || old == p && was == p.size {
		return err
	}
	for _, key := range slices.Clone(old.users) {
		t.setToken(key, t.rows[key].class, p)
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
	for i, backend := range p.parts {
		t.setPart(p, i, backend, netip.AddrPort{})
	}
	t.Own(p)
	t.numbers.give(p.number)
	if p.names != nil {
		t.deleteMemory(p.names.number)
		p.layout = layout{}
		t.dropHandles(p)
		t.stickies.give(p.names.number)
	}
}
