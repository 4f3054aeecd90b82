package takeover

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// numHooks are prerouting, input, forward, output and postrouting.
const numHooks = 5

var hookNames = [numHooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// xtLayout is where struct ipt_entry or ip6t_entry (include/uapi/linux/netfilter_ip…/ip…_tables.h) has
// its parts, on machines of 64 bits.
type xtLayout struct {
	condition    int // how long the part is that says which addresses and links it regards
	targetOffset int // where the entry says where its target begins, and behind that its size
	counters     int
}

var (
	layoutV4 = xtLayout{condition: 84, targetOffset: 88, counters: 96}
	layoutV6 = xtLayout{condition: 136, targetOffset: 140, counters: 152}
)

// xtDrop is a verdict: those that are not jumps are -NF_… - 1.
const xtDrop = -nfDrop - 1

// Parts of struct xt_entry_target, and what is behind its header of 32 bytes: a verdict, or the name
// of the chain that begins there.
const (
	targetName = 2
	targetData = 32
	nameLength = 29
	xtCounters = 16 // bytes of struct xt_counters
)

// xtBlob is a table of x_tables as the kernel hands it out: entries one after the other, those of a
// built-in chain from its hook to its underflow (the policy), those of other chains behind an entry
// that bears their name. Jumps are offsets. What matches and targets say stays as it is.
type xtBlob struct {
	table      string
	validHooks uint32
	hooks      [numHooks]uint32
	underflows [numHooks]uint32
	entries    []xtEntry
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

func newXTBlob(raw []byte, layout xtLayout, into *xtBlob) error {
	for at := 0; at < len(raw); {
		e, err := parseEntry(raw[at:], layout)
		if err != nil {
			return fmt.Errorf("entry at %d: %w", at, err)
		}
		e.offset = at
		at += len(e.bytes)
		into.entries = append(into.entries, e)
	}
	into.assignChains()
	return nil
}

func parseEntry(raw []byte, layout xtLayout) (xtEntry, error) {
	fixed := layout.counters + xtCounters
	if len(raw) < fixed {
		return xtEntry{}, fmt.Errorf("%d bytes are too few", len(raw))
	}
	target := int(binary.NativeEndian.Uint16(raw[layout.targetOffset:]))
	size := int(binary.NativeEndian.Uint16(raw[layout.targetOffset+2:]))
	if target < fixed || size < target+targetData || size > len(raw) {
		return xtEntry{}, fmt.Errorf("target at %d and size %d of %d bytes make no sense", target, size, len(raw))
	}
	e := xtEntry{bytes: raw[:size], target: target, verdict: -1}
	data := e.bytes[target+targetData:]
	whatever := target == fixed && strings.Trim(string(raw[:layout.condition]), "\x00") == ""
	switch name := cString(e.bytes[target+targetName:][:nameLength]); {
	case name == "ERROR":
		e.head, e.chain = true, cString(data)
	case name == "REJECT":
		e.refusesAll = whatever
	case name == "" && len(data) >= 4:
		e.verdict = int(int32(binary.NativeEndian.Uint32(data)))
		e.refusesAll = whatever && e.verdict == xtDrop
	}
	return e, nil
}

func cString(b []byte) string {
	if end := bytes.IndexByte(b, 0); end >= 0 {
		b = b[:end]
	}
	return string(b)
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
		for h, name := range hookNames {
			if b.validHooks&(1<<h) != 0 && int(b.hooks[h]) == e.offset {
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
	rest := xtRest{newOffset: map[int]int{}}
	for _, j := range p.jumps {
		rest.drop(j.id, len(b.entries))
	}
	for i, e := range b.entries {
		if gone[e.chain] && !e.base {
			rest.drop(i, len(b.entries))
		}
	}
	rest.build(b)
	return rest
}

// xtRest is what is left of a blob.
type xtRest struct {
	dropped   []bool
	newOffset map[int]int // where what began there begins now, or what comes after it
	raw       []byte
	kept      []int // which entries
}

func (r *xtRest) drop(i, n int) {
	if r.dropped == nil {
		r.dropped = make([]bool, n)
	}
	r.dropped[i] = true
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
	r.raw = make([]byte, 0, size)
	for _, i := range r.kept {
		e := b.entries[i]
		at := len(r.raw)
		r.raw = append(r.raw, e.bytes...)
		if e.verdict >= 0 {
			to := r.raw[at+e.target+targetData:]
			binary.NativeEndian.PutUint32(to, uint32(r.newOffset[e.verdict]))
		}
	}
}
