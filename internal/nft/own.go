package nft

import (
	"iter"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// A plane says which elements each of its rows needs. The Table compares that with what the row needed before and with
// what the kernel was found to hold, and appends the steps between them:
//
//	kernel ─ Find ─► found ─ Own ─► owned by a row ─ Own: the row no longer needs it ─► deleted
//	                   └─ SweepRanges, Sweep: no row of the State needs it ─────────────► deleted
//
// So one function serves the first Sync, which adopts what an earlier process has left, and each change after it.

// Entry is an element of a set, by the set's number in Table.Sets. Key and Data are what Element takes.
type Entry struct {
	Set       int
	Key, Data string
}

// place is where an entry is: a set has one element of a key.
func (e Entry) place() Entry { return Entry{Set: e.Set, Key: e.Key} }

// owned is what a Table knows of the elements that rows need.
type owned struct {
	found   []map[string]string // by set, key to data: what no row has claimed yet
	owners  map[any][]Entry     // by the row's key: what the row needs
	sharers map[Entry]int       // how many rows need an element of a Shared set
	guarded map[netip.Addr]model.Verdict
}

// NewTable makes a table that has nothing in common with the kernel yet, with the exported fields of t.
func NewTable(t Table) Table {
	t.FoundSets, t.Chains = map[string]bool{}, map[string][]string{}
	t.owned = owned{
		found: make([]map[string]string, len(t.Sets)), owners: map[any][]Entry{}, sharers: map[Entry]int{},
		guarded: map[netip.Addr]model.Verdict{},
	}
	for i := range t.found {
		t.found[i] = map[string]string{}
	}
	return t
}

// Add lets the table have one more set, with the next number.
func (t *Table) Add(s *Set) {
	t.Sets, t.found = append(t.Sets, s), append(t.found, map[string]string{})
}

// Find reads the elements that the kernel holds of a set. They go by Sweep, unless a row owns them by then.
func (t *Table) Find(c *nfnetlink.Socket, set int) error {
	found, verdicts := t.found[set], t.Sets[set].Verdicts()
	return t.Members(c, set, func() { clear(found) }, func(key string, e Element) {
		found[key] = string(e.Data)
		if verdicts {
			found[key], t.Foreign = e.Chain, t.Foreign || e.Chain == "" // that is no element of ours
		}
	})
}

// Found is what Find has found of a set: keys with their data.
func (t *Table) Found(set int) map[string]string { return t.found[set] }

// Owns reports whether a row has elements.
func (t *Table) Owns(row any) bool {
	_, ok := t.owners[row]
	return ok
}

// Own has a row need these elements, and no others. Elements are added in their order and deleted in the opposite one,
// so that the last one of a row may lead packets to the others.
func (t *Table) Own(row any, now ...Entry) {
	before := t.owners[row]
	if t.owners[row] = now; len(now) == 0 {
		delete(t.owners, row)
	}
	had, stays := finder(before), finder(now)
	// A range must not overlap one that is in the set: those in the place of which others come go first, and in the same
	// kernel transaction.
	gone := func(first bool) {
		for _, e := range slices.Backward(before) {
			if _, ok := stays(e); !ok && t.makesWay(e, now) == first && t.Release(e) && first {
				t.Tx.Join()
			}
		}
	}
	gone(true)
	for _, e := range now {
		switch data, ok := had(e); {
		case !ok:
			t.Claim(e)
		case data != e.Data:
			t.exchange(e)
		}
	}
	gone(false)
}

// finder finds the data of an entry among others of one row, of which there are mostly few.
func finder(entries []Entry) func(Entry) (string, bool) {
	const few = 8
	if len(entries) <= few {
		return func(e Entry) (data string, ok bool) {
			i := slices.IndexFunc(entries, func(o Entry) bool { return o.Set == e.Set && o.Key == e.Key })
			if i < 0 {
				return "", false
			}
			return entries[i].Data, true
		}
	}
	all := make(map[Entry]string, len(entries))
	for _, e := range entries {
		all[e.place()] = e.Data
	}
	return func(e Entry) (data string, ok bool) {
		data, ok = all[e.place()]
		return data, ok
	}
}

func (t *Table) makesWay(e Entry, now []Entry) bool {
	return t.Sets[e.Set].Interval() && slices.ContainsFunc(now, func(n Entry) bool { return n.Set == e.Set })
}

// Claim has the kernel hold an element for one more row. A caller that notes that itself takes less memory than Own.
func (t *Table) Claim(e Entry) {
	if t.Sets[e.Set].Shared {
		if t.sharers[e]++; t.sharers[e] > 1 {
			return
		}
	}
	data, found := t.found[e.Set][e.Key]
	if found {
		delete(t.found[e.Set], e.Key)
	}
	switch {
	case !found:
		t.step(unix.NFT_MSG_NEWSETELEM, e)
	case data != e.Data:
		t.exchange(e)
	}
}

// Release has the kernel hold an element for one row less.
func (t *Table) Release(e Entry) (deleted bool) {
	if t.Sets[e.Set].Shared {
		if t.sharers[e]--; t.sharers[e] > 0 {
			return false
		}
		delete(t.sharers, e)
	}
	t.step(unix.NFT_MSG_DELSETELEM, e)
	return true
}

// exchange gives an element other data. No packet finds it missing.
func (t *Table) exchange(e Entry) {
	t.step(unix.NFT_MSG_DELSETELEM, e)
	t.Tx.Join()
	t.step(unix.NFT_MSG_NEWSETELEM, e)
}

func (t *Table) step(verb uint16, e Entry) { t.Element(verb, e.Set, []byte(e.Key), []byte(e.Data)) }

// SweepRanges deletes the ranges in the kernel that s does not have, as new ones must not overlap them. It comes before
// the rows own theirs. If a row has come to allow all sources, its ranges stay in the kernel until the row is written.
func (t *Table) SweepRanges(s *model.State) {
	wanted := map[Entry]bool{}
	want := func(all []Entry) {
		for _, e := range all {
			wanted[e] = true
		}
	}
	want(t.guardRanges(s))
	want(t.pods(s.Pods))
	for key, f := range s.Frontends {
		if f.Allow != nil && t.Family.Mine(key.Addr) {
			want(SourcesOf(key, f))
		}
	}
	for set := range t.Sets {
		if !t.Sets[set].Interval() {
			continue
		}
		for key := range t.found[set] {
			e := Entry{Set: set, Key: key}
			if !wanted[e] && !t.isOfUnlimited(e, s) {
				t.drop(e)
				t.Tx.Join()
			}
		}
	}
}

// isOfUnlimited reports whether an element allows a source to reach a frontend that allows all sources.
func (t *Table) isOfUnlimited(e Entry, s *model.State) bool {
	if e.Set != Sources && e.Set != InternalSources {
		return false
	}
	n := len(e.Key) - 2*int(t.Family.Address.size())
	key, ok := DecodeKey([]byte(e.Key[:n]), model.Scope(e.Set-Sources))
	f, exists := s.Frontends[key]
	return ok && exists && f.Allow == nil
}

// Sweep deletes what was found in the kernel and no row owns. It comes after the rows.
func (t *Table) Sweep() {
	for set := range t.found {
		for key := range t.found[set] {
			t.drop(Entry{Set: set, Key: key})
		}
	}
}

func (t *Table) drop(e Entry) {
	t.step(unix.NFT_MSG_DELSETELEM, e)
	delete(t.found[e.Set], e.Key)
}

// Numbers of the sets that the tables of all planes begin with.
const (
	Sources = iota // that may reach a frontend: its key and a range
	InternalSources
	Pods
	RejectAddresses
	DropAddresses
	RejectRanges
	DropRanges
	NumCommon
)

// CommonSets are these sets.
func (f Family) CommonSets() []*Set {
	ranges := func(name string, key ...Field) *Set { return &Set{Name: name, Flags: unix.NFT_SET_INTERVAL, Key: key} }
	source := append(f.FrontendKey(), f.Address)
	return []*Set{
		Sources:         ranges("sources", source...),
		InternalSources: ranges("internal-sources", source...),
		Pods:            ranges("pods", f.Address),
		RejectAddresses: {Name: "reject-addresses", Key: []Field{f.Address}},
		DropAddresses:   {Name: "drop-addresses", Key: []Field{f.Address}},
		RejectRanges:    ranges("reject-ranges", f.Address),
		DropRanges:      ranges("drop-ranges", f.Address),
	}
}

// Rows that stand for all of a kind.
type (
	allRanges struct{}
	allPods   struct{}
)

// SourcesOf are the elements that let sources reach a frontend: its key with their ranges.
func SourcesOf(key model.Key, f model.Frontend) (all []Entry) {
	for _, p := range f.Allow {
		if p.Addr().Is6() == key.Addr.Is6() {
			all = append(all, Entry{Set: Sources + int(key.Scope), Key: string(EncodeKey(key)) + Interval(p)})
		}
	}
	return all
}

// OwnGuards has the kernel hold those guards of s that have changed: single addresses one by one. Of ranges there are
// few, and they may be nested, so they are compared as a whole.
func (t *Table) OwnGuards(s *model.State, changed iter.Seq[netip.Prefix]) {
	ranges := false
	for p := range changed {
		switch {
		case !t.Family.Mine(p.Addr()):
		case p.IsSingleIP():
			t.ownAddress(p.Addr(), s.Guards[p])
		default:
			ranges = true
		}
	}
	if ranges {
		t.Own(allRanges{}, t.guardRanges(s)...)
	}
}

// ownAddress is Own for a guard of one address, of which there may be as many as Services: it takes less memory.
func (t *Table) ownAddress(a netip.Addr, v model.Verdict) {
	was := t.guarded[a]
	if was == v {
		return
	}
	if v != model.Pass {
		t.guarded[a] = v
		t.Claim(addressGuard(a, v))
	} else {
		delete(t.guarded, a)
	}
	if was != model.Pass {
		t.Release(addressGuard(a, was))
	}
}

func addressGuard(a netip.Addr, v model.Verdict) Entry {
	e := Entry{Set: RejectAddresses, Key: string(a.AsSlice())}
	if v == model.Drop {
		e.Set = DropAddresses
	}
	return e
}

func (t *Table) guardRanges(s *model.State) (all []Entry) {
	for v, spans := range Flatten(s.Guards, t.Family) {
		set := RejectRanges
		if v == model.Drop {
			set = DropRanges
		}
		for _, span := range spans {
			all = append(all, Entry{Set: set, Key: span.Encode()})
		}
	}
	return all
}

// OwnPods has the table recognise the packets of pods. Rules do so by their interfaces, for which the caller makes the
// chains anew.
func (t *Table) OwnPods(p model.Pods) {
	t.PodInterfaces = p.Interfaces
	t.Own(allPods{}, t.pods(p)...)
}

func (t *Table) pods(p model.Pods) (all []Entry) {
	for _, prefix := range p.Prefixes {
		if t.Family.Mine(prefix.Addr()) {
			all = append(all, Entry{Set: Pods, Key: Interval(prefix)})
		}
	}
	return all
}
