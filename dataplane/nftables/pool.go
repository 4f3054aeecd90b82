package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// A pool is a list of slots. A packet draws one of them by chance, so a backend has as many as its weight says.
//
//	without affinity   slots:   pool 7 . 0 ─► 10.244.1.2 . 8080     pool 7 . 1 ─► …
//	with affinity      choices: pool 7 . 0 ─► handle 9.0     backends: handle 9.0 ─► 10.244.1.2 . 8080
//	                   affinity-9: client ─► handle 9.0      (memory.go)
//
// A change must leave no packet without a backend, though the kernel may perform its parts in several transactions.
// So a pool that grows fills its new slots before frontends draw among them. One that shrinks has its frontends draw
// among fewer first; its surplus slots go at the end of the change (trim), and the handles of backends that have left
// go when no client remembers them (Plane.forget).

// pool is a model.Pool in the kernel.
type pool struct {
	number  uint32
	counted bool // its counter is there
	size    size
	slots   packed        // the backend of each, in the order of the kernel's elements; an invalid one is missing
	names   *names        // with affinity; nil: slots lead to backends themselves
	lasts   time.Duration // the affinity
	users   []model.Key
}

// names are the handles of a pool's backends. Its slots are elements of choices, which name a backend by its handle, so
// that a client's memory outlives any change of the slots.
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
	if named := want.Affinity > 0; p == nil || (p.names != nil) != named {
		var err error
		if p, err = t.newPool(named); err != nil {
			return fmt.Errorf("pool %s: %w", id, err)
		}
	}
	before := p.slots.list()
	now := arrange(before, spread(want.Serving()))
	if err := t.setHandles(p, now); err != nil {
		return fmt.Errorf("pool %s: %w", id, err)
	}
	t.pools[id], p.slots = p, pack(now)
	for i, backend := range now {
		t.setSlot(p, i, at(before, i), backend)
	}
	t.setShared(p, want)
	if err := t.setMemory(p, want.Affinity); err != nil {
		return err
	}
	if err := t.redirect(old, p); err != nil {
		return err
	}
	if len(now) < len(before) {
		t.surplus = append(t.surplus, surplus{p, before})
	}
	t.dropHandles(p)
	if old != nil && old != p {
		t.deletePoolElements(old)
	}
	return nil
}

// surplus are the slots that a pool had before, if those are more than it has now.
type surplus struct {
	*pool
	before []netip.AddrPort
}

// trim deletes the slots that pools have lost, when no packet chooses among them any more.
func (t *table) trim() {
	for _, s := range t.surplus {
		for i := s.slots.len(); i < len(s.before); i++ {
			t.setSlot(s.pool, i, s.before[i], netip.AddrPort{})
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
	if old == backend {
		return
	}
	set, key := slots+t.shardOf(p.number), slotKey(p.number, i)
	if p.names != nil {
		set = choices
	}
	if old.IsValid() {
		t.left = true
		t.Element(unix.NFT_MSG_DELSETELEM, set, key, nil)
	}
	if !backend.IsValid() {
		return
	}
	if old.IsValid() {
		t.Tx.Join()
	}
	data := nft.EncodeBackend(backend)
	if p.names != nil {
		data = nft.Native(uint32(p.names.handles[backend]))
	}
	t.Element(unix.NFT_MSG_NEWSETELEM, set, key, data)
}

func slotKey(number uint32, i int) []byte {
	return binary.NativeEndian.AppendUint32(nft.Native(number), uint32(i))
}

// setHandles gives all backends of a pool that has names handles, or none: a pool is never half in the kernel.
func (t *table) setHandles(p *pool, now []netip.AddrPort) error {
	if p.names == nil {
		return nil
	}
	var missing []netip.AddrPort
	for _, b := range now {
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
	for _, b := range p.slots.list() {
		serving[b] = true
	}
	for b, h := range p.names.handles {
		if !serving[b] {
			t.stale = append(t.stale, staleHandle{handle: h, of: p.names})
			delete(p.names.handles, b)
		}
	}
}

// setShared keeps the counter of a pool, and an element for each backend of this node.
func (t *table) setShared(p *pool, want model.Pool) {
	var pairs []nft.Entry
	for _, b := range want.Backends {
		if b.Local && b.Weight > 0 {
			a := string(b.Addr.AsSlice())
			pairs = append(pairs, nft.Entry{Set: hairpin, Key: a + a})
		}
	}
	pairs = slices.Compact(pairs) // backends are sorted: those of one address are neighbours
	if len(pairs) > 0 || t.Owns(p) {
		t.Own(p, pairs...)
	}
	if t.detail == dataplane.PerPool && !p.counted {
		t.Claim(p.counter())
		p.counted = true
	}
}

func (p *pool) counter() nft.Entry { return nft.Entry{Set: served, Key: string(nft.Native(p.number))} }

// redirect leads the frontends of a pool to the one that takes its place, and to all slots that it has now.
func (t *table) redirect(old, p *pool) error {
	was := p.size
	p.size = sizeOf(p.slots.len(), p.names != nil, t.shardOf(p.number))
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
	for i, backend := range p.slots.list() {
		t.setSlot(p, i, backend, netip.AddrPort{})
	}
	t.Own(p)
	if p.counted {
		t.Release(p.counter())
	}
	t.numbers.give(p.number)
	if p.names != nil {
		t.deleteMemory(p.names.number)
		p.slots = packed{}
		t.dropHandles(p)
		t.stickies.give(p.names.number)
	}
}
