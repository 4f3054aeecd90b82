package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// The kernel does not tell which program changes a table, so each Audit reads a part of them. The next Audit goes on
// there. Of some thousand rows, one part is all.
//
//	frontends, members, sources: elements in the kernel's order, each compared with the State; at the end their number
//	pools, slots, chunks: memory, which is the kernel's, one pool after the other
//	guards, pods: few, all of them once in a while

const (
	// This is how long one Audit reads each kind.
	partTime = time.Millisecond / 2
	// readStep is how many elements it reads at least: a tenth of that long.
	readStep = 128
)

// walk is a way through a table that several Audits go together.
type walk[K comparable, V any] struct {
	cursor ebpf.MapBatchCursor
	seen   int
	keys   []K
	values []V
}

// step calls f for the elements that come next, and reports whether there are no more.
func (w *walk[K, V]) step(m *ebpf.Map, f func(K, V)) (end bool, err error) {
	if w.keys == nil {
		w.keys, w.values = make([]K, readStep), make([]V, readStep)
	}
	n, err := m.BatchLookup(&w.cursor, w.keys, w.values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		*w = walk[K, V]{}
		return true, err
	}
	for i := range n {
		f(w.keys[i], w.values[i])
	}
	w.seen += n
	return err != nil, nil
}

// until calls step until the end, or until it is late. If it has come to the end, it returns how many there are: about,
// if rows have changed meanwhile.
func (w *walk[K, V]) until(late time.Time, m *ebpf.Map, f func(K, V)) (seen int, end bool, err error) {
	for {
		end, err = w.step(m, f)
		if err != nil {
			return 0, false, err
		}
		if end {
			seen = w.seen
			w.seen, w.cursor = 0, ebpf.MapBatchCursor{}
			return seen, true, nil
		}
		if time.Now().After(late) {
			return 0, false, nil
		}
	}
}

// walks are what Audit remembers from one time to the next.
type walks struct {
	frontends walk[objectsFrontendKey, objectsFrontend]
	members   walk[objectsMemberKey, objectsMember]
	sources   walk[packetsSourceKey, uint32]
	numbers   []*pool // by their numbers; nil: to be made anew
	rare      int     // Audits until the small tables are looked at
	whole     int     // likewise of sources, by a kernel that reads them only all at once
}

const (
	forever = time.Hour
	// rarely is after how many Audits those of large small tables are looked at.
	rarely = 20
	small  = 200
)

// audit compares a part of the tables with the rows, or all.
func (t *tables) audit(s *model.State, all bool) (drifts []dataplane.Drift, err error) {
	time := partTime
	if all {
		t.walks = walks{}
		time = forever
	}
	for _, audit := range []func(*model.State, budget) ([]dataplane.Drift, error){
		t.auditFrontends, t.auditMembers, t.auditPools, t.auditSmall, t.auditSources,
	} {
		more, err := audit(s, budget{time})
		if err != nil {
			return nil, err
		}
		drifts = append(drifts, more...)
	}
	return drifts, nil
}

// budget is how long to read.
type budget struct{ time time.Duration }

func (b budget) late() time.Time { return time.Now().Add(b.time) }
func (b budget) all() bool       { return b.time == forever }

// due reports whether a table is to be read that has to be read whole: a large one rarely. left is how many Audits pass
// until then.
func (b budget) due(left *int, elements int) bool {
	if *left--; *left > 0 && elements > small && !b.all() {
		return false
	}
	*left = rarely
	return true
}

// auditFrontends finds elements that are not as they should be. If in the end their number is another one, it looks
// for what is missing.
func (t *tables) auditFrontends(s *model.State, b budget) (drifts []dataplane.Drift, err error) {
	seen, end, err := t.walks.frontends.until(b.late(), t.Maps[objectsMapFrontends],
		func(key objectsFrontendKey, have objectsFrontend) {
			want := t.wanted(s, key)
			switch {
			case have != want:
				drifts = append(drifts, t.frontendDrifts(s, key, want, have)...)
			case !t.regions.has(key.Addr):
				drifts = append(drifts, passedBy(key.Addr))
			}
		})
	if err != nil || !end || seen == countKeys(s) && len(drifts) == 0 {
		return drifts, err
	}
	missing, err := t.missingFrontends(s)
	return append(drifts, missing...), err
}

