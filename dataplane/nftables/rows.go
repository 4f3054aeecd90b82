package nftables

import (
	"errors"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// A Sync has two halves, between which sessions of another plane may be taken in:
//
//	load ─► syncPools: structure, unwanted ranges, pools under their old numbers ─► (sessions) ─► syncRows: frontends,
//	        guards, pods; then what no row has claimed goes
//
// Until syncRows no frontend leads to a pool that is new. So no packet chooses a backend before the pool has its
// sessions.

// syncPools makes the steps from the pools that load found to those of s, with all that rows are made of. The rows
// themselves are as they were.
func (t *table) syncPools(s *model.State) error {
	if !t.Exists {
		t.divide(t.wantedShards(s))
	}
	if err := t.structure(); err != nil {
		return err
	}
	t.recheck = true
	t.SweepRanges(s)
	t.adopt(s)
	return errors.Join(t.adoptSizes(), t.setPools(maps.All(s.Pools)))
}

// syncRows makes the steps from the rows that load found to those of s, after syncPools.
func (t *table) syncRows(s *model.State) error {
	frontends := maps.All(s.Frontends)
	errs := []error{t.needLocalnet(frontends), t.setFrontends(frontends), t.setPods(s)}
	t.OwnGuards(s, maps.Keys(s.Guards))
	for key := range t.rows {
		if _, ok := s.Frontends[key]; !ok {
			t.deleteFrontend(key)
		}
	}
	errs = append(errs, t.structure()) // which depends on whether there are Internal rows
	t.sweep()
	return errors.Join(errs...)
}

// adopt gives the pools of s the numbers under which the kernel holds them, as the tokens of their
// frontends tell. The kernel does not know the names of pools. A pool that is taken for another one only costs steps:
// setPool makes of any slots what they should be.
func (t *table) adopt(s *model.State) {
	shared, handles := t.sharedNumbers(s), t.foundHandles()
	for key, f := range s.Frontends {
		number := t.rows[key].token.pool()
		if number == 0 || shared[number] || f.Verdict != model.Forward || t.pools[f.Pool] != nil {
			continue
		}
		if s.Pools[f.Pool].Affinity > 0 {
			if p := t.adoptNamed(number, handles); p != nil {
				t.pools[f.Pool] = p
			}
		} else if list, ok := t.found.slots[number]; ok {
			t.pools[f.Pool] = &pool{number: number, slots: list}
			delete(t.found.slots, number)
		}
	}
	t.dropUnknownHandles()
}

// sharedNumbers are those under which frontends of several pools of s are in the kernel. None of them may
// keep it: until all are told apart, the others would lead to its backends.
func (t *table) sharedNumbers(s *model.State) map[uint32]bool {
	of, shared := map[uint32]model.PoolID{}, map[uint32]bool{}
	for key, f := range s.Frontends {
		number := t.rows[key].token.pool()
		if id, ok := of[number]; ok && id != f.Pool {
			shared[number] = true
		}
		of[number] = f.Pool
	}
	return shared
}

// foundHandles are those that the kernel holds, by the number of their names.
func (t *table) foundHandles() map[uint32][]handle {
	found := map[uint32][]handle{}
	for h := range t.backends {
		found[h.affinity()] = append(found[h.affinity()], h)
	}
	return found
}

// adoptNamed takes over a pool with affinity, or returns nil if what the kernel holds of it is not whole.
func (t *table) adoptNamed(number uint32, found map[uint32][]handle) *pool {
	choices := t.found.choices[number]
	i := slices.IndexFunc(choices, func(h handle) bool { return h != 0 })
	if i < 0 || found[choices[i].affinity()] == nil {
		return nil
	}
	n := &names{number: choices[i].affinity(), indexes: ids{max: maxIndex}, handles: map[netip.AddrPort]handle{}}
	taken := map[uint32]bool{}
	for _, h := range found[n.number] {
		taken[h.index()] = true
		n.handles[t.backends[h]] = h
	}
	n.indexes.reserve(taken)
	var slots []netip.AddrPort
	for _, h := range choices { // 0 is a missing element
		backend := t.backends[h]
		if h != 0 && n.handles[backend] != h {
			return nil // the name is another pool's, or no pool's
		}
		slots = append(slots, backend)
	}
	if !t.FoundSets[memoryName(n.number)] {
		return nil
	}
	delete(found, n.number)
	delete(t.found.choices, number)
	return &pool{number: number, names: n, slots: pack(slots), lasts: time.Second} // setMemory says for how long
}

// dropUnknownHandles makes the handles stale that no pool has taken over.
func (t *table) dropUnknownHandles() {
	known := map[handle]bool{}
	for _, p := range t.pools {
		if p.names != nil {
			for _, h := range p.names.handles {
				known[h] = true
			}
		}
	}
	for h := range t.backends {
		if !known[h] {
			t.stale = append(t.stale, staleHandle{handle: h})
		}
	}
}

func (t *table) setPools(pools iter.Seq2[model.PoolID, model.Pool]) error {
	var errs []error
	for id, pool := range pools {
		if id.V6 == t.Family.V6() {
			errs = append(errs, t.setPool(id, pool))
		}
	}
	return errors.Join(errs...)
}

// setFrontends sets frontends whose pools are set already, and deletes what pools have left.
func (t *table) setFrontends(frontends iter.Seq2[model.Key, model.Frontend]) error {
	var errs []error
	for key, f := range frontends {
		if t.Family.Mine(key.Addr) {
			errs = append(errs, t.setFrontend(key, f))
		}
	}
	t.trim()
	return errors.Join(errs...)
}

// sweep deletes what load found and s does not need. The kernel demands this order: elements that lead to chains, then
// chains, then the sets that their rules name.
func (t *table) sweep() {
	numbers, stickies := map[uint32]bool{}, t.foundStickies()              // of pools that there are not
	keep := map[string]bool{chainLocalnet: true, chainOffload: t.offloads} // the first one until Remove
	for _, p := range t.pools {
		if p.names != nil {
			delete(stickies, p.names.number)
			keep[memoryName(p.names.number)] = p.lasts > 0
		}
	}
	t.Sweep() // what leads to chains before them
	for number, backends := range t.found.slots {
		numbers[number] = true
		for i, backend := range backends.list() {
			t.setSlot(&pool{number: number}, i, backend, netip.AddrPort{})
		}
	}
	for number, handles := range t.found.choices {
		if number&handleBit == 0 {
			numbers[number] = true
		}
		for i, h := range handles {
			if h != 0 {
				t.Element(unix.NFT_MSG_DELSETELEM, choices, slotKey(number, i), nil)
			}
		}
	}
	for number := range numbers {
		t.numbers.give(number)
	}
	for number := range stickies {
		t.deleteMemory(number)
		t.stickies.give(number)
	}
	for s := range t.sizes {
		keep[s.chain()] = true
	}
	_, offloaded := t.Chains[chainOffload]
	t.SweepChains(keep)
	if offloaded && !t.offloads {
		t.DeleteFlowtable(flowtable)
	}
	t.found.slots, t.found.choices = nil, nil
}

// apply makes the steps of a change. The error names the rows that cannot be in force.
func (t *table) apply(s *model.State, c model.Change) error {
	before := t.internals
	if c.Pods != nil {
		if err := t.setPods(s); err != nil {
			return err
		}
	}
	frontends := c.Frontends.Set.All()
	err := errors.Join(t.needLocalnet(frontends), t.setPools(c.Pools.Set.All()), t.setFrontends(frontends))
	if !c.Guards.Empty() {
		t.OwnGuards(s, c.Guards.Keys())
	}
	for _, key := range c.Frontends.Delete {
		if !defect.Is(defect.NFTablesDelete) {
			t.deleteFrontend(key)
		}
	}
	for _, id := range c.Pools.Delete {
		t.deletePool(id)
	}
	if (t.internals > 0) != (before > 0) {
		err = errors.Join(err, t.structure())
	}
	return err
}

// setPods makes the kernel recognise the packets of pods.
func (t *table) setPods(s *model.State) error {
	t.OwnPods(s.Pods)
	return t.structure()
}
