package iptables

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// edit gathers what becomes of chains.
type edit struct {
	set  map[string][]rule
	gone map[string]bool
}

func newEdit() *edit { return &edit{map[string][]rule{}, map[string]bool{}} }

// keep is called for what there shall be, leave for what there was: what is kept is not left.
func (e *edit) keep(chain string, rules []rule) { e.set[chain] = rules }
func (e *edit) leave(chain string, _ []rule)    { e.gone[chain] = true }

// drop is leave for a chain that may have been kept before.
func (e *edit) drop(chain string) {
	delete(e.set, chain)
	e.gone[chain] = true
}

// settle returns what is decided.
func (e *edit) settle() *edit {
	maps.DeleteFunc(e.gone, func(c string, _ bool) bool {
		_, kept := e.set[c]
		return kept
	})
	return e
}

// dispatch finds the rule for a destination: by its address in a tree, then, if the address has many
// ports, by protocol and port in another one. Addresses with the same ports and rules share that: the
// NodePorts of a node with several addresses are there once.
type dispatch struct {
	root      string
	addresses tree
	rows      map[netip.Addr]*rows
	leaves    []leaf
	shared    map[netip.Addr]*rows      // trees of ports, by the smallest address that leads there
	heights   map[netip.Addr]map[at]int // of these trees
	via       map[netip.Addr]netip.Addr // whose tree an address with many ports uses
	seed      maphash.Seed
}

// portsPrefix is how the names of chains begin that tell ports apart. There is room for a hash behind it.
const portsPrefix = "KUBE-PORTS-"

// maxPorts is how many ports of an address are told apart along with it.
const maxPorts = 3

// rows are the rules for one address, by protocol and port.
type rows struct {
	leaves []leaf
	sum    uint64 // of all that the leaves say
}

// rowKey is the place of a protocol and port among the rows.
func rowKey(p model.Protocol, port uint16) key { return key{hi: uint64(p)<<56 | uint64(port)<<40} }

func addressKey(a netip.Addr) key {
	if a.Is4() {
		b := a.As4()
		return key{hi: uint64(binary.BigEndian.Uint32(b[:])) << 32}
	}
	b := a.As16()
	return key{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func keyAddress(k key, v6 bool) netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], k.hi)
	binary.BigEndian.PutUint64(b[8:], k.lo)
	if v6 {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[:4]))
}

// addressTree tells addresses apart by a field of a rule.
func addressTree(v6 bool, prefix string, match func(netip.Prefix) rule) tree {
	t := tree{width: 32, first: stride, most: maxAddresses, heights: map[at]int{}}
	if v6 {
		t.width = 128
	}
	span := func(a at) netip.Prefix { return netip.PrefixFrom(keyAddress(a.key, v6), a.bits) }
	t.prefix = func(a at) rule { return match(span(a)) }
	t.name = func(a at) string {
		if v6 {
			return prefix + hashed(span(a).String())
		}
		return fmt.Sprintf("%s%s-%d", prefix, span(a).Addr(), a.bits)
	}
	return t
}

func newDispatch(v6 bool, root, prefix string) *dispatch {
	return &dispatch{
		root:      root,
		addresses: addressTree(v6, prefix, func(p netip.Prefix) rule { return rule{dst: p} }),
		rows:      map[netip.Addr]*rows{},
		shared:    map[netip.Addr]*rows{},
		heights:   map[netip.Addr]map[at]int{},
		via:       map[netip.Addr]netip.Addr{},
		seed:      maphash.MakeSeed(),
	}
}

// dispatches reports whether a chain belongs to a tree: its rules have nothing to do with each other.
func dispatches(chain string) bool {
	switch chain {
	case chainServices, chainInternal, chainGuards, chainHairpin:
		return true
	}
	return hairpins(chain) || begins(chain, "KUBE-IP-", "KUBE-INT-", "KUBE-UP-", portsPrefix)
}

// portTree is the tree of an address with many ports.
func (d *dispatch) portTree(a netip.Addr) (root string, t *tree) {
	id := d.root + " " + a.String()
	root = portsPrefix + hashed(id)
	if d.heights[a] == nil {
		d.heights[a] = map[at]int{}
	}
	t = &tree{width: 24, first: 8, most: maxPortRanges, heights: d.heights[a]}
	t.prefix = func(p at) rule {
		r := rule{protocol: model.Protocol(p.key.hi >> 56)}
		if p.bits > 8 {
			first := uint16(p.key.hi >> 40)
			r.ports = ports{first, first | uint16(1<<(24-p.bits)-1)}
		}
		return r
	}
	t.name = func(p at) string {
		return portsPrefix + hashed(fmt.Sprintf("%s %x %d", id, p.key.hi, p.bits))
	}
	return root, t
}