// countKeys is how many elements the table of frontends should have.
func countKeys(s *model.State) int {
	n := len(s.Frontends)
	for key := range s.Frontends {
		if key.Scope == model.Internal {
			key.Scope = model.Any
			if _, both := s.Frontends[key]; both {
				n--
			}
		}
	}
	for prefix := range s.Guards {
		if prefix.IsSingleIP() {
			n++
		}
	}
	return n
}

// wanted is what the rows say of a key; the zero element if they say nothing.
func (t *tables) wanted(s *model.State, at objectsFrontendKey) (v objectsFrontend) {
	key := at.model()
	if key.Port == 0 {
		verdict, ok := s.Guards[netip.PrefixFrom(key.Addr, key.Addr.BitLen())]
		if ok && at == hostKey(key.Addr) {
			v.Key, v.Any.Verdict = at, uint8(verdict)
		}
		return v
	}
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		if f, ok := s.Frontends[key]; ok {
			v = t.value(s, key, f)
		}
	}
	return v
}

// frontendDrifts are the rows of an element that is not as it should be.
func (t *tables) frontendDrifts(s *model.State, at objectsFrontendKey, want, have objectsFrontend) []dataplane.Drift {
	key := at.model()
	if key.Port == 0 {
		verdict := func(v objectsFrontend) string { return model.Verdict(v.Any.Verdict).String() }
		d := dataplane.Drift{Class: "guards", Object: "guard " + host(key.Addr).String(), Have: verdict(have)}
		if want != (objectsFrontend{}) {
			d.Want = verdict(want)
		}
		return []dataplane.Drift{d}
	}
	var drifts []dataplane.Drift
	for scope, same := range []bool{want.Any == have.Any && want.Key == have.Key, want.Internal == have.Internal} {
		key.Scope = model.Scope(scope)
		f, ok := s.Frontends[key]
		if same || !ok && scope == int(model.Internal) && have.Internal.Verdict == 0 {
			continue
		}
		d := dataplane.Drift{Class: "frontends", Object: "frontend " + key.String(), Have: "something else"}
		if ok {
			d.Want = f.String()
		}
		drifts = append(drifts, d)
	}
	return drifts
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// missingFrontends asks for each row.
func (t *tables) missingFrontends(s *model.State) (drifts []dataplane.Drift, err error) {
	var have objectsFrontend
	for key, f := range s.Frontends {
		err := t.Maps[objectsMapFrontends].Lookup(frontendKey(key), &have)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
		if err != nil {
			drifts = append(drifts, dataplane.Drift{Class: "frontends", Object: "frontend " + key.String(), Want: f.String()})
		}
	}
	for prefix, verdict := range s.Guards {
		if !prefix.IsSingleIP() {
			continue
		}
		if err := t.Maps[objectsMapFrontends].Lookup(hostKey(prefix.Addr()), &have); err != nil {
			drifts = append(drifts, dataplane.Drift{Class: "guards", Object: "guard " + prefix.String(), Want: verdict.String()})
		}
	}
	return drifts, nil
}

// auditMembers finds backends that the programs take for others than they are.
func (t *tables) auditMembers(_ *model.State, b budget) (drifts []dataplane.Drift, err error) {
	if t.walks.numbers == nil {
		t.walks.numbers = t.byNumber()
	}
	seen, end, err := t.walks.members.until(b.late(), t.Maps[objectsMapMembers],
		func(key objectsMemberKey, have objectsMember) {
			p, d := t.numbered(key.Pool), dataplane.Drift{Have: "known"}
			backend, ok := p.memberOf(key)
			switch {
			case ok && t.rightly(p, key, have, backend):
				return
			case ok:
				d = dataplane.Drift{Want: "as in its pool", Have: "something else"}
			}
			drifts = append(drifts, memberDrift(t.idOf(p), key.Backend.addrPort(), d))
		})
	if err != nil || !end || len(drifts) > 0 {
		return drifts, err
	}
	for _, p := range t.pools {
		seen -= len(p.members())
	}
	if seen == 0 {
		return nil, nil
	}
	return t.missingMembers()
}

// byNumber are the pools by their numbers.
func (t *tables) byNumber() []*pool {
	last := uint32(0)
	for _, p := range t.pools {
		last = max(last, p.number)
	}
	all := make([]*pool, last+1)
	for _, p := range t.pools {
		all[p.number] = p
	}
	return all
}

// numbered is nil if there is no pool of that number.
func (t *tables) numbered(number uint32) *pool {
	if int(number) >= len(t.walks.numbers) {
		return nil
	}
	return t.walks.numbers[number]
}

// idOf searches for a pool, of which something is to be said.
func (t *tables) idOf(wanted *pool) (none model.PoolID) {
	for id, p := range t.pools {
		if p == wanted {
			return id
		}
	}
	return none
}

func memberDrift(id model.PoolID, backend netip.AddrPort, d dataplane.Drift) dataplane.Drift {
	d.Class, d.Object = "members", fmt.Sprintf("backend %s %s", id, backend)
	return d
}

// memberOf is the backend of a pool, or of none, that an element is about.
func (p *pool) memberOf(key objectsMemberKey) (b model.Backend, ok bool) {
	if p == nil {
		return b, false
	}
	at := key.Backend.addrPort()
	b, ok = model.Pool{Backends: p.members()}.At(at)
	return b, ok && key == p.member(at)
}

// rightly reports whether an element says of a backend what is so: whether it serves, and a slot of the pool's.
func (t *tables) rightly(p *pool, key objectsMemberKey, have objectsMember, b model.Backend) bool {
	if have.Is != membership(b) {
		return false
	}
	if b.Weight == 0 {
		return have.Slot == 0
	}
	if have.Slot < p.first || have.Slot >= p.first+p.count {
		return false
	}
	return t.slots[have.Slot].Backend == key.Backend
}

// missingMembers asks for each.
func (t *tables) missingMembers() (drifts []dataplane.Drift, err error) {
	var have objectsMember
	for id, p := range t.pools {
		for _, b := range p.members() {
			err := t.Maps[objectsMapMembers].Lookup(p.member(b.AddrPort()), &have)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return nil, err
			}
			if err != nil {
				drifts = append(drifts, memberDrift(id, b.AddrPort(), dataplane.Drift{Want: "known to the pool"}))
			}
		}
	}
	return drifts, nil
}

