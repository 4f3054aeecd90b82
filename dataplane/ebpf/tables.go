package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// tables are the rows in the kernel: one set of those that the programs know.
type tables struct {
	Maps    map[string]*ebpf.Map
	ids     map[string]ebpf.MapID // by which the kernel calls them
	sets    *sets
	pools   map[model.PoolID]*pool
	udp     map[model.PoolID]bool // pools of UDP frontends, whose members are known to the kernel
	numbers spans                 // of pools
	ranges  spans                 // of slots
	parts   spans                 // of chunks
	turns   map[backendSet]*turns // by which clients choose
	regions regions               // that rows are about
	deleted int                   // rows since regions that no row is about any more were looked for
	entries []objectsPool         // memory of the kernel
	slots   []objectsSlot         // likewise
	chunks  []objectsChunk        // likewise
	unmap   []func()
	counted tally    // what was taken from slots
	unused  []used   // slots that are not in force, but may still count
	walks   walks    // where Audit goes on
	tcp     bool     // sockets of TCP are not to stay with a backend that has left
	packets bool     // programs for packets read them: the members of all pools, pods, and sources
	lost    bool     // a socket may have lost its backend since the plane looked
	node    ownAddrs // by which the node's own sockets are known to be allowed, or not
	sources map[objectsFrontendKey]sourceSet
	loads   *loads // nil: none choose
	fault   func(operation string) error
}

// pool is a model.Pool in the kernel.
type pool struct {
	number, first, count uint32
	turns                *turns // nil: it has no table for clients
	listed               bool   // the kernel knows its members
	byLoad               bool   // of two backends it takes the less loaded one
	backends             []model.Backend
}

// errFull says that rows do not fit into the tables as they are.
var errFull = errors.New("the tables are full")

// newTables makes an empty set of tables, and maps the memory of those that are arrays. No program reads the set before
// putInForce.
func newTables(sets *sets, size capacity, fault func(string) error) (*tables, error) {
	made, err := sets.make(size)
	if err != nil {
		return nil, err
	}
	t := &tables{
		Maps: made, ids: map[string]ebpf.MapID{}, sets: sets, fault: fault,
		pools: map[model.PoolID]*pool{}, udp: map[model.PoolID]bool{}, counted: tally{},
		sources: map[objectsFrontendKey]sourceSet{},
		regions: sets.memory.Regions[sets.next()][:],
		numbers: newSpans(size[objectsMapPools]),
		ranges:  newSpans(size[objectsMapSlots]),
		parts:   newSpans(size[objectsMapChunks]),
		turns:   map[backendSet]*turns{},
	}
	if t.entries, err = mapMemory[objectsPool](t, objectsMapPools); err == nil {
		t.slots, err = mapMemory[objectsSlot](t, objectsMapSlots)
	}
	if err == nil {
		t.chunks, err = mapMemory[objectsChunk](t, objectsMapChunks)
	}
	if err == nil {
		err = t.identify()
	}
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

func (t *tables) identify() error {
	for name, m := range t.Maps {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		t.ids[name], _ = info.ID() // since Linux 4.13
	}
	return nil
}

// mapMemory is an array's memory, as long as the tables are open.
func mapMemory[V any](t *tables, name string) ([]V, error) {
	memory, unmap, err := mapped[V](t.Maps[name])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	t.unmap = append(t.unmap, unmap)
	return memory, nil
}

// mapped is an array's memory. The programs see at once, without a system call, what is written there.
func mapped[V any](m *ebpf.Map) (memory []V, unmap func(), err error) {
	var v V
	size := int(m.MaxEntries()) * int(unsafe.Sizeof(v))
	page := unix.Getpagesize()
	b, err := unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map the memory: %w", err)
	}
	memory = unsafe.Slice((*V)(unsafe.Pointer(&b[0])), m.MaxEntries())
	return memory, func() { _ = unix.Munmap(b) }, nil // it fails only if it is not mapped
}

