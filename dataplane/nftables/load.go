package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// load reads what the kernel holds in our table. Rows, slots and members are taken over; whether
// they are still wanted is for the caller to find out. A table whose sets or base chains differ from
// ours, because another version made them, is not taken over: t.foreign is true.
func (p *Plane) load(t *table) error {
	if err := p.fault("nftables list"); err != nil {
		return err
	}
	steps := []func(*nfnetlink.Socket) error{t.loadTable, t.loadSets, t.loadChains, t.loadRules, t.loadElements}
	for _, step := range steps {
		if err := step(p.conn); err != nil {
			return fmt.Errorf("list table %s %s: %w", t.family.name, t.name, err)
		}
		if !t.exists || t.foreign {
			return nil
		}
	}
	t.reserve()
	return nil
}

// listing asks for objects of one kind in our table. The kernel may list those of others too.
func (t *table) listing(verb uint16, reset func(), each func(attrs []byte)) nfnetlink.Request {
	const own = unix.NFTA_TABLE_NAME // the table's name has this number in all kinds of messages
	r := nfnetlink.Request{Kind: nfnetlink.NFTables | verb, Family: t.family.number, Reset: reset}
	r.Each = func(attrs []byte) {
		if nfnetlink.Text(attrs, own) == t.name {
			each(attrs)
		}
	}
	r.Filter.Text(own, t.name)
	return r
}

func (t *table) loadTable(c *nfnetlink.Socket) error {
	l := t.listing(unix.NFT_MSG_GETTABLE, func() {}, func(attrs []byte) {
		flags := nfnetlink.Attribute(attrs, unix.NFTA_TABLE_FLAGS)
		t.exists = true
		t.foreign = len(flags) == 4 && binary.BigEndian.Uint32(flags) != 0 // dormant, or somebody's own
	})
	l.Filter.B = nil // with a filter the kernel wants to be asked for one table, not for a list
	return c.Dump(l)
}

func (t *table) loadSets(c *nfnetlink.Socket) error {
	reset := func() { clear(t.foundSets) }
	return c.Dump(t.listing(unix.NFT_MSG_GETSET, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_SET_NAME)
		t.foundSets[name] = true
		i := slices.IndexFunc(t.sets, func(s *set) bool { return s.name == name })
		t.foreign = t.foreign || i < 0 || !t.sets[i].is(attrs)
	}))
}

// is reports whether a set that the kernel lists has the form of s.
func (s *set) is(attrs []byte) bool {
	number := func(kind uint16) uint32 {
		if b := nfnetlink.Attribute(attrs, kind); len(b) == 4 {
			return binary.BigEndian.Uint32(b)
		}
		return 0
	}
	return number(unix.NFTA_SET_FLAGS) == s.flags &&
		number(unix.NFTA_SET_KEY_TYPE) == kind(s.key) && number(unix.NFTA_SET_KEY_LEN) == size(s.key) &&
		(s.data == nil || number(unix.NFTA_SET_DATA_TYPE) == kind(s.data) && number(unix.NFTA_SET_DATA_LEN) == size(s.data))
}

func (t *table) loadChains(c *nfnetlink.Socket) error {
	hooks := map[string]*hook{}
	for _, c := range t.constantChains() {
		hooks[c.name] = c.hook
	}
	reset := func() { clear(t.chains) }
	return c.Dump(t.listing(unix.NFT_MSG_GETCHAIN, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME)
		t.chains[name] = nil
		policy := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_POLICY)
		t.foreign = t.foreign || !hooks[name].is(attrs) || len(policy) == 4 && binary.BigEndian.Uint32(policy) != acceptPolicy
	}))
}

