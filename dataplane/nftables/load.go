package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// load reads what the kernel holds in our table. Rows, slots and members are taken over; whether
// they are still wanted is for the caller to find out. A table whose sets or base chains differ from
// ours, because another version made them, is not taken over: t.Foreign is true.
func (p *Plane) load(t *table) error {
	if err := p.fault("nftables list"); err != nil {
		return err
	}
	if err := t.Load(p.conn, t.constantChains()); err != nil || !t.Exists || t.Foreign {
		return err
	}
	for i, s := range t.Sets {
		if i == affinity || !t.FoundSets[s.Name] {
			continue
		}
		if err := t.loadSet(p.conn, i); err != nil {
			return fmt.Errorf("list %s: set %s: %w", t, s.Name, err)
		}
		if t.Foreign {
			return nil
		}
	}
	t.reserve()
	return nil
}

func (t *table) loadSet(c *nfnetlink.Socket, i int) error {
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
		return t.List(c, i, reset, func(e nf.Element) {
			if key, ok := nf.DecodeKey(e.Key, scope); ok && len(e.Data) == 4 {
				t.rows[key] = row{token: nf.Token(binary.NativeEndian.Uint32(e.Data)), found: true}
			}
		})
	case i == slots:
		return t.List(c, i, func() { clear(t.found.slots) }, t.foundSlot)
	case i == choices:
		return t.List(c, i, func() { clear(t.found.choices) }, t.foundChoice)
	case i == backends:
		return t.List(c, i, func() { clear(t.backends) }, func(e nf.Element) {
			if b, ok := nf.DecodeBackend(e.Data); ok && len(e.Key) == 4 {
				t.backends[handle(binary.NativeEndian.Uint32(e.Key))] = b
			}
		})
	case i == classes:
		return t.List(c, i, func() { clear(t.found.classes) }, func(e nf.Element) {
			id := nf.Token(binary.NativeEndian.Uint32(append(e.Key, 0, 0, 0, 0))).Class()
			_, twice := t.found.classes[e.Chain]
			t.Foreign = t.Foreign || twice || e.Chain == ""
			t.found.classes[e.Chain] = id
		})
	}
	err := t.Members(c, i, func() { clear(t.members[i]) }, func(key string, _ nf.Element) { t.members[i][key] = 0 })
	if i == pods || i == rejectRanges || i == dropRanges {
		t.spans[i] = slices.Collect(maps.Keys(t.members[i]))
	}
	return err
}

func (t *table) foundSlot(e nf.Element) {
	backend, ok := nf.DecodeBackend(e.Data)
	if !ok || len(e.Key) != 8 {
		return
	}
	t.Foreign = t.Foreign || !place(t.found.slots, e.Key, backend)
}

func (t *table) foundChoice(e nf.Element) {
	if len(e.Key) == 8 && len(e.Data) == 4 {
		t.Foreign = t.Foreign || !place(t.found.choices, e.Key, handle(binary.NativeEndian.Uint32(e.Data)))
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
		if n := r.token.Pool(); n != 0 {
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
