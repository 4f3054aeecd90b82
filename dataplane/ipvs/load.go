package ipvs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
)

// load reads what the kernel holds in our table. A table whose sets or base chains differ from ours,
// because another version made them, is not taken over: t.foreign is true.
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

// records are the keys of the virtual servers that the table says are ours, whatever else it holds.
func (t *table) records(c *nfnetlink.Socket) (map[string]bool, error) {
	found, s := map[string]bool{}, t.sets[virtualServers]
	if !t.foundSets[s.name] {
		return found, nil
	}
	return found, t.list(c, s, func() { clear(found) }, func(e nf.Element) { found[string(e.Key)] = true })
}

func (t *table) loadElements(c *nfnetlink.Socket) error {
	for i, s := range t.sets {
		if i == affinity || i == clients || !t.foundSets[s.name] {
			continue
		}
		var err error
		if s.interval() && s.flags&setConcat == 0 {
			err = t.loadRanges(c, i)
		} else {
			err = t.loadSet(c, i)
		}
		if err != nil {
			return fmt.Errorf("set %s: %w", s.name, err)
		}
	}
	for key, e := range t.elements[classes] {
		id := token(number([]byte(key))).class()
		t.foundIDs[e.data], t.takenIDs[id] = id, true
	}
	return nil
}

func (t *table) loadSet(c *nfnetlink.Socket, i int) error {
	s, n := t.sets[i], int(t.family.address.size)
	return t.list(c, s, func() { clear(t.elements[i]) }, func(e nf.Element) {
		key, data := string(e.Key), string(e.Data)
		if s.interval() && len(e.KeyEnd) == len(e.Key) {
			key += string(e.KeyEnd[len(e.KeyEnd)-n:])
		}
		if s.verdicts() {
			data = e.Chain
		}
		t.elements[i][key] = &element{data: data}
	})
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
		t.elements[i][s.Encode()] = &element{}
	}
	return err
}