// is reports whether a chain that the kernel lists hangs where h says; nil: nowhere.
func (h *hook) is(attrs []byte) bool {
	have := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
	if h == nil || have == nil {
		return h == nil && have == nil
	}
	is := func(attr uint16, want uint32) bool {
		return bytes.Equal(nfnetlink.Attribute(have, attr), binary.BigEndian.AppendUint32(nil, want))
	}
	return nfnetlink.Text(attrs, unix.NFTA_CHAIN_TYPE) == h.kind &&
		is(unix.NFTA_HOOK_HOOKNUM, h.number) && is(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
}

func (t *table) loadRules(c *nfnetlink.Socket) error {
	reset := func() {
		for name := range t.chains {
			t.chains[name] = nil
		}
	}
	return c.Dump(t.listing(unix.NFT_MSG_GETRULE, reset, func(attrs []byte) {
		name := nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
		t.chains[name] = append(t.chains[name], nf.RuleMark(nfnetlink.Attribute(attrs, unix.NFTA_RULE_USERDATA)))
	}))
}

// list calls f for each element of a set.
func (t *table) list(c *nfnetlink.Socket, s *set, reset func(), f func(e nf.Element)) error {
	l := t.listing(unix.NFT_MSG_GETSETELEM, reset, func(attrs []byte) {
		nfnetlink.Attributes(nfnetlink.Attribute(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(_ uint16, data []byte) {
			f(nf.DecodeElement(data))
		})
	})
	l.Filter.Text(unix.NFTA_SET_ELEM_LIST_SET, s.name)
	return c.Dump(l)
}

func (t *table) loadElements(c *nfnetlink.Socket) error {
	for i, s := range t.sets {
		if i == affinity || !t.foundSets[s.name] {
			continue
		}
		if err := t.loadSet(c, i); err != nil {
			return fmt.Errorf("set %s: %w", s.name, err)
		}
	}
	return nil
}

func (t *table) loadSet(c *nfnetlink.Socket, i int) error {
	s := t.sets[i]
	switch {
	case i == frontends || i == internalFrontends:
		scope := model.Scope(i - frontends)
		reset := func() {
			for k := range t.rows {
				if k.Scope == scope {
					delete(t.rows, k)
				}
			}
		}
		return t.list(c, s, reset, func(e nf.Element) {
			if key, ok := nf.DecodeKey(e.Key, scope); ok && len(e.Data) == 4 {
				t.rows[key] = row{token: token(binary.NativeEndian.Uint32(e.Data)), found: true}
			}
		})
	case i == slots:
		return t.list(c, s, func() { clear(t.found.slots) }, t.foundSlot)
	case i == choices:
		return t.list(c, s, func() { clear(t.found.choices) }, t.foundChoice)
	case i == backends:
		return t.list(c, s, func() { clear(t.backends) }, func(e nf.Element) {
			if b, ok := nf.DecodeBackend(e.Data); ok && len(e.Key) == 4 {
				t.backends[handle(binary.NativeEndian.Uint32(e.Key))] = b
			}
		})
	case i == classes:
		return t.list(c, s, func() { clear(t.found.classes) }, func(e nf.Element) {
			id := token(binary.NativeEndian.Uint32(append(e.Key, 0, 0, 0, 0))).class()
			_, twice := t.found.classes[e.Chain]
			t.foreign = t.foreign || twice || e.Chain == ""
			t.found.classes[e.Chain] = id
		})
	case s.interval() && s.flags&setConcat == 0:
		return t.loadRanges(c, i)
	}
	n := t.family.address.size
	return t.list(c, s, func() { clear(t.members[i]) }, func(e nf.Element) {
		key := string(e.Key)
		if s.interval() && len(e.KeyEnd) == len(e.Key) {
			key += string(e.KeyEnd[len(e.KeyEnd)-int(n):])
		}
		t.members[i][key] = 0
	})
}

func (t *table) foundSlot(e nf.Element) {
	backend, ok := nf.DecodeBackend(e.Data)
	if !ok || len(e.Key) != 8 {
		return
	}
	t.foreign = t.foreign || !place(t.found.slots, e.Key, backend)
}

func (t *table) foundChoice(e nf.Element) {
	if len(e.Key) == 8 && len(e.Data) == 4 {
		t.foreign = t.foreign || !place(t.found.choices, e.Key, handle(binary.NativeEndian.Uint32(e.Data)))
	}
}

// place puts the data of a slot, whose key is the pool's number and an index, where it belongs. It
// reports whether we may have made the slot.
func place[T any](found map[uint32][]T, key []byte, data T) bool {
	number, i := binary.NativeEndian.Uint32(key), int(binary.NativeEndian.Uint32(key[4:]))
	if i >= maxIndex+maxSlots {
		return false
	}
	list := found[number]
	if i >= len(list) {
		list = append(list, make([]T, i+1-len(list))...)
	}
	list[i] = data
	found[number] = list
	return true
}

// loadRanges pairs the ends of ranges, which the kernel lists as elements of their own.
func (t *table) loadRanges(c *nfnetlink.Socket, i int) error {
	var edges []nf.Edge
	err := t.list(c, t.sets[i], func() { edges = nil }, func(e nf.Element) {
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			edges = append(edges, nf.Edge{Addr: a, End: e.End})
		}
	})
	for _, s := range nf.Ranges(edges) {
		t.members[i][s.Encode()] = 0
	}
	for key := range t.members[i] {
		t.spans[i] = append(t.spans[i], key)
	}
	return err
}

// reserve keeps the numbers found in the kernel from being handed out anew, and counts what is there.
func (t *table) reserve() {
	pools, classes, stickies := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}
	for number := range t.found.slots {
		pools[number] = true
	}
	for number := range t.found.choices {
		pools[number] = true
	}
	for h := range t.backends {
		stickies[h.sticky()] = true
	}
	for key, r := range t.rows {
		t.internals += int(key.Scope)
		if n := r.token.pool(); n != 0 {
			pools[n] = true
		}
	}
	for _, id := range t.found.classes {
		classes[id] = true
	}
	t.numbers.reserve(pools)
	t.classIDs.reserve(classes)
	t.stickies.reserve(stickies)
}
