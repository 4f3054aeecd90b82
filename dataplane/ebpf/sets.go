package ebpf

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/model"
)

// sets are the two sets of tables that the programs know, of which one is in force. They belong to the programs: rows
// change, all of them at once too, and no program has to be verified again.
//
//	newSets ─► load programs ─► make: a set, empty ─► fill ─► putInForce: flip the word, take the old set away
//
// The word is the only thing that is written at that moment; see bpf/maps.h.
type sets struct {
	tables   map[string]*ebpf.Map     // maps of maps, with two places each
	empty    map[string]*ebpf.MapSpec // the specs of the maps in these places
	outcomes *ebpf.Map                // a ring
	word     *ebpf.Map
	memory   *packetsInForce // of the word
	said     uint32          // the last value of the word
	unmap    func()
	at       uint32 // the set in force
	filled   bool   // there is one
	grace
}

// setTables are the tables of which there are two.
func setTables() []string {
	return []string{
		objectsMapChunks, objectsMapFrontends, objectsMapGuards, objectsMapMembers, objectsMapPools, objectsMapSlots,
		packetsMapPods, packetsMapSources,
	}
}

func newSets() (*sets, error) {
	spec, err := withWords(loadPackets())
	if err != nil {
		return nil, err
	}
	s := &sets{tables: map[string]*ebpf.Map{}, empty: map[string]*ebpf.MapSpec{}}
	for _, name := range setTables() {
		if s.tables[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", name, err), s.close())
		}
		s.empty[name] = spec.Maps[name].InnerMap
	}
	if s.outcomes, err = ebpf.NewMap(spec.Maps[objectsMapOutcomes]); err == nil {
		s.word, err = ebpf.NewMap(spec.Maps[inForceTable])
	}
	if err == nil {
		var memory []packetsInForce
		if memory, s.unmap, err = mapped[packetsInForce](s.word); err == nil {
			s.memory = &memory[0]
		}
	}
	if err == nil {
		s.grace, err = newGrace()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// next is the set that is not in force.
func (s *sets) next() uint32 { return s.at ^ uint32(packetsRowsSET) }

func (s *sets) close() error {
	closeMaps(s.tables)
	if s.unmap != nil {
		s.unmap()
	}
	return errors.Join(s.outcomes.Close(), s.word.Close(), s.grace.close()) // nil is closed
}

// replaceIn has programs use these tables, and leaves out of the spec what only describes one set.
func (s *sets) replaceIn(spec *ebpf.CollectionSpec, replacements map[string]*ebpf.Map) {
	for name, m := range s.tables {
		delete(spec.Maps, name+"_set")
		if spec.Maps[name] != nil {
			replacements[name] = m
		}
	}
	replacements[inForceTable], replacements[objectsMapOutcomes] = s.word, s.outcomes
}

// make makes the tables of a set, empty. No program reads them yet.
func (s *sets) make(c capacity) (map[string]*ebpf.Map, error) {
	made := map[string]*ebpf.Map{}
	for name, entries := range c {
		spec := s.empty[name].Copy()
		spec.MaxEntries = entries
		m, err := ebpf.NewMap(spec)
		if err != nil {
			closeMaps(made)
			return nil, fmt.Errorf("%s, for %d elements: %w", name, entries, err)
		}
		made[name] = m
	}
	return made, nil
}

// putInForce has the programs read other tables, and waits until no program reads the old ones. If that fails, one
// of both is in force.
func (s *sets) putInForce(set map[string]*ebpf.Map, pods model.Pods, fault func(string) error) error {
	next := s.next()
	err := fault("ebpf lay ready")
	if err == nil {
		err = s.each(func(name string, places *ebpf.Map) error { return places.Put(next, set[name]) })
	}
	if err != nil {
		return errors.Join(fmt.Errorf("prepare the new tables: %w", err), s.clear(next))
	}
	s.said = next | uint32(podsKnown(pods))
	atomic.StoreUint32(&s.memory.Word, s.said)
	old, filled := s.at, s.filled
	s.at, s.filled = next, true
	if !filled {
		return nil
	}
	if err = fault("ebpf wait"); err == nil {
		err = s.wait()
	}
	if err != nil {
		return fmt.Errorf("wait for programs that run: %w", err)
	}
	if err = fault("ebpf take away"); err == nil {
		err = s.clear(old)
	}
	if err != nil {
		return fmt.Errorf("remove the previous tables: %w", err)
	}
	return nil
}

// clear leaves nothing in the places of a set that is not in force, and that no program reads.
func (s *sets) clear(set uint32) error {
	clear(s.memory.Regions[set][:])
	return s.each(func(_ string, places *ebpf.Map) error { return ignoreMissing(places.Delete(set)) })
}

// each does something with all tables at the same time: for every change the kernel waits for programs that run, and it
// waits for all of them at once.
func (s *sets) each(do func(name string, places *ebpf.Map) error) error {
	var all errgroup.Group
	for name, places := range s.tables {
		all.Go(func() error {
			if err := do(name, places); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	return all.Wait()
}

// podsKnown says for each family whether the rows tell pods from others. A socket in another network namespace
// than the node's then is a pod's: what interface and address it will use is not known before it connects.
func podsKnown(pods model.Pods) (bits packetsRows) {
	for _, prefix := range pods.Prefixes {
		if prefix.Addr().Is6() {
			bits |= packetsRowsPODS_KNOWN_V6
		} else {
			bits |= packetsRowsPODS_KNOWN_V4
		}
	}
	if len(pods.Interfaces) > 0 {
		bits = packetsRowsPODS_KNOWN_V4 | packetsRowsPODS_KNOWN_V6
	}
	return bits
}

// lost are the tables in force that are not those of a set any more, which the kernel calls so.
func (s *sets) lost(set map[string]ebpf.MapID) (names []string) {
	for _, name := range setTables() {
		var have ebpf.MapID
		if err := s.tables[name].Lookup(s.at, &have); err != nil || have != set[name] {
			names = append(names, name)
		}
	}
	if s.filled && atomic.LoadUint32(&s.memory.Word) != s.said {
		names = append(names, inForceTable)
	}
	return names
}