// auditPools compares the slots, in the kernel's memory, of as many pools as there is time for. A map's order is
// another one each time.
func (t *tables) auditPools(s *model.State, b budget) (drifts []dataplane.Drift, err error) {
	late, n := b.late(), 0
	for id, want := range s.Pools {
		p := t.pools[id]
		if (p == nil || !t.holds(p, id, want)) && !defect.Is(defect.EBPFAudit) {
			d := dataplane.Drift{Class: "pools", Object: "pool " + id.String(), Want: fmt.Sprint(want.Serving())}
			if p != nil {
				d.Have = "something else"
			}
			drifts = append(drifts, d)
		}
		if n++; (n%16 == 0 || want.Scheduler != "") && time.Now().After(late) {
			break
		}
	}
	return drifts, nil
}

// holds reports whether the kernel has a pool as it should be.
func (t *tables) holds(p *pool, id model.PoolID, want model.Pool) bool {
	serving := want.Serving()
	if isHashed(want, len(serving)) != (p.turns != nil) {
		return false
	}
	slots := make([]objectsSlot, len(serving))
	spread(slots, serving, p.turns)
	entry := objectsPool{
		First: p.first, Count: uint32(len(slots)), Name: poolName(id), Affinity: seconds(want.Affinity),
		Owner: uint16(ownerOf(id)), ByLoad: word(t.choosesByLoad(want)),
	}
	return t.entries[p.number] == entry && t.turnsHold(p.turns, serving) &&
		slices.EqualFunc(t.slots[p.first:p.first+p.count], slots, sameSlot)
}

// turnsHold reports whether a table by which clients choose is as it should be, if a pool has one.
func (t *tables) turnsHold(p *turns, serving []model.Backend) bool {
	return p == nil || p.set == setOf(serving) &&
		slices.Equal(t.chunks[p.first:p.first+p.chunks], chunksOf(serving))
}

// auditSmall compares the tables of prefixes that are small. Of many guards it does so rarely.
func (t *tables) auditSmall(s *model.State, b budget) (drifts []dataplane.Drift, err error) {
	if !b.due(&t.walks.rare, len(s.Guards)+len(s.Pods.Prefixes)) {
		return nil, nil
	}
	drifts, err = auditPrefixes(t.Maps[objectsMapGuards], t.wantedGuards(s), words[objectsGuardKey, objectsVerdict]{
		"guards", func(k objectsGuardKey) string { return "guard " + k.prefix().String() },
		func(v objectsVerdict) string { return model.Verdict(v).String() },
	})
	for prefix := range s.Guards {
		if !t.regions.has(address(prefix.Addr())) {
			drifts = append(drifts, passedBy(address(prefix.Addr())))
		}
	}
	if err != nil || !t.packets {
		return drifts, err
	}
	more, err := auditPrefixes(t.Maps[packetsMapPods], wantedPods(s), words[objectsGuardKey, uint32]{
		"pods", func(k objectsGuardKey) string { return "pods " + k.prefix().String() }, known,
	})
	return append(drifts, more...), err
}

