package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// backend is the kernel's side: x_tables proper (legacy), or nf_tables in the form that iptables-nft
// understands.
type backend interface {
	// begin keeps others from changing tables until end is called, if they can be kept from it. The loads and writes
	// from then on belong together.
	begin(ctx context.Context) error
	end()
	// probe has the kernel check rules, as far as it can without their being in force.
	probe(v6 bool) error
	// present are the tables that there are, or may be. To load another one may make it, with its hooks.
	present(v6 bool) ([]string, error)
	// load reads a table. Those of both families may be read side by side.
	load(id tableID) (*content, error)
	// counts calls f for each rule of some chains of ours that counts, with the backend to which it translates, if any.
	counts(id tableID, chains []string, f func(chain string, to netip.AddrPort, packets uint64)) error
	// write changes tables. Rules that stay, or do the same as before, keep what they have counted. It tells apart, by
	// refusedError, what is about the rules in it.
	write(changes []*change) error
	// undisturbed reports whether no other program can have changed the tables since the begin before the last settled.
	undisturbed(tables []tableID) (bool, error)
	settled()
	// Count notes a transaction of this process that is not the back end's.
	Count()
	// asLoaded reports whether the tables are, to the last rule, as they were loaded before.
	asLoaded(tables []tableID) (bool, error)
	// mark is a number that tells rules apart; that of a rule in the kernel as it stands there.
	mark(id tableID, r *rule) uint64
	// use is called with all the ipsets to which rules may refer.
	use(sets setIndexes)
	// tidy deletes what the back end made beside chains and rules of ours, if no other program uses it.
	tidy(id tableID) error
	close() error
}

// tableID names a table of an address family.
type tableID struct {
	v6   bool
	name string
}

func (t tableID) String() string {
	if t.v6 {
		return "ip6tables -t " + t.name
	}
	return "iptables -t " + t.name
}

// content is what concerns us of what a table holds.
type content struct {
	chains map[string][]uint64 // of ours: the marks of their rules
	base   []foundRule         // rules in other people's chains that lead to ours, in their order
}

// foundRule is a rule of a chain that is not ours.
type foundRule struct {
	chain string
	id    uint64 // the back end's name for it
	mark  uint64
	to    string // the chain of ours to which it leads
	// entry: the chain is the kernel's own, and the rule ours. Others' rules may lead from there to KUBE-MARK-MASQ.
	entry bool
}

// change is what shall become of a table.
type change struct {
	table  tableID
	set    map[string][]rule
	known  map[string]bool // of them those that are there already
	gone   []string
	add    []baseRule // the last one comes first in its chain
	remove []foundRule

	// Audit reports these of chains that are set and known: rules that they lack, and how many they have beside.
	lacking map[string][]rule
	beside  map[string]int
}

func (c *change) empty() bool {
	return len(c.set) == 0 && len(c.gone) == 0 && len(c.add) == 0 && len(c.remove) == 0
}

// chains are those that are set; those to which others lead come before them. A large change is written in parts, and
// packets pass what is written already: a rule that leads to a chain without its new rules would lose them.
func (c *change) chains() []string {
	var order []string
	done := map[string]bool{}
	var visit func(name string)
	visit = func(name string) {
		if _, ok := c.set[name]; !ok || done[name] {
			return
		}
		done[name] = true
		for _, r := range c.set[name] {
			if r.do.verb == jump || r.do.verb == goTo {
				visit(r.do.name)
			}
		}
		order = append(order, name)
	}
	for _, name := range slices.Sorted(maps.Keys(c.set)) {
		visit(name)
	}
	return order
}

// wanted are the chains that a table shall hold.
type wanted struct {
	rules map[string][]rule
	known map[string]sum // some of their sums
}

// difference is the change that makes a table hold the chains that are wanted, and no others of ours, and what is
// known of them then. The rules in the kernel's own chains are still to be looked at.
//
// It compares chains by the marks of their rules, because the kernel lists rules in another form than it takes them. A
// chain whose sum is as it was when the chain was last right needs no marks, which take most of the time.
func (w wanted) difference(b backend, id tableID, have *content) (*change, map[string]sum) {
	c, known := newChange(id), make(map[string]sum, len(w.rules))
	for name, rules := range w.rules {
		marks, exists := have.chains[name]
		known[name], c.known[name] = w.known[name], exists
		switch {
		case exists && w.known[name].of(marks):
		case exists && slices.EqualFunc(rules, marks, func(r rule, m uint64) bool { return b.mark(id, &r) == m }):
			known[name] = sumOf(marks)
		default:
			c.set[name] = rules
			if exists {
				c.part(b, name, rules, marks)
			}
		}
	}
	for name, marks := range have.chains {
		if _, ok := w.rules[name]; ok {
			continue
		}
		if !have.leadsTo(name) {
			c.gone = append(c.gone, name)
		} else if len(marks) > 0 {
			c.set[name], c.known[name] = nil, true
		}
	}
	slices.Sort(c.gone)
	return c, known
}

func newChange(id tableID) *change {
	return &change{
		table: id, set: map[string][]rule{}, known: map[string]bool{},
		lacking: map[string][]rule{}, beside: map[string]int{},
	}
}

// part notes which rules a chain lacks, and how many it has beside. It does not look at their order: a rule that
// another program inserts at the top makes one difference, although all rules below it have moved.
func (c *change) part(b backend, chain string, rules []rule, marks []uint64) {
	beside := map[uint64]int{}
	for _, m := range marks {
		beside[m]++
	}
	surplus := len(marks)
	for i := range rules {
		if m := b.mark(c.table, &rules[i]); beside[m] > 0 {
			beside[m]--
			surplus--
		} else {
			c.lacking[chain] = append(c.lacking[chain], rules[i])
		}
	}
	c.beside[chain] = surplus
}

// leadsTo reports whether another program's rule leads to a chain.
func (c *content) leadsTo(chain string) bool {
	return slices.ContainsFunc(c.base, func(f foundRule) bool { return f.to == chain && !f.entry })
}

// baseRules keeps the first of each rule of ours in the kernel's chains, and takes others that lead to chains of ours
// away. It leaves the rules of other programs alone. Without any chain of ours there are none.
func (c *change) baseRules(b backend, have *content, any bool) {
	var wanted []baseRule
	if any {
		wanted = baseRules(c.table.name)
	}
	seen := make([]bool, len(wanted))
	for _, f := range have.base {
		i := slices.IndexFunc(wanted, func(w baseRule) bool {
			return w.chain == f.chain && b.mark(c.table, &w.rule) == f.mark
		})
		switch {
		case i >= 0 && !seen[i]:
			seen[i] = true
		case f.entry:
			c.remove = append(c.remove, f)
		}
	}
	for i, w := range slices.Backward(wanted) {
		if !seen[i] {
			c.add = append(c.add, w)
		}
	}
}

// refusedError is an answer of the kernel that is about what was sent.
type refusedError struct {
	what string
	err  error
}

func (e *refusedError) Error() string { return fmt.Sprintf("the kernel refuses %s: %v", e.what, e.err) }
func (e *refusedError) Unwrap() error { return e.err }

// judged is a refusedError unless the error is about the caller (EPERM), others (EAGAIN) or memory. To leave out rules
// repairs none of these.
func judged(what string, err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("change %s: %w", what, err)
	}
	return &refusedError{what, err}
}

func refused(err error) bool {
	var r *refusedError
	return errors.As(err, &r)
}
