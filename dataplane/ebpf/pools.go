package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// poolWriter puts pools in force, many at a time. No program reads the new slots before the word is written that leads
// there.
//
//	set: slots in shared memory, members gathered ─► flush: members to the kernel ─► the words
type poolWriter struct {
	*tables
	keys   []objectsMemberKey
	values []objectsMember
	at     []uint32    // of the backends of one pool: a slot of each
	ready  []readyPool // whose members are gathered
	gone   []objectsMemberKey
}

// readyPool is a pool whose slots are written.
type readyPool struct {
	*pool
	id           model.PoolID
	want         model.Pool
	first, count uint32
	turns        *turns
}

// setAll sets the pools of a change, and has the kernel know the members of those that UDP now leads to.
func (w *poolWriter) setAll(s *model.State, c model.Change) error {
	var known []model.PoolID // of the kernel, but for its members
	for _, key := range c.Frontends.Delete {
		w.lost = w.lost || w.tcp || key.Protocol == model.UDP
	}
	for key, f := range c.Frontends.Set.All() {
		w.lost = w.lost || w.tcp || key.Protocol == model.UDP
		if key.Protocol == model.UDP && f.Verdict == model.Forward && !w.udp[f.Pool] {
			w.udp[f.Pool] = true
			if w.pools[f.Pool] != nil {
				known = append(known, f.Pool)
			}
		}
	}
	if n := len(c.Pools.Set); n > len(w.pools) { // to grow by itself, again and again, takes longer
		larger := make(map[model.PoolID]*pool, len(w.pools)+n)
		maps.Copy(larger, w.pools)
		w.pools = larger
	}
	for id, want := range c.Pools.Set.All() {
		if err := w.set(id, want); err != nil {
			return fmt.Errorf("pool %s: %w", id, err)
		}
	}
	for _, id := range known {
		if p := w.pools[id]; !p.listed {
			w.addMembers(id, p, s.Pools[id], p.first)
		}
	}
	return w.flush()
}

// set prepares that a pool's new connections go to other backends.
func (w *poolWriter) set(id model.PoolID, want model.Pool) error {
	p := w.pools[id]
	if p == nil {
		number, err := w.take(&w.numbers, 1)
		if err != nil {
			return err
		}
		p = &pool{number: number}
		w.entries[number] = objectsPool{Name: poolName(id), Owner: uint16(ownerOf(id))}
		w.pools[id] = p
	}
	serving := want.Serving()
	count := uint32(len(serving))
	first, err := w.take(&w.ranges, count)
	if err != nil {
		return err
	}
	var turns *turns
	if isHashed(want, len(serving)) {
		if turns, err = w.turnsOf(serving); err != nil {
			return err
		}
	}
	if w.choosesByLoad(want) {
		if err := w.loads.begin(poolName(id), want.Backends); err != nil {
			return fmt.Errorf("loads: %w", err)
		}
	}
	spread(w.slots[first:first+count], serving, turns)
	had := len(w.gone)
	w.addMembers(id, p, want, first)
	w.lost = w.lost || w.tcp && slices.ContainsFunc(p.backends, func(b model.Backend) bool {
		return !hasBackend(want.Backends, b.AddrPort())
	}) || len(w.gone) > had && w.udp[id]
	if w.ready = append(w.ready, readyPool{p, id, want, first, count, turns}); max(len(w.ready), len(w.keys)) >= batch {
		return w.flush()
	}
	return nil
}

// flush puts in force what is ready.
func (w *poolWriter) flush() error {
	if err := w.update(objectsMapMembers, w.keys, w.values, len(w.keys)); err != nil {
		return err
	}
	for _, p := range w.ready {
		p.byLoad = w.choosesByLoad(p.want)
		w.entries[p.number].Affinity, w.entries[p.number].ByLoad = seconds(p.want.Affinity), word(p.byLoad)
		w.publish(p.number, p.first, p.count)
		w.discardSlots(p.id, p.pool)
		p.pool.first, p.pool.count, p.pool.turns, p.backends = p.first, p.count, p.turns, p.want.Backends
	}
	w.keys, w.values, w.ready = w.keys[:0], w.values[:0], w.ready[:0]
	return nil
}

// choosesByLoad reports whether a pool takes, of two backends, the less loaded one.
func (t *tables) choosesByLoad(p model.Pool) bool { return t.loads != nil && chosenByLoad(p) }

// addMembers gathers a pool's backends, whose slots begin at first, if a program looks them up, and those that are to
// go.
func (w *poolWriter) addMembers(id model.PoolID, p *pool, want model.Pool, first uint32) {
	before := p.members()
	p.listed = w.packets || want.Affinity > 0 || w.udp[id]
	if p.listed {
		for i, at := range w.slotsOf(first, want) {
			b := want.Backends[i]
			w.keys = append(w.keys, p.member(b.AddrPort()))
			w.values = append(w.values, objectsMember{Is: membership(b), Slot: at})
		}
	}
	for _, b := range before {
		if !p.listed || !hasBackend(want.Backends, b.AddrPort()) {
			w.gone = append(w.gone, p.member(b.AddrPort()))
		}
	}
}

// slotsOf are slots of a pool's backends, 0 for those that do not serve. They are lent until the next call.
func (w *poolWriter) slotsOf(first uint32, want model.Pool) []uint32 {
	w.at = w.at[:0]
	for _, b := range want.Backends {
		if b.Weight == 0 {
			w.at = append(w.at, 0)
			continue
		}
		w.at = append(w.at, first) // each has one, in their order
		first++
	}
	return w.at
}

// members are the backends that the kernel knows.
func (p *pool) members() []model.Backend {
	if !p.listed {
		return nil
	}
	return p.backends
}

func (p *pool) member(b netip.AddrPort) objectsMemberKey {
	return objectsMemberKey{Backend: endpoint(b), Pool: p.number}
}

// drop forgets a pool to which no row leads any more.
func (w *poolWriter) drop(id model.PoolID) {
	p := w.pools[id]
	if p == nil {
		return
	}
	for _, b := range p.members() {
		w.gone = append(w.gone, p.member(b.AddrPort()))
	}
	w.discardSlots(id, p)
	w.numbers.discard(p.number, 1)
	delete(w.pools, id)
	delete(w.udp, id)
}
