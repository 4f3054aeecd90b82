package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Load reads what the kernel holds in the table, but for elements; the chains are those of Structure. A table whose
// sets or base chains differ from ours, because another version made them, is not taken over: it is Foreign. It may
// have to be emptied.
func (t *Table) Load(c *nfnetlink.Socket, chains []Chain) error {
	for _, step := range []func() error{
		func() error { return t.LoadTable(c) },
		func() error { return t.loadSets(c) },
		func() error { return t.LoadChains(c, chains) },
		func() error { return t.loadRules(c) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("list %s: %w", t, err)
		}
		if !t.Exists {
			return nil
		}
	}
	return nil
}

// Listing asks for objects of one kind in the table. The kernel may list those of others too.
func (t *Table) Listing(verb uint16, reset func(), each func(attrs []byte)) nfnetlink.Request {
	const own = unix.NFTA_TABLE_NAME // the table's name has this number in all kinds of messages
	r := nfnetlink.Request{Kind: nfnetlink.NFTables | verb, Family: t.Family.Number, Reset: reset}
	r.Each = func(attrs []byte) {
		name := bytes.TrimSuffix(nfnetlink.Attribute(attrs, own), []byte{0})
		if string(name) == t.Name { // which takes no memory
			each(attrs)
		}
	}
	r.Filter.Text(own, t.Name)
	return r
}

// LoadTable finds out whether the table exists.
func (t *Table) LoadTable(c *nfnetlink.Socket) error {
	l := t.Listing(unix.NFT_MSG_GETTABLE, func() {}, func(attrs []byte) {
		t.Exists = true
		t.Foreign = nfnetlink.Uint32(attrs, unix.NFTA_TABLE_FLAGS) != 0 // dormant, or owned by another process
	})
	l.Filter.B = nil // with a filter the kernel wants to be asked for one table, not for a list
	return c.Dump(l)
}

func (t *Table) loadSets(c *nfnetlink.Socket) error {
	reset := func() { clear(t.FoundSets) }
	return c.Dump(t.Listing(unix.NFT_MSG_GETSET, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_SET_NAME)
		t.FoundSets[name] = true
		s := t.set(name)
		t.Foreign = t.Foreign || s == nil || !s.is(attrs)
	}))
}

// set is the form of a set by its name; nil: there is none of the name.
func (t *Table) set(name string) *Set {
	if i := slices.IndexFunc(t.Sets, func(s *Set) bool { return s.Name == name }); i >= 0 {
		return t.Sets[i]
	}
	if t.Form != nil {
		return t.Form(name)
	}
	return nil
}

// Finds reports whether the kernel has one of the sets, in its form, whatever else is in the table.
func (t *Table) Finds(c *nfnetlink.Socket, set int) (found bool, err error) {
	s := t.Sets[set]
	err = c.Dump(t.Listing(unix.NFT_MSG_GETSET, func() { found = false }, func(attrs []byte) {
		found = found || nfnetlink.Text(attrs, unix.NFTA_SET_NAME) == s.Name && s.is(attrs)
	}))
	return found, err
}

// is reports whether a set that the kernel lists has the form of s.
func (s *Set) is(attrs []byte) bool {
	is := func(attr uint16, want uint32) bool { return nfnetlink.Uint32(attrs, attr) == want }
	return is(unix.NFTA_SET_FLAGS, s.Flags) &&
		is(unix.NFTA_SET_KEY_TYPE, s.kind()) && is(unix.NFTA_SET_KEY_LEN, size(s.Key)) &&
		(s.Data == nil || is(unix.NFTA_SET_DATA_TYPE, kind(s.Data)) && is(unix.NFTA_SET_DATA_LEN, size(s.Data)))
}

// LoadChains reads which chains there are.
func (t *Table) LoadChains(c *nfnetlink.Socket, chains []Chain) error {
	hooks := map[string]*Hook{}
	for _, c := range chains {
		hooks[c.Name] = c.Hook
	}
	reset := func() { clear(t.Chains) }
	return c.Dump(t.Listing(unix.NFT_MSG_GETCHAIN, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME)
		t.Chains[name] = nil
		policy := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_POLICY)
		t.Foreign = t.Foreign || !hooks[name].is(attrs) || len(policy) == 4 && binary.BigEndian.Uint32(policy) != acceptPolicy
	}))
}

// is reports whether a chain that the kernel lists hangs where h says; nil: nowhere.
func (h *Hook) is(attrs []byte) bool {
	have := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
	if h == nil || have == nil {
		return h == nil && have == nil
	}
	is := func(attr uint16, want uint32) bool {
		return bytes.Equal(nfnetlink.Attribute(have, attr), binary.BigEndian.AppendUint32(nil, want))
	}
	return nfnetlink.Text(attrs, unix.NFTA_CHAIN_TYPE) == h.Kind &&
		is(unix.NFTA_HOOK_HOOKNUM, h.Number) && is(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
}

func (t *Table) loadRules(c *nfnetlink.Socket) error {
	reset := func() {
		for name := range t.Chains {
			t.Chains[name] = nil
		}
	}
	return c.Dump(t.Listing(unix.NFT_MSG_GETRULE, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
		t.Chains[name] = append(t.Chains[name], string(RuleMark(attrs)))
	}))
}

