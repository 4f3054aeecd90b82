package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// ReadAhead implements dataplane.Handover.
func (p *Plane) ReadAhead(context.Context) {
	foreign, err := p.ruleset.Foreign()
	if err != nil {
		return
	}
	tx := &nft.Transaction{}
	tx.Early = func() { // so many elements need another counter that their steps are not worth their memory
		tx.Steps, tx.B, foreign = tx.Steps[:0], tx.B[:0], 0
	}
	tables, err := p.read(tx)
	if err == nil && foreign != 0 {
		p.ahead = planned{foreign, tables, tx}
	}
}

// read makes tables that know what the kernel holds.
func (p *Plane) read(tx *nft.Transaction) ([]*table, error) {
	tables := p.newTables(tx)
	for _, t := range tables {
		if err := p.load(t); err != nil {
			return nil, err
		}
	}
	return tables, nil
}

// load reads what the kernel holds in our table. Rows, slots and members are taken over; whether
// they are still wanted is for the caller to find out. A table whose sets or base chains differ from
// ours, because another version made them, is not taken over: t.Foreign is true.
func (p *Plane) load(t *table) error {
	if err := p.config.Inject("nftables list"); err != nil {
		return err
	}
	if err := t.Load(p.ruleset.Socket, t.knownChains()); err != nil || !t.Exists || t.Foreign {
		return err
	}
	t.divide(t.foundShards())
	for i, s := range t.Sets {
		if !t.FoundSets[s.Name] {
			continue
		}
		if err := t.loadSet(p.ruleset.Socket, i); err != nil {
			return fmt.Errorf("list %s: set %s: %w", t, s.Name, err)
		}
		if t.Foreign {
			return nil
		}
	}
	t.reserve()
	return nil
}

// loadSet lists one set. Frontends, slots, choices and backends are decoded; of other sets Find keeps the elements.
func (t *table) loadSet(c *nfnetlink.Socket, i int) (err error) {
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
		return t.List(c, i, reset, func(e nft.Element) {
			if key, ok := nft.DecodeKey(e.Key, scope); ok {
				t.rows[key] = row{token: token(binary.NativeEndian.Uint32(e.Data))}
			}
		})
	case i >= slots:
		all, err := listSlots(t, c, i, func(e nft.Element) netip.AddrPort {
			backend, _ := nft.DecodeBackend(e.Data)
			return backend
		})
		all = slices.DeleteFunc(all, func(s placed[netip.AddrPort]) bool {
			stray := t.shardOf(s.number) != i-slots
			if stray {
				t.Found(i)[string(slotKey(s.number, int(s.index)))] = ""
			}
			return stray
		})
		// A table of a version that had one map is adopted if that takes one transaction of the kernel. In several,
		// tokens would lead to choosers that are not there yet.
		t.Foreign = t.Foreign || len(t.Found(i)) > mostStrays
		maps.Copy(t.found.slots, arrangeFound(t, all, pack))
		return err
	case i == choices:
		all, err := listSlots(t, c, i, func(e nft.Element) handle { return handle(binary.NativeEndian.Uint32(e.Data)) })
		t.found.choices = arrangeFound(t, all, slices.Clone[[]handle])
		return err
	case i == backends:
		return t.List(c, i, func() { clear(t.backends) }, func(e nft.Element) {
			if b, ok := nft.DecodeBackend(e.Data); ok {
				t.backends[handle(binary.NativeEndian.Uint32(e.Key))] = b
			}
		})
	}
	return t.Find(c, i)
}

// placed is an element of a map whose key is the pool's number and an index.
type placed[T any] struct {
	number, index uint32
	data          T
}

// compare orders the lists, and what is in one of them.
func (p placed[T]) compare(o placed[T]) int {
	return cmp.Or(cmp.Compare(p.number, o.number), cmp.Compare(p.index, o.index))
}

// listSlots reads such a map. The kernel lists elements in no order.
func listSlots[T any](t *table, c *nfnetlink.Socket, set int, decode func(nft.Element) T) (all []placed[T], err error) {
	err = t.List(c, set, func() { all = nil }, func(e nft.Element) {
		if len(all) == cap(all) {
			all = slices.Grow(all, len(all)+1) // append leaves four times what it holds as garbage
		}
		all = append(all, placed[T]{binary.NativeEndian.Uint32(e.Key), binary.NativeEndian.Uint32(e.Key[4:]), decode(e)})
	})
	slices.SortFunc(all, placed[T].compare)
	return all, err
}

// arrangeFound makes lists of the elements, one for each pool. If they have more holes than we ever leave, the table is
// not ours: a single element with a great index must not take the memory of a long list.
func arrangeFound[T, L any](t *table, all []placed[T], keep func([]T) L) map[uint32]L {
	found := map[uint32]L{}
	var list []T
	for len(all) > 0 {
		number, count := all[0].number, 1
		for count < len(all) && all[count].number == number {
			count++
		}
		length := int(all[count-1].index) + 1
		if length > mostHoles*count+leastLength {
			t.Foreign = true
			return nil
		}
		list = slices.Grow(list[:0], length)[:length]
		clear(list)
		for _, s := range all[:count] {
			list[s.index] = s.data
		}
		found[number], all = keep(list), all[count:]
	}
	return found
}

const (
	// mostStrays are slots in a map that is not their pool's.
	mostStrays = 1 << 10
	// mostHoles is how many times longer than its elements a list may be that is half made or half deleted.
	mostHoles = 8
	// leastLength is how long it may be in any case.
	leastLength = 64
)

// reserve keeps the numbers found in the kernel from being handed out anew, and counts what is there. A number of a
// pool is in use as soon as a single slot or token has it: a new pool under it would share its backends until sweep.
func (t *table) reserve() {
	pools, stickies := map[uint32]bool{}, t.foundStickies()
	for number := range t.found.slots {
		pools[number] = true
	}
	for number := range t.found.choices {
		if number&handleBit == 0 {
			pools[number] = true
		}
	}
	for key, r := range t.rows {
		t.internals += int(key.Scope)
		if n := r.token.pool(); n != 0 {
			pools[n] = true
		}
	}
	t.numbers.reserve(pools)
	t.stickies.reserve(stickies)
}

// foundStickies are the numbers of names that the kernel holds anything of.
func (t *table) foundStickies() map[uint32]bool {
	found := map[uint32]bool{}
	for number := range t.found.choices {
		if number&handleBit != 0 {
			found[handle(number).affinity()] = true
		}
	}
	for key := range t.Found(memories) {
		found[handle(nft.Number([]byte(key))).affinity()] = true
	}
	for name := range t.FoundSets {
		if n, ok := memoryNumber(name); ok {
			found[n] = true
		}
	}
	for h := range t.backends {
		found[h.affinity()] = true
	}
	return found
}