// publish puts an entry's slots in force, in one word, after all that was written before.
func (t *tables) publish(number, first, count uint32) {
	word := [2]uint32{first, count}
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&t.entries[number])), *(*uint64)(unsafe.Pointer(&word)))
}

// settle makes room of what was given back.
func (t *tables) settle() error {
	if err := t.sets.wait(); err != nil {
		return fmt.Errorf("wait for programs that run: %w", err)
	}
	t.collectUnused()
	t.numbers.settle()
	t.ranges.settle()
	t.parts.settle()
	return nil
}

func (t *tables) close() {
	for _, unmap := range t.unmap {
		unmap()
	}
	closeMaps(t.Maps)
}

// load fills empty tables.
func (t *tables) load(s *model.State) error {
	if t.packets {
		if err := fillPods(t.Maps[packetsMapPods], s.Pods); err != nil {
			return err
		}
	}
	return t.apply(s, s.Whole())
}

// apply performs a change, in an order in which every connection finds its way after each step. Pools come first, then
// the rows that lead to them, and then the pools to which no row leads any more are removed.
func (t *tables) apply(s *model.State, c model.Change) error {
	t.walks.numbers = nil
	w := poolWriter{tables: t}
	if err := w.setAll(s, c); err != nil {
		return err
	}
	forbidden, err := t.allow(s, c)
	if err != nil {
		return err
	}
	if err := t.setFrontends(s, c); err != nil {
		return err
	}
	if err := deleteAll(t, packetsMapSources, forbidden); err != nil {
		return err
	}
	t.tidy(s)
	for _, id := range c.Pools.Delete {
		w.drop(id)
	}
	return deleteAll(t, objectsMapMembers, w.gone)
}

// take takes a range, and has what was given back settle if need be.
func (t *tables) take(s *spans, n uint32) (uint32, error) {
	first, ok := s.take(n)
	if !ok && len(s.discarded) > 0 {
		if err := t.settle(); err != nil {
			return 0, err
		}
		first, ok = s.take(n)
	}
	if !ok {
		return 0, errFull
	}
	return first, nil
}

// batch is how many elements one system call changes.
const batch = 1024

// setFrontends writes what leads to pools, and what else is said of addresses.
func (t *tables) setFrontends(s *model.State, c model.Change) error {
	w := writer{tables: t}
	for key, f := range c.Frontends.Set.All() {
		if !key.Addr.Is6() || !defect.Is(defect.EBPFElement) {
			w.frontend(s, key, f)
		}
	}
	for _, key := range c.Frontends.Delete {
		w.frontend(s, key, model.Frontend{})
	}
	for prefix, verdict := range c.Guards.Set.All() {
		w.guard(prefix, verdict)
	}
	for _, prefix := range c.Guards.Delete {
		w.guard(prefix, model.Pass)
	}
	return w.flush()
}

// writer gathers elements of the table of frontends.
type writer struct {
	*tables
	keys   []objectsFrontendKey
	values []objectsFrontend
	gone   []objectsFrontendKey
	err    error
}

// frontend writes both scopes of a key: that one is f, the other one as s has it.
func (w *writer) frontend(s *model.State, key model.Key, f model.Frontend) {
	w.set(w.value(s, key, f))
}

// value is what the table says of an address, port and protocol. One element holds both scopes, so that a program needs
// one look-up: the row for any client, and the row for the node and its pods, if there is one. So a change of one row
// writes both.
func (t *tables) value(s *model.State, key model.Key, f model.Frontend) objectsFrontend {
	v := objectsFrontend{Key: frontendKey(key)}
	one, other, scope := &v.Any, &v.Internal, model.Internal
	if key.Scope == model.Internal {
		one, other, scope = &v.Internal, &v.Any, model.Any
	}
	*one = t.target(key, f)
	key.Scope = scope
	if f, ok := s.Frontends[key]; ok {
		*other = t.target(key, f)
	}
	return v
}

