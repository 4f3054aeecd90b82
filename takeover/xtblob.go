package takeover

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/xtables"
)

// xtBlob is a table of x_tables as the kernel hands it out: entries one after the other, those of a
// built-in chain from its hook to its underflow (the policy), those of other chains behind an entry
// that bears their name. Jumps are offsets. What matches and targets say stays as it is.
type xtBlob struct {
	xtables.Info
	entries []xtEntry
}

// xtEntry is a rule, a policy, or the head or end of a chain.
type xtEntry struct {
	offset  int
	bytes   []byte
	target  int    // offset of its target in bytes
	chain   string // that it is in
	base    bool   // that is a built-in one
	head    bool   // it begins the chain
	verdict int    // the offset to jump to; negative: none
	// refusesAll: it drops or rejects whatever comes
	refusesAll bool
}

// readXT reads a table, which must exist.
func readXT(s xtables.Socket, v6 bool, table string) (*xtBlob, error) {
	info, raw, err := s.Read(table)
	if err != nil {
		return nil, err
	}
	return parseXT(info, raw[xtables.Header:], xtables.LayoutOf(v6))
}

func parseXT(info xtables.Info, raw []byte, layout xtables.Layout) (*xtBlob, error) {
	b := &xtBlob{Info: info}
	for at := 0; at < len(raw); {
		e, err := parseEntry(raw[at:], layout)
		if err != nil {
			return nil, fmt.Errorf("read its rules: entry at %d: %w", at, err)
		}
		e.offset = at
		at += len(e.bytes)
		b.entries = append(b.entries, e)
	}
	b.assignChains()
	return b, nil
}

func parseEntry(raw []byte, layout xtables.Layout) (xtEntry, error) {
	entry, err := layout.Entry(raw)
	if err != nil {
		return xtEntry{}, err
	}
	e := xtEntry{bytes: entry, target: layout.Target(entry), verdict: -1}
	whatever := e.target == layout.Size && strings.Trim(string(raw[:layout.Condition]), "\x00") == ""
	switch target, data := layout.TargetName(entry); target {
	case xtables.ErrorTarget:
		e.head, e.chain = true, unix.ByteSliceToString(data)
	case "REJECT":
		e.refusesAll = whatever
	default:
		if verdict, ok := layout.Verdict(entry); ok {
			e.verdict = verdict
			e.refusesAll = whatever && verdict == xtables.Drop
		}
	}
	return e, nil
}

// assignChains tells each entry its chain. The last entry is the head of a chain ERROR that has none.
func (b *xtBlob) assignChains() {
	var chain string
	var base bool
	for i := range b.entries {
		e := &b.entries[i]
		if e.head {
			chain, base = e.chain, false
		}
		for h, name := range xtables.HookNames {
			if b.ValidHooks&(1<<h) != 0 && int(b.Hooks[h]) == e.offset {
				chain, base = name, true
			}
		}
		e.chain, e.base = chain, base
	}
}

// at is the entry that begins at an offset.
func (b *xtBlob) at(offset int) (int, bool) {
	return slices.BinarySearchFunc(b.entries, offset, func(e xtEntry, o int) int { return e.offset - o })
}

func (b *xtBlob) plan(table string, keepForward bool) plan {
	var chains []string
	var jumps []jump
	for i, e := range b.entries {
		if e.head {
			chains = append(chains, e.chain)
		}
		if to := b.destination(e); to != "" {
			jumps = append(jumps, jump{from: e.chain, fromBase: e.base, to: to, id: i})
		}
	}
	return newPlan(table, chains, jumps, keepForward)
}

// destination is the chain that a rule jumps or goes to.
func (b *xtBlob) destination(e xtEntry) string {
	if e.verdict < 0 || e.verdict == e.offset+len(e.bytes) { // the latter is a rule without a target
		return ""
	}
	if to, ok := b.at(e.verdict); ok {
		return b.entries[to].chain
	}
	return ""
}

// forward looks at the chain FORWARD. Its policy is its last rule.
func (b *xtBlob) forward() (f forward) {
	for _, e := range b.entries {
		if e.base && e.chain == forwardHook {
			f.closed = f.closed || e.refusesAll
			f.kube = f.kube || b.destination(e) == forwardChain
		}
	}
	return f
}

// without is the blob that is left, and which of the entries that are.
func (b *xtBlob) without(p plan) xtRest {
	gone := map[string]bool{}
	for _, c := range p.chains {
		gone[c] = true
	}
	rest := xtRest{dropped: make([]bool, len(b.entries)), newOffset: map[int]int{}}
	for _, j := range p.jumps {
		rest.dropped[j.id] = true
	}
	for i, e := range b.entries {
		if gone[e.chain] && !e.base {
			rest.dropped[i] = true
		}
	}
	rest.build(b)
	return rest
}

// xtRest is what is left of a blob.
type xtRest struct {
	dropped   []bool
	newOffset map[int]int // where what began there begins now, or what comes after it
	raw       []byte      // with a header
	kept      []int       // which entries
}

func (r *xtRest) build(b *xtBlob) {
	size := 0
	for i, e := range b.entries {
		r.newOffset[e.offset] = size
		if !r.dropped[i] {
			r.kept = append(r.kept, i)
			size += len(e.bytes)
		}
	}
	r.raw = make([]byte, xtables.Header, xtables.Header+size)
	for _, i := range r.kept {
		e := b.entries[i]
		at := len(r.raw)
		r.raw = append(r.raw, e.bytes...)
		if e.verdict >= 0 {
			to := r.raw[at+e.target+xtables.ExtensionHeader:]
			binary.NativeEndian.PutUint32(to, uint32(r.newOffset[e.verdict]))
		}
	}
}

// replaceXT puts the rest in the table's place. What its rules had counted is added to the new ones.
func replaceXT(s xtables.Socket, table string, old *xtBlob, rest xtRest) error {
	next := xtables.Info{
		ValidHooks: old.ValidHooks, Number: uint32(len(rest.kept)), Size: uint32(len(rest.raw) - xtables.Header),
	}
	for h := range xtables.NumHooks {
		if old.ValidHooks&(1<<h) != 0 {
			next.Hooks[h] = uint32(rest.newOffset[int(old.Hooks[h])])
			next.Underflows[h] = uint32(rest.newOffset[int(old.Underflows[h])])
		}
	}
	counters, err := s.Replace(table, old.Number, next, rest.raw)
	if err != nil {
		return fmt.Errorf("replace it: %w", err)
	}
	return s.AddCounters(table, next.Number, slices.All(rest.kept), counters)
}