// List calls f for each element of a set as the kernel lists it, and reset when it lists from the start. Keys and data
// have the lengths that the set has for them; what is listed of a set in another form is left out.
//
// Elements with a counter that should have none, or the other way round, are exchanged.
func (t *Table) List(c *nfnetlink.Socket, set int, reset func(), f func(Element)) error {
	s := t.Sets[set]
	var others []Element
	err := t.ListOf(c, s, func() { others = nil; reset() }, s.miscounted(&others, f))
	if err == nil {
		t.recount(set, others)
	}
	return err
}

// miscounted calls f, and notes elements with a counter that should have none, or the other way round.
func (s *Set) miscounted(all *[]Element, f func(Element)) func(Element) {
	if s.Counts == nil {
		return f
	}
	return func(e Element) {
		if f(e); e.Counts != s.Counts(e.Data) {
			*all = append(*all, Element{Key: slices.Clone(e.Key), Data: slices.Clone(e.Data)})
		}
	}
}

// ListOf is List for any set.
func (t *Table) ListOf(c *nfnetlink.Socket, s *Set, reset func(), f func(Element)) error {
	var seen order
	restart := func() {
		seen = order{seed: maphash.MakeSeed(), places: map[uint64]int{}}
		reset()
	}
	l := t.elements(s, restart, func(e Element) {
		seen.add(s, e.Key)
		f(e)
	})
	l.Torn = func() bool { return seen.changed }
	err := c.Dump(l)
	if seen.changed && s.filledByPackets() && errors.Is(err, nfnetlink.ErrInterrupted) {
		return nil // very many new clients have shifted the list; it lacks none of the others
	}
	return err
}

// elements asks for those of a set.
func (t *Table) elements(s *Set, reset func(), f func(Element)) nfnetlink.Request {
	l := t.Listing(unix.NFT_MSG_GETSETELEM, reset, func(attrs []byte) {
		nfnetlink.Attributes(nfnetlink.Attribute(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(_ uint16, data []byte) {
			if e := decodeElement(data); s.fits(e) {
				f(e)
			}
		})
	})
	l.Filter.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name)
	return l
}

// filledByPackets reports whether rules add elements.
func (s *Set) filledByPackets() bool { return s.Flags&unix.NFT_SET_EVAL != 0 }

// order finds out whether the kernel changed the order of a set's elements while it listed them.
//
// The kernel lists a set in several messages. For each one it walks the set from the start and leaves out as many
// elements as it has listed (net/netfilter/nft_set_hash.c, nft_rhash_walk). A hash table that grows between two
// messages has another order afterwards: some elements are listed twice, as many never, and no flag says so.
type order struct {
	seed    maphash.Seed
	places  map[uint64]int // by hash of the key; two keys with the same hash only cost a second listing
	changed bool
}

// maxShift is how many elements packets may add between two messages. The kernel then lists its last ones again, and
// leaves none out.
const maxShift = 64

func (o *order) add(s *Set, key []byte) {
	if s.Interval() { // kept in a tree, whose order stays; one key may end a range and begin another
		return
	}
	place, id := len(o.places), maphash.Bytes(o.seed, key)
	before, twice := o.places[id]
	byPacket := s.filledByPackets() && place-before <= maxShift
	o.changed = o.changed || twice && !byPacket
	o.places[id] = place
}

// fits reports whether an element can be one of the set.
func (s *Set) fits(e Element) bool {
	return len(e.Key) == int(size(s.Key)) && (s.Data == nil || len(e.Data) == int(size(s.Data)))
}

// Members does the same, with the keys that Element takes.
func (t *Table) Members(c *nfnetlink.Socket, set int, reset func(), f func(key string, e Element)) error {
	if t.Sets[set].Interval() {
		reset()
		return t.ranges(c, set, f)
	}
	return t.List(c, set, reset, func(e Element) { f(string(e.Key), e) })
}

// ranges pairs the ends of ranges, which the kernel lists as elements of their own and in no order:
//
//	10.0.0.0   10.0.1.0 end   10.0.1.0   10.0.2.0 end  ─►  10.0.0.0-10.0.0.255, 10.0.1.0-10.0.1.255
func (t *Table) ranges(c *nfnetlink.Socket, set int, f func(key string, e Element)) error {
	type edge struct {
		key []byte
		end bool
	}
	var edges []edge
	err := t.List(c, set, func() { edges = nil }, func(e Element) {
		edges = append(edges, edge{slices.Clone(e.Key), e.End})
	})
	slices.SortFunc(edges, func(a, b edge) int {
		if c := bytes.Compare(a.key, b.key); c != 0 || a.end == b.end {
			return c
		} else if a.end { // a range ends before the next one starts at the same key
			return -1
		}
		return 1
	})
	n := int(t.Family.Address.size())
	for i, e := range edges {
		if e.end {
			continue
		}
		last := bytes.Repeat([]byte{0xff}, n) // where there is no end
		if i+1 < len(edges) {
			last = before(edges[i+1].key)
		}
		f(string(e.key)+string(last[len(last)-n:]), Element{})
	}
	return err
}
