package iptables

import (
	"cmp"
	"math/bits"
	"slices"
)

// A tree finds the rules for a key among many by few comparisons. It has a chain for each prefix of keys, with a rule
// for each longer one that leads to a chain of its own. In the end there are chains of few rules.
//
//	KUBE-SERVICES ─ -d 10.96.0.0/15 ─► …-15 ─ -d 10.96.64.0/18 ─► … ─► -d 10.96.66.7/32 --dport 80 ─► KUBE-PODS-…
//
// Lengths of prefixes are multiples of stride, so that the chain of a prefix depends on the keys below it
// and on nothing else. It follows that a new key changes the chains above it only.
//
// The kernel takes no way through more than sixteen chains (nf_tables). But a tenant can choose keys that would make
// one as long as a key has prefixes:
//
//	KUBE-SERVICES ─ 8000::/1 ─► … ─ c000::/2 ─► … ─ e000::/3 ─► …
//
// So a prefix whose chain would have too many below it has none. Its rules are in the root's chain.
//
//	height   1      2      3      4         5              6
//	         leaf ◄ … ◄──── … ◄── a chain ◄ no chain ◄──── the root, with the rules of all prefixes without a chain
type tree struct {
	width   int             // bits of a key
	first   int             // bits after which the first prefixes end; then every stride bits
	most    int             // height of a prefix that has a chain
	name    func(at) string // of the chain for a prefix
	prefix  func(at) rule   // that matches its addresses
	heights map[at]int      // of prefixes that lead to others
}

const (
	stride  = 3
	maxLeaf = 8 // rules in a chain without prefixes
	maxHere = 2 // rules that are not worth a chain of their own
	// The longest way has PREROUTING, KUBE-PROXY-IN and KUBE-SERVICES, addresses, KUBE-PORTS and ports, KUBE-ALLOW,
	// KUBE-PODS, three KUBE-PART or KUBE-KNOWN, and KUBE-STICK: sixteen.
	maxAddresses, maxPortRanges = 4, 2
)

// at is a key's first bits.
type at struct {
	key  key
	bits int
}

// key is compared from the highest bit on.
type key struct{ hi, lo uint64 }

func (k key) compare(o key) int { return cmp.Or(cmp.Compare(k.hi, o.hi), cmp.Compare(k.lo, o.lo)) }

// common is how many of the first bits two keys share.
func (k key) common(o key) int {
	if x := k.hi ^ o.hi; x != 0 {
		return bits.LeadingZeros64(x)
	}
	return 64 + bits.LeadingZeros64(k.lo^o.lo)
}

// masked is the key with all but its first n bits cleared.
func (k key) masked(n int) key {
	const all = ^uint64(0) // shifted by 64 and more, it is 0
	return key{k.hi &^ (all >> n), k.lo &^ (all >> max(n-64, 0))}
}

// leaf is a key and the rules for it, of which there is at least one.
type leaf struct {
	key   key
	rules []rule
}

func (l leaf) compare(o leaf) int { return l.key.compare(o.key) }

// boundary is the length of the next longer prefix.
func (t *tree) boundary(bits int) int {
	if bits < t.first {
		return t.first
	}
	return min(t.first+((bits-t.first)/stride+1)*stride, t.width)
}

// floor is the longest prefix that may end at or before a bit.
func (t *tree) floor(bits int) int {
	if bits >= t.width {
		return t.width
	}
	if bits < t.first {
		return 0
	}
	return t.first + (bits-t.first)/stride*stride
}

// walk is one visit to the chains of a tree.
type walk struct {
	*tree
	changed []key // sorted; chains of other keys are visited only if it costs little. nil: all are visited
	former  bool  // it visits what there was, whose heights are forgotten
	emit    func(chain string, rules []rule)
}