// change sets the rules of destinations; those without rules go. It returns the addresses' old trees with
// leave and the new ones with keep, as far as they differ.
func (d *dispatch) change(changed map[model.Key][]rule, e *edit) {
	byAddress := map[netip.Addr][]leaf{}
	for k, rules := range changed {
		byAddress[k.Addr] = append(byAddress[k.Addr], leaf{rowKey(k.Protocol, k.Port), rules})
	}
	touched := map[netip.Addr]bool{}
	many := false
	ported := map[netip.Addr][]key{} // which ports of an address changed
	for a, leaves := range byAddress {
		slices.SortFunc(leaves, leaf.compare)
		before := d.rows[a]
		after := before.with(leaves, d.sum)
		many = many || before.many() || after.many()
		touched[a], ported[a], d.rows[a] = true, keys(leaves), after
		if len(after.leaves) == 0 {
			delete(d.rows, a)
		}
	}
	if many {
		d.share(touched, ported, e)
	}
	d.changeAddresses(touched, e)
}

func (r *rows) many() bool { return r != nil && len(r.leaves) > maxPorts }

func (r *rows) with(changed []leaf, sum func(leaf) uint64) *rows {
	after := &rows{}
	var old []leaf
	if r != nil {
		old, after.sum = r.leaves, r.sum
	}
	for _, c := range changed {
		i, found := slices.BinarySearchFunc(old, c, leaf.compare)
		if found {
			after.sum -= sum(old[i])
		}
		if len(c.rules) > 0 {
			after.sum += sum(c)
		}
	}
	after.leaves = merge(old, changed)
	return after
}

func (d *dispatch) sum(l leaf) uint64 { return maphash.String(d.seed, fmt.Sprint(l)) }

// share decides anew which addresses share their trees of ports.
//
// A node with three addresses and a thousand NodePorts has the same thousand rows at each address. They are laid out
// once, under the name of the smallest address, and the rules of all three lead there:
//
//	10.0.0.5 ──┐
//	192.0.2.1 ─┼─► the tree of 10.0.0.5 ─► ports
//	192.0.2.7 ─┘
//
// Addresses belong together if the sums of their rows are equal. A change of one address's rows may take it out of its
// group, or the smallest address may go. Then the tree moves to another name, and the rules that led there change, too.
// So share compares the groups before and after. Where the tree stays, it lays out only the chains of the ports that
// have changed. A tree that comes or goes it lays out as a whole.
func (d *dispatch) share(touched map[netip.Addr]bool, ported map[netip.Addr][]key, e *edit) {
	var big []netip.Addr
	for a, r := range d.rows {
		if r.many() {
			big = append(big, a)
		}
	}
	slices.SortFunc(big, netip.Addr.Compare)
	first := map[uint64]netip.Addr{}
	shared, via := map[netip.Addr]*rows{}, map[netip.Addr]netip.Addr{}
	for _, a := range big {
		sum := d.rows[a].sum
		if _, ok := first[sum]; !ok {
			first[sum], shared[a] = a, d.rows[a]
		}
		via[a] = first[sum]
		if d.via[a] != via[a] {
			touched[a] = true
		}
	}
	for a, before := range d.shared {
		switch after := shared[a]; {
		case after == nil: // nothing of it stays
			d.walkPorts(walk{former: true, emit: e.leave}, a, before)
			delete(d.heights, a)
		case before != after:
			d.walkPorts(walk{changed: ported[a], former: true, emit: e.leave}, a, before)
		}
	}
	for a, after := range shared {
		switch before := d.shared[a]; {
		case before == nil:
			d.walkPorts(walk{emit: e.keep}, a, after)
		case before != after:
			d.walkPorts(walk{changed: ported[a], emit: e.keep}, a, after)
		}
	}
	d.shared, d.via = shared, via
}

func (d *dispatch) walkPorts(w walk, a netip.Addr, r *rows) {
	root, t := d.portTree(a)
	w.tree = t
	w.chains(root, r.leaves)
}

func (d *dispatch) changeAddresses(touched map[netip.Addr]bool, e *edit) {
	var changed []leaf
	for a := range touched {
		changed = append(changed, leaf{addressKey(a), d.addressRules(a)})
	}
	d.leaves = d.addresses.change(d.root, d.leaves, changed, e)
}

// change replaces leaves, and returns those that there are then; those without rules go. It leaves the chains that
// there were, and keeps those that there shall be, as far as they differ.
func (t *tree) change(root string, leaves, changed []leaf, e *edit) []leaf {
	slices.SortFunc(changed, leaf.compare)
	w := walk{tree: t, changed: keys(changed), former: true, emit: e.leave}
	w.chains(root, leaves)
	leaves = merge(leaves, changed)
	w.former, w.emit = false, e.keep
	w.chains(root, leaves)
	return leaves
}

// emit calls f with all chains as they are.
func (d *dispatch) emit(f func(chain string, rules []rule)) {
	(&walk{tree: &d.addresses, emit: f}).chains(d.root, d.leaves)
	for a, r := range d.shared {
		d.walkPorts(walk{emit: f}, a, r)
	}
}

func (d *dispatch) addressRules(a netip.Addr) []rule {
	r := d.rows[a]
	if r == nil {
		return nil
	}
	if r.many() {
		root, _ := d.portTree(d.via[a])
		return []rule{{dst: host(a), do: goes(root)}}
	}
	rules := flat(r.leaves)
	for i := range rules {
		rules[i].dst = host(a)
	}
	return rules
}

// empty reports whether there are no rules at all.
func (d *dispatch) empty() bool { return len(d.leaves) == 0 }
