package xt

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"slices"

	"golang.org/x/sys/unix"
)

// Table is a table of x_tables: chain behind chain, and last an entry that ends the table.
type Table struct {
	Info   // as the kernel answers
	Layout // of its entries
	Name   string
	Chains []*Chain
	// Foreign is up to which offset there are entries of chains that are not the caller's, after Apply only these.
	Foreign int

	own      func(chain string) bool // nil: none is
	ordered  bool                    // the caller's chains come last, by their names
	raw      []byte
	byName   map[string]*Chain
	replaces uint32 // how many entries the table in the kernel has
	kept     []int  // for entries, in their order: their numbers in the table in the kernel, or added
}

// added stands for the number of an entry that the table in the kernel does not have.
const added = -1

// Chain is one of a table. One of the kernel's own has its rules and, last, the policy. Any other has a head, which
// says its name, its rules and a return.
type Chain struct {
	Name string
	Base bool // the kernel's own
	Own  bool // the caller's

	offset  int // in the table
	bytes   []byte
	entries int
	first   int // number of the first entry
	jumps   []jump
	kept    []int // of a chain that takes another's place: see Table
	gone    bool
}

// jump is a verdict that is an offset.
type jump struct {
	at    int // where the verdict is in the chain
	to    *Chain
	delta int  // behind the beginning of that
	next  bool // of a rule without a target, which leads to the next one
}

// Entry is one of a chain.
type Entry struct {
	At    int // in the chain
	Bytes []byte
	To    string // the chain to which it jumps, Next, or empty
}

// Next is where a rule without a target leads.
const Next = "."

// headSize is that of the head of a chain.
func (t *Table) headSize(c *Chain) int {
	if c.Base {
		return 0
	}
	return t.size + chainTarget
}

// Parse reads entries, in front of which there is room for a Header.
func Parse(l Layout, info Info, raw []byte, own func(chain string) bool) (*Table, error) {
	t := &Table{Info: info, Layout: l, own: own, raw: raw, replaces: info.Number}
	entries := raw[Header:]
	number := 0
	var current *Chain
	for at := 0; at < len(entries); {
		e, err := t.Layout.entry(entries[at:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d: %w", at, err)
		}
		if next := t.begins(at, e); next != nil {
			current = next
			current.offset, current.first = at, number
			t.Chains = append(t.Chains, current)
		}
		if current == nil {
			return nil, fmt.Errorf("entry at %d belongs to no chain", at)
		}
		current.entries++
		number++
		at += len(e)
		current.bytes = entries[current.offset:at]
	}
	if err := t.checkChains(); err != nil {
		return nil, err
	}
	t.findOrder()
	return t, t.findJumps()
}

// begins is the chain that begins with an entry, or nil.
func (t *Table) begins(at int, e []byte) *Chain {
	for h, name := range HookNames {
		if t.has(h) && int(t.Hooks[h]) == at {
			return &Chain{Name: name, Base: true}
		}
	}
	if name, data := t.TargetName(e); name == errorTarget {
		chain := unix.ByteSliceToString(data)
		return &Chain{Name: chain, Own: t.own != nil && t.own(chain)}
	}
	return nil
}

func (t *Table) has(hook int) bool { return t.ValidHooks&(1<<hook) != 0 }

// checkChains takes the last entry away, the head of a chain ERROR that has no rules, and refuses a table that lacks
// something.
func (t *Table) checkChains() error {
	if len(t.Chains) == 0 {
		return errors.New("there are no entries")
	}
	t.Chains = t.Chains[:len(t.Chains)-1]
	t.byName = make(map[string]*Chain, len(t.Chains))
	for _, c := range t.Chains {
		if t.byName[c.Name] != nil {
			return fmt.Errorf("two chains have the name %s", c.Name)
		}
		if c.Own && c.entries < 2 {
			return fmt.Errorf("chain %s does not end with a return", c.Name)
		}
		t.byName[c.Name] = c
	}
	for h, name := range HookNames {
		if c := t.byName[name]; t.has(h) && (c == nil || !c.Base) {
			return fmt.Errorf("no entry is where chain %s begins, at %d", name, t.Hooks[h])
		}
	}
	return nil
}

// findOrder finds where the entries of others end, and whether the caller's chains follow them by their names. The
// program iptables sorts all chains by their names.
func (t *Table) findOrder() {
	t.ordered = true
	last := "" // of the caller's
	for _, c := range t.Chains {
		if c.Own {
			t.ordered = t.ordered && last < c.Name
			last = c.Name
			continue
		}
		t.ordered = t.ordered && last == ""
		t.Foreign = c.offset + len(c.bytes)
	}
}

// findJumps finds where verdicts lead: to the next entry, or to the beginning of a chain, as programs make them.
func (t *Table) findJumps() error {
	for _, c := range t.Chains {
		for at, e := range t.entries(c) {
			offset, ok := t.Verdict(e)
			if !ok || offset < 0 {
				continue
			}
			i, found := slices.BinarySearchFunc(t.Chains, offset, func(c *Chain, o int) int { return c.offset - o })
			if !found {
				i--
			}
			to := t.Chains[i]
			j := jump{at: at + t.verdictAt(e), to: to, delta: offset - to.offset}
			j.next = to == c && j.delta == at+len(e)
			if !j.next && j.delta != 0 && j.delta != t.headSize(to) {
				return fmt.Errorf("entry at %d jumps to %d, where no chain begins", c.offset+at, offset)
			}
			c.jumps = append(c.jumps, j)
		}
	}
	return nil
}

// entries are those of a chain, by their places in it.
func (t *Table) entries(c *Chain) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		for at := 0; at < len(c.bytes); {
			e := c.bytes[at : at+t.next(c.bytes[at:])]
			if !yield(at, e) {
				return
			}
			at += len(e)
		}
	}
}

// Entries are those of a chain, its head and its end among them.
func (t *Table) Entries(c *Chain) iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		jumps := c.jumps
		for at, e := range t.entries(c) {
			entry := Entry{At: at, Bytes: e}
			if len(jumps) > 0 && jumps[0].at < at+len(e) {
				if entry.To = jumps[0].to.Name; jumps[0].next {
					entry.To = Next
				}
				jumps = jumps[1:]
			}
			if !yield(entry) {
				return
			}
		}
	}
}

// sameUpTo reports whether the entries up to an offset are those of a table that was read.
func (t *Table) sameUpTo(end int, read []byte) bool {
	mine := t.raw[Header:]
	for at := 0; at < end; {
		size := t.next(mine[at:])
		x, y := t.said(mine[at:at+size]), t.said(read[at:at+size])
		if !bytes.Equal(x[0], y[0]) || !bytes.Equal(x[1], y[1]) || !bytes.Equal(x[2], y[2]) {
			return false
		}
		at += size
	}
	return true
}