// chains emits the chain for the root, and those below it that the changed keys have to do with. It emits the same
// chains before and after the change, but for those that come or go.
func (w *walk) chains(root string, leaves []leaf) {
	rules, _ := w.node(at{}, leaves)
	w.emit(root, rules)
}

// node returns the rules for leaves whose keys have the same first bits, and emits the chains below them. If there are
// few, these are the leaves' rules. Else it goes through the groups that have the next bits in common, too:
//
//	a group of two rules at most ─► its rules, here
//	a larger one ────────────────► one rule for the longest prefix of all its keys ─► a chain for it
//	one that is too high ────────► the rules for that prefix, here
//
// The longest prefix leaves out lengths at which all keys of a group are alike. So no chain has only one rule that
// leads to the next one.
func (w *walk) node(here at, leaves []leaf) (rules []rule, height int) {
	if weight(leaves) <= maxLeaf || here.bits >= w.width {
		return flat(leaves), 1
	}
	next := w.boundary(here.bits)
	for len(leaves) > 0 {
		group := prefixed(leaves, at{leaves[0].key, next})
		leaves = leaves[len(group):]
		if weight(group) <= maxHere {
			rules = append(rules, flat(group)...)
			continue
		}
		below := at{group[0].key, w.floor(group[0].key.common(group[len(group)-1].key))}
		below.key = below.key.masked(below.bits)
		inner, h := []rule(nil), w.heights[below]
		if visit := h == 0 || h > w.most || w.concerns(below, group); visit {
			if inner, h = w.node(below, group); h <= w.most {
				w.emit(w.name(below), inner)
			}
		}
		if height = max(height, h); h > w.most {
			rules = append(rules, inner...)
			continue
		}
		r := w.prefix(below)
		r.do = goes(w.name(below))
		rules = append(rules, r)
	}
	height++
	if w.heights[here] = height; w.former {
		delete(w.heights, here)
	}
	return rules, height
}

// concerns reports whether a chain may not be as it was, or shall be. One without prefixes may be new although
// its keys are not; one with prefixes cannot: the chains that led to its keys had as many, and so prefixes, too.
func (w *walk) concerns(p at, group []leaf) bool {
	if w.changed == nil || weight(group) <= maxLeaf {
		return true
	}
	i, _ := slices.BinarySearchFunc(w.changed, p.key, key.compare)
	return i < len(w.changed) && w.changed[i].masked(p.bits) == p.key
}

// prefixed is how many of the leaves begin as the first one does.
func prefixed(leaves []leaf, p at) []leaf {
	want := p.key.masked(p.bits)
	n, _ := slices.BinarySearchFunc(leaves, want, func(l leaf, want key) int {
		if l.key.masked(p.bits) == want {
			return -1
		}
		return 1
	})
	return leaves[:n]
}

// weight is how many rules there are, as far as it matters.
func weight(leaves []leaf) (n int) {
	for i := 0; i < len(leaves) && n <= maxLeaf; i++ {
		n += len(leaves[i].rules)
	}
	return n
}

func flat(leaves []leaf) []rule {
	n := 0
	for _, l := range leaves {
		n += len(l.rules)
	}
	rules := make([]rule, 0, n)
	for _, l := range leaves {
		rules = append(rules, l.rules...)
	}
	return rules
}

// merge puts what has changed into a sorted list, of which it makes a new one. Leaves without rules go.
func merge(leaves, changed []leaf) []leaf {
	merged := make([]leaf, 0, len(leaves)+len(changed))
	for _, c := range changed {
		i, found := slices.BinarySearchFunc(leaves, c, leaf.compare)
		merged = append(merged, leaves[:i]...)
		leaves = leaves[i:]
		if found {
			leaves = leaves[1:]
		}
		if len(c.rules) > 0 {
			merged = append(merged, c)
		}
	}
	return append(merged, leaves...)
}

func keys(leaves []leaf) (list []key) {
	list = []key{}
	for _, l := range leaves {
		list = append(list, l.key)
	}
	return list
}
