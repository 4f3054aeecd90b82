package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
)

// maxRefusals is how many refused rules of one shape, and how many chains, are told apart. One try costs a write, and
// what a kernel refuses so often, for lack of a module mostly, it refuses for all of them.
const maxRefusals = 16

// chainTrial is where the kernel says what it thinks of rules. Nothing leads there.
const chainTrial = portsPrefix + "TRIAL"

// isolate writes a change that was refused without the rules that are to blame, so that these do not keep others out.
//
//	new chains, empty ─► trial: which rules does the kernel refuse? ─► without them: chains, in halves ─► the rest
//
// The kernel answers for a whole table or transaction, and does not say which rule it means. So the trial puts rules
// into a chain to which nothing leads, and halves them as long as they are refused: all chains in use stay as they are
// meanwhile. New chains come first, so that rules that lead there are not refused for it. Rules of one shape are tried
// together: where the kernel lacks a match or a target, it refuses all of them, and one name stands for all.
//
// The kernel's own chains lead to new ones only after that. So what the refused change should do to them, and to chains
// that go, is still to be done, as it was planned.
func (p *Plane) isolate(c *change) (refusals []error, err error) {
	fresh := newChange(c.table)
	fresh.set[chainTrial] = nil
	for name := range c.set {
		if !c.known[name] {
			fresh.set[name] = nil
		}
	}
	if err := p.backend.write([]*change{fresh}); err != nil {
		return nil, err
	}
	t := &trial{backend: p.backend, change: c, bad: map[string][]int{}}
	if err := t.run(); err != nil {
		return nil, err
	}
	if err := t.writeChains(t.without()); err != nil {
		return nil, err
	}
	err = p.backend.write([]*change{{table: c.table, gone: append(c.gone, chainTrial), add: c.add, remove: c.remove}})
	if refused(err) {
		t.errs, err = append(t.errs, err), nil
	}
	return t.errs, err
}

// halve tries a list. If that is refused, it tries the halves, and so on. It blames each single element that is
// refused, and whole lists once there were too many.
func halve[T any](list []T, found *int, try func([]T) error, blame func([]T, error)) error {
	err := try(list)
	switch {
	case !refused(err):
		return err
	case len(list) == 1 || *found >= maxRefusals:
		*found++
		blame(list, errors.Unwrap(err))
		return nil
	}
	half := len(list) / 2
	if err := halve(list[:half], found, try, blame); err != nil {
		return err
	}
	return halve(list[half:], found, try, blame)
}

// writeChains writes the chains of a change. The kernel may refuse some although it takes each of their rules:
// nf_tables takes at most sixteen chains that lead from one to the next.
func (t *trial) writeChains(c *change) error {
	found := 0
	try := func(names []string) error {
		part := newChange(c.table)
		for _, name := range names {
			part.set[name], part.known[name] = c.set[name], true
		}
		return t.backend.write([]*change{part})
	}
	return halve(c.chains(), &found, try, func(names []string, err error) {
		what := fmt.Sprintf("chain %s of %s (%s)", names[0], c.table, describe(c.set[names[0]]))
		if more := len(names) - 1; more > 0 {
			what += fmt.Sprintf(", or some of %d more", more)
		}
		t.errs = append(t.errs, &refusedError{what, err})
	})
}

// trial finds the rules of a change that the kernel refuses.
type trial struct {
	backend backend
	change  *change
	bad     map[string][]int // their places in their chains
	errs    []error
}

// suspect is a rule of the change.
type suspect struct {
	chain string
	at    int
	rule  rule
}

// run tries rules of the same shape together. Their order is random: where there are so many bad ones that some good
// ones are given up with them, it is the turn of others the next time.
func (t *trial) run() error {
	shapes := map[rule][]suspect{}
	for name, rules := range t.change.set {
		for i, r := range rules {
			shapes[r.shape()] = append(shapes[r.shape()], suspect{name, i, r})
		}
	}
	for _, list := range shapes {
		rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		found := 0
		if err := halve(list, &found, t.try, t.blame); err != nil {
			return err
		}
	}
	slices.SortFunc(t.errs, func(x, y error) int { return cmp.Compare(x.Error(), y.Error()) })
	return nil
}

func (t *trial) try(list []suspect) error {
	c := newChange(t.change.table)
	c.set[chainTrial], c.known[chainTrial] = rulesOf(list), true
	return t.backend.write([]*change{c})
}

func rulesOf(list []suspect) (rules []rule) {
	for _, s := range list {
		rules = append(rules, s.rule)
	}
	return rules
}

func (t *trial) blame(list []suspect, err error) {
	for _, s := range list {
		t.bad[s.chain] = append(t.bad[s.chain], s.at)
	}
	what := fmt.Sprintf("a rule of chain %s of %s: %s", list[0].chain, t.change.table, list[0].rule)
	if len(list) > 1 {
		what = fmt.Sprintf("at least one of %d more rules of %s: %s", len(list), t.change.table, describe(rulesOf(list)))
	}
	t.errs = append(t.errs, &refusedError{what, err})
}

// without is the change without what is refused. A destination without its rule is treated as one without a row. Any
// other chain means something else without one of its rules, and stays as it is.
func (t *trial) without() *change {
	c := *t.change
	c.set = maps.Clone(c.set)
	for name, bad := range t.bad {
		if !dispatches(name) {
			delete(c.set, name)
			continue
		}
		var kept []rule
		for i, r := range c.set[name] {
			if !slices.Contains(bad, i) {
				kept = append(kept, r)
			}
		}
		c.set[name] = kept
	}
	return &c
}

// shape is what remains of a rule without what differs from row to row.
func (r rule) shape() rule {
	r.src, r.dst, r.in, r.chance = netip.Prefix{}, netip.Prefix{}, "", min(r.chance, 1)
	if r.comment != "" {
		r.comment = "…"
	}
	if r.set != "" {
		r.set = setPrefix
	}
	r.ports = ports{min(r.ports.first, 1), min(r.ports.last, 1)}
	r.do = target{verb: r.do.verb, with: r.do.with}
	return r
}
