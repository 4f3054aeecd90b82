package nftables

import (
	"errors"
	"iter"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// syncPools makes the steps from the pools that load found to those of s, with all that rows are made of. The rows
// themselves are as they were.
func (t *table) syncPools(s *model.State) error {
	missing := !t.Exists
	if err := t.structure(); err != nil {
		return err
	}
	if missing {
		if err := t.prepare(s); err != nil {
			return err
		}
	}
	t.recheck = true
	t.adopt(s)
	t.findSources()
	return t.setPools(maps.All(s.Pools))
}

// syncRows makes the steps from the rows that load found to those of s, after syncPools.
func (t *table) syncRows(s *model.State) error {
	frontends := maps.All(s.Frontends)
	errs := []error{t.needLocalnet(frontends), t.setFrontends(s, frontends), t.setPods(s)}
	t.setGuards(s)
	for key := range t.rows {
		if _, ok := s.Frontends[key]; !ok {
			t.deleteFrontend(key)
		}
	}
	errs = append(errs, t.structure()) // which depends on whether there are Internal rows
	t.sweep()
	return errors.Join(errs...)
}

// manySlots is for how many slots it is worth while to make classes that nobody may ever use: the
// kernel walks that many in half a millisecond.
const manySlots = 10_000

// prepare makes the classes of the sizes that pools are likely to have one day. While the maps are
// empty this costs little, see maxSpare.
func (t *table) prepare(s *model.State) error {
	largest := map[class]int{} // for each kind of class, whatever its size
	total := 0
	for key, f := range s.Frontends {
		if t.Family.Mine(key.Addr) && f.Verdict == model.Forward {
			c, n := classOf(key, f, s.Pools[f.Pool]), len(s.Pools[f.Pool].Backends)
			largest[c] = max(largest[c], n)
			total += n
		}
	}
	if total < manySlots {
		return nil
	}
	for c, n := range largest {
		for c.slots = 1; c.slots <= min(2*n, maxSpare/2/len(largest)); c.slots++ {
			if _, err := t.use(c); err != nil {
				return err
			}
			t.classes[c].users--
		}
	}
	return nil
}

// adopt gives the pools of s the numbers under which the kernel holds them, as the tokens of their
// frontends tell.
func (t *table) adopt(s *model.State) {
	shared := t.sharedNumbers(s)
	for key, f := range s.Frontends {
		number := t.rows[key].token.Pool()
		if number == 0 || shared[number] || f.Verdict != model.Forward || t.pools[f.Pool] != nil {
			continue
		}
		if list, ok := t.found.slots[number]; ok && s.Pools[f.Pool].Affinity == 0 {
			t.pools[f.Pool] = &pool{number: number, slots: list}
			delete(t.found.slots, number)
		}
		if list, ok := t.found.choices[number]; ok && s.Pools[f.Pool].Affinity > 0 {
			if p := t.adoptSticky(number, list); p != nil {
				t.pools[f.Pool] = p
				delete(t.found.choices, number)
			}
		}
	}
	t.dropUnknownHandles()
}

// sharedNumbers are those under which frontends of several pools of s are in the kernel. None of them may
// keep it: until all are told apart, the others would lead to its backends.
func (t *table) sharedNumbers(s *model.State) map[uint32]bool {
	of, shared := map[uint32]model.PoolID{}, map[uint32]bool{}
	for key, f := range s.Frontends {
		number := t.rows[key].token.Pool()
		if id, ok := of[number]; ok && id != f.Pool {
			shared[number] = true
		}
		of[number] = f.Pool
	}
	return shared
}

// adoptSticky takes over a pool with affinity, or returns nil if what the kernel holds of it is not whole.
func (t *table) adoptSticky(number uint32, choices []handle) *pool {
	s := &sticky{number: choices[0].sticky(), indexes: ids{max: maxIndex}, handles: map[netip.AddrPort]handle{}}
	taken := map[uint32]bool{}
	for h, b := range t.backends {
		if h.sticky() == s.number {
			taken[h.index()] = true
			s.handles[b] = h
		}
	}
	s.indexes.reserve(taken)
	p := &pool{number: number, sticky: s, slots: make([]netip.AddrPort, len(choices))}
	for i, h := range choices {
		p.slots[i] = t.backends[h]
		if s.handles[p.slots[i]] != h {
			return nil
		}
	}
	return p
}

// dropUnknownHandles makes the handles stale that no pool has taken over.
func (t *table) dropUnknownHandles() {
	numbers, known := map[uint32]bool{}, map[handle]bool{}
	for _, p := range t.pools {
		if p.sticky != nil {
			numbers[p.sticky.number] = true
			for _, h := range p.sticky.handles {
				known[h] = true
			}
		}
	}
	for h := range t.backends {
		if known[h] {
			continue
		}
		t.stale = append(t.stale, staleHandle{handle: h})
		if !numbers[h.sticky()] {
			numbers[h.sticky()] = true
			t.stickies.give(h.sticky())
		}
	}
}

// findSources sorts the allowed sources in the kernel by their frontend, with which they change.
func (t *table) findSources() {
	for scope, i := range []int{sources, internalSources} {
		for element := range t.members[i] {
			n := len(element) - 2*int(4*t.Family.Address.Words())
			if key, ok := nf.DecodeKey([]byte(element[:n]), model.Scope(scope)); ok {
				t.found.sources[key] = append(t.found.sources[key], element)
			}
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
func (t *table) setFrontends(s *model.State, frontends iter.Seq2[model.Key, model.Frontend]) error {
	var errs []error
	for key, f := range frontends {
		if t.Family.Mine(key.Addr) {
			errs = append(errs, t.setFrontend(key, f, s.Pools[f.Pool]))
		}
	}
	t.trim()
	return errors.Join(errs...)
}

// sweep deletes what load found and s does not need.
func (t *table) sweep() {
	for number, backends := range t.found.slots {
		t.deletePoolElements(&pool{number: number, slots: backends})
	}
	for number, handles := range t.found.choices {
		t.deleteChoices(number, handles)
	}
	t.sweepMembers()
	t.sweepClasses()
	keep := map[string]bool{chainLocalnet: true} // until Remove
	for name := range t.found.classes {
		keep[name] = true
	}
	for c := range t.classes {
		keep[c.chain()] = true
	}
	t.SweepChains(keep)
	t.found.slots, t.found.choices = nil, nil
}

func (t *table) deleteChoices(number uint32, handles []handle) {
	for i, h := range handles {
		if h != 0 {
			t.Element(unix.NFT_MSG_DELSETELEM, choices, slotKey(number, i), nil)
		}
	}
	t.numbers.give(number)
}

// apply makes the steps of a change.
func (t *table) apply(s *model.State, c model.Change) error {
	before := t.internals
	if c.Pods != nil {
		if err := t.setPods(s); err != nil {
			return err
		}
	}
	frontends := c.Frontends.Set.All()
	err := errors.Join(t.needLocalnet(frontends), t.setPools(c.Pools.Set.All()), t.setFrontends(s, frontends))
	if err != nil {
		return err
	}
	if !c.Guards.Empty() {
		t.changeGuards(s, c)
	}
	for _, key := range c.Frontends.Delete {
		if !defect.Is(defect.NFTablesDelete) {
			t.deleteFrontend(key)
		}
	}
	for _, id := range c.Pools.Delete {
		t.deletePool(id)
	}
	t.sweepClasses()
	if (t.internals > 0) != (before > 0) {
		return t.structure()
	}
	return nil
}

// setPods makes the kernel recognise the packets of pods.
func (t *table) setPods(s *model.State) error {
	t.PodInterfaces = s.Pods.Interfaces
	var now []string
	for _, p := range s.Pods.Prefixes {
		if t.Family.Mine(p.Addr()) {
			now = append(now, nf.Interval(p))
		}
	}
	t.setSpans(pods, now)
	return t.structure()
}

func (t *table) setGuards(s *model.State) {
	for p, v := range s.Guards {
		if t.Family.Mine(p.Addr()) && p.IsSingleIP() {
			t.setAddress(rejectAddresses, p.Addr(), v == model.Reject)
			t.setAddress(dropAddresses, p.Addr(), v == model.Drop)
		}
	}
	t.setRanges(s)
}

// changeGuards touches single addresses one by one; of ranges there are few, and they may be nested.
func (t *table) changeGuards(s *model.State, c model.Change) {
	ranges := false
	set := func(p netip.Prefix, v model.Verdict) {
		switch {
		case !t.Family.Mine(p.Addr()):
		case p.IsSingleIP():
			t.setAddress(rejectAddresses, p.Addr(), v == model.Reject)
			t.setAddress(dropAddresses, p.Addr(), v == model.Drop)
		default:
			ranges = true
		}
	}
	for p, v := range c.Guards.Set.All() {
		set(p, v)
	}
	for _, p := range c.Guards.Delete {
		set(p, model.Pass)
	}
	if ranges {
		t.setRanges(s)
	}
}

func (t *table) setRanges(s *model.State) {
	spans := nf.Flatten(s.Guards, t.Family)
	for i, v := range map[int]model.Verdict{rejectRanges: model.Reject, dropRanges: model.Drop} {
		var now []string
		for _, s := range spans[v] {
			now = append(now, s.Encode())
		}
		t.setSpans(i, now)
	}
}