// auditSources looks for an element that is not as it should be. If there is one, or another number of them, it
// compares all. Before Linux 5.13 the kernel reads no trie in parts, and all of many are compared rarely.
func (t *tables) auditSources(s *model.State, b budget) ([]dataplane.Drift, error) {
	if !t.packets {
		return nil, nil
	}
	wrong, wanted := 0, 0
	for _, keys := range t.sources {
		wanted += len(keys)
	}
	seen, end, err := t.walks.sources.until(b.late(), t.Maps[packetsMapSources], func(key packetsSourceKey, have uint32) {
		if _, ok := t.sources[key.frontend()][key]; !ok || have != 1 {
			wrong++
		}
	})
	switch {
	case errors.Is(err, ebpf.ErrNotSupported):
		if !b.due(&t.walks.whole, wanted) {
			return nil, nil
		}
	case err != nil, wrong == 0 && (!end || seen == wanted):
		return nil, err
	}
	return auditPrefixes(t.Maps[packetsMapSources], t.wantedSources(s), words[packetsSourceKey, uint32]{
		"sources", packetsSourceKey.row, known,
	})
}

// words are those for elements of a table.
type words[K, V any] struct {
	class string
	row   func(K) string
	value func(V) string
}

func known(n uint32) string { return fmt.Sprintf("known (%d)", n) }

// prefix is what the key of a guard, or of pods, says.
func (k objectsGuardKey) prefix() netip.Prefix { return prefixOf(k.Addr, k.Bits) }

func prefixOf(a objectsAddr, bits uint32) netip.Prefix {
	addr := a.addr()
	if addr.Is4() {
		bits -= 96
	}
	return netip.PrefixFrom(addr, int(bits))
}

// row names the frontend, and who may use it.
func (k packetsSourceKey) row() string {
	bits := k.Bits - uint32(8*unsafe.Offsetof(k.Addr)-8*unsafe.Offsetof(k.Frontend))
	return fmt.Sprintf("frontend %s allow %s", k.frontend(), prefixOf(objectsAddr(k.Addr), bits))
}

func (k packetsSourceKey) frontend() objectsFrontendKey {
	return objectsFrontendKey{Addr: objectsAddr(k.Frontend.Addr), Port: k.Frontend.Port, Protocol: k.Frontend.Protocol}
}

func (t *tables) wantedGuards(s *model.State) map[objectsGuardKey]objectsVerdict {
	want := map[objectsGuardKey]objectsVerdict{}
	for prefix, verdict := range s.Guards {
		if !prefix.IsSingleIP() {
			want[guardKey(prefix)] = objectsVerdict(verdict)
		}
	}
	return want
}

func wantedPods(s *model.State) map[objectsGuardKey]uint32 {
	want := map[objectsGuardKey]uint32{}
	for _, prefix := range s.Pods.Prefixes {
		want[guardKey(prefix)] = 1
	}
	return want
}

func (t *tables) wantedSources(s *model.State) map[packetsSourceKey]uint32 {
	want := map[packetsSourceKey]uint32{}
	for at := range t.sources {
		for source := range bothSources(s, at.model()) {
			want[source] = 1
		}
	}
	return want
}

// auditPrefixes compares a table with what is wanted there, of which nothing is left in the end.
func auditPrefixes[K, V comparable](m *ebpf.Map, want map[K]V, words words[K, V]) ([]dataplane.Drift, error) {
	var drifts []dataplane.Drift
	var key K
	var have V
	elements := m.Iterate()
	for elements.Next(&key, &have) {
		wanted, ok := want[key]
		delete(want, key)
		if ok && wanted == have {
			continue
		}
		d := dataplane.Drift{Class: words.class, Object: words.row(key), Have: words.value(have)}
		if ok {
			d.Want = words.value(wanted)
		}
		drifts = append(drifts, d)
	}
	if err := elements.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, err
	}
	for key, wanted := range want {
		d := dataplane.Drift{Class: words.class, Object: words.row(key), Want: words.value(wanted)}
		drifts = append(drifts, d)
	}
	return drifts, nil
}
