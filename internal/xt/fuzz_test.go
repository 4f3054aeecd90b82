package xt

import (
	"encoding/binary"
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzTable reads arbitrary bytes as a table: no panic, bounded memory, and after a change it is one that is read again.
func FuzzTable(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		table := startTable(f, v6)
		f.Add(table.ValidHooks, offsets(table.Hooks), table.raw[Header:])
		if err := table.Apply(fuzzedChange(table)); err != nil {
			f.Fatal(err)
		}
		f.Add(table.ValidHooks, offsets(table.Hooks), table.raw[Header:])
	}
	f.Fuzz(func(t *testing.T, valid uint32, hooks, entries []byte) {
		info := Info{ValidHooks: valid, Size: uint32(len(entries))}
		for h := 0; h < NumHooks && len(hooks) >= 4*(h+1); h++ {
			info.Hooks[h] = binary.NativeEndian.Uint32(hooks[4*h:])
		}
		allocs.Bound(t, 2*len(entries), func() {
			for _, v6 := range []bool{false, true} {
				applyTo(t, v6, info, entries)
			}
		})
	})
}

func offsets(hooks [NumHooks]uint32) (b []byte) {
	for _, h := range hooks {
		b = binary.NativeEndian.AppendUint32(b, h)
	}
	return b
}

// fuzzedChange makes a chain, has PREROUTING lead there instead of wherever, and deletes all other chains of the caller.
func fuzzedChange(table *Table) *Change {
	set, add := NewChain(table.Layout, "KUBE-A"), &Rules{Layout: table.Layout}
	rule(set, 1, "KUBE-A-B")
	rule(add, 2, "KUBE-A")
	c := &Change{Set: map[string]*Rules{"KUBE-A": set, "KUBE-A-B": NewChain(table.Layout, "KUBE-A-B")}}
	c.Add = map[string]*Rules{"PREROUTING": add}
	for _, s := range table.Chains {
		switch {
		case s.Own && c.Set[s.Name] == nil:
			c.Gone = append(c.Gone, s.Name)
		case s.Base:
			for e := range table.Entries(s) {
				if own(e.To) {
					c.Remove = append(c.Remove, Place{s.Name, e.At})
				}
			}
		}
	}
	return c
}

func applyTo(t *testing.T, v6 bool, info Info, entries []byte) {
	table, err := Parse(LayoutOf(v6), info, append(make([]byte, Header), entries...), own)
	if err != nil {
		return
	}
	if !table.sameUpTo(len(entries), entries) {
		t.Error("a table is not the same as itself")
	}
	if err := table.Apply(fuzzedChange(table)); err != nil {
		return
	}
	if _, err := Parse(table.Layout, table.Info, table.raw, own); err != nil {
		t.Errorf("what is made is not read: %v", err)
	}
}
