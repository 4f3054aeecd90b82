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
func (p *Plane) isolate(c *change) (errs []error) {
	fresh := &change{table: c.table, set: map[string][]rule{chainTrial: nil}}
	for name := range c.set {
		if !c.known[name] {
			fresh.set[name] = nil
		}
	}
	if err := p.backend.write([]*change{fresh}); err != nil {
		return []error{err}
	}
	t := &trial{backend: p.backend, change: c, bad: map[string][]int{}}
	if err := t.run(); err != nil {
		return []error{err}
	}
	most := t.without()
	errs = append(t.errs, p.halve(most, most.chains(), nil)...)
	if err := p.finishIsolated(c); err != nil {
		errs = append(errs, err)
	}
	return errs
}

// finishIsolated does what comes after the chains. The rules in other people's chains are looked for anew: a part of
// the refused change may have been made, and nothing is where it was.
func (p *Plane) finishIsolated(c *change) error {
	rest := &change{table: c.table, gone: c.gone}
	if len(c.add) > 0 || len(c.remove) > 0 {
		have, err := p.backend.load(c.table)
		if err != nil {
			return err
		}
		rest.baseRules(p.backend, have, true)
		rest.gone = slices.DeleteFunc(slices.Clone(c.gone), func(name string) bool {
			_, ok := have.chains[name]
			return !ok
		})
	}
	return p.backend.write([]*change{rest})
}

// halve writes chains in ever smaller parts, if the kernel does not take them together.
func (p *Plane) halve(c *change, names []string, errs []error) []error {
	if len(names) == 0 {
		return errs
	}
	part := &change{table: c.table, set: map[string][]rule{}, known: map[string]bool{}}
	for _, name := range names {
		part.set[name], part.known[name] = c.set[name], true
	}
	err := p.backend.write([]*change{part})
	half := len(names) / 2
	switch {
	case err == nil:
		return errs
	case !refused(err):
		return append(errs, err)
	case len(errs) >= maxRefusals: // although each of the rules was taken
		return append(errs, fmt.Errorf("gave up %d chains of %s: %w", len(names), c.table, errors.Unwrap(err)))
	case half == 0:
		what := fmt.Sprintf("chain %s of %s (%s)", names[0], c.table, describe(c.set[names[0]]))
		return append(errs, &refusedError{what, errors.Unwrap(err)})
	}
	return p.halve(c, names[half:], p.halve(c, names[:half], errs))
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
		if _, err := t.halve(list, 0); err != nil {
			return err
		}
	}
	slices.SortFunc(t.errs, func(x, y error) int { return cmp.Compare(x.Error(), y.Error()) })
	return t.backend.write([]*change{{table: t.change.table, gone: []string{chainTrial}}})
}

// halve tries rules in ever smaller parts. It returns how many were found that are refused.
func (t *trial) halve(list []suspect, found int) (int, error) {
	err := t.try(list)
	switch {
	case err == nil:
		return found, nil
	case !refused(err):
		return found, err
	case len(list) == 1 || found >= maxRefusals:
		t.blame(list, errors.Unwrap(err))
		return found + 1, nil
	}
	if found, err = t.halve(list[:len(list)/2], found); err != nil {
		return found, err
	}
	return t.halve(list[len(list)/2:], found)
}

func (t *trial) try(list []suspect) error {
	c := &change{table: t.change.table, set: map[string][]rule{}, known: map[string]bool{chainTrial: true}}
	c.set[chainTrial] = rulesOf(list)
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
		what = fmt.Sprintf("some of %d more rules of %s, or all: %s", len(list), t.change.table, describe(rulesOf(list)))
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