// target is what becomes of clients; of a Frontend that is not there, nothing.
func (t *tables) target(key model.Key, f model.Frontend) objectsTarget {
	v := objectsTarget{Verdict: uint8(f.Verdict), Flags: flags(f) | t.node.flags(key, f)}
	if f.Verdict == model.Forward {
		v.Pool = t.pools[f.Pool].number
	}
	return v
}

func (w *writer) guard(p netip.Prefix, verdict model.Verdict) {
	switch {
	case p.IsSingleIP():
		v := objectsFrontend{Key: hostKey(p.Addr())}
		v.Any.Verdict = uint8(verdict)
		w.set(v)
	case w.err == nil:
		w.err = w.setGuard(p, verdict)
	}
}

func (t *tables) setGuard(p netip.Prefix, verdict model.Verdict) error {
	if err := t.fault("ebpf guard"); err != nil {
		return err
	}
	m, key := t.Maps[objectsMapGuards], guardKey(p)
	var err error
	if verdict != model.Pass {
		t.regions.add(p)
		err = insist(func() error { return m.Put(key, objectsVerdict(verdict)) })
	} else {
		t.deleted++
		err = ignoreMissing(m.Delete(key))
	}
	if errors.Is(err, unix.ENOSPC) {
		return errFull
	}
	if err != nil {
		return fmt.Errorf("guard %s: %w", p, err)
	}
	return nil
}

// insist tries again if there is no memory: the kernel keeps little at hand for a map that grows, and gets more in the
// background.
func insist(f func() error) error {
	err := f()
	for try := 0; try < 50 && errors.Is(err, unix.ENOMEM); try++ {
		time.Sleep(5 * time.Millisecond)
		err = f()
	}
	return err
}

func (w *writer) set(v objectsFrontend) {
	if v.Any.Verdict == 0 && v.Internal.Verdict == 0 {
		w.gone = append(w.gone, v.Key)
		w.deleted++
	} else {
		w.regions.set(v.Key.Addr)
		w.keys, w.values = append(w.keys, v.Key), append(w.values, v)
	}
	if w.err == nil && len(w.keys)+len(w.gone) == batch {
		w.err = w.flush()
	}
}

func (w *writer) flush() error {
	if w.err == nil {
		w.err = w.update(objectsMapFrontends, w.keys, w.values, len(w.keys))
	}
	if w.err == nil {
		w.err = deleteAll(w.tables, objectsMapFrontends, w.gone)
	}
	w.keys, w.values, w.gone = w.keys[:0], w.values[:0], w.gone[:0]
	return w.err
}

// update writes n elements, which are slices.
func (t *tables) update(table string, keys, values any, n int) error {
	if n == 0 {
		return nil
	}
	if err := t.fault("ebpf update " + table); err != nil {
		return err
	}
	_, err := t.Maps[table].BatchUpdate(keys, values, nil)
	if errors.Is(err, unix.E2BIG) {
		return errFull
	}
	if err != nil {
		return fmt.Errorf("update %d %s: %w", n, table, err)
	}
	return nil
}

// deleteAll deletes elements, those that are there. A batch ends at one that is not there.
func deleteAll[K any](t *tables, table string, keys []K) error {
	if len(keys) == 0 {
		return nil
	}
	if err := t.fault("ebpf delete " + table); err != nil {
		return err
	}
	for len(keys) > 0 {
		n, err := t.Maps[table].BatchDelete(keys, nil)
		if err == nil {
			return nil
		}
		if errors.Is(err, ebpf.ErrNotSupported) { // of tries, before Linux 5.13
			n, err = 0, t.Maps[table].Delete(keys[0])
		}
		if ignoreMissing(err) != nil {
			return fmt.Errorf("delete %d elements: %w", len(keys), err)
		}
		keys = keys[n+1:]
	}
	return nil
}
