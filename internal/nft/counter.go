package nft

import (
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// Elements and rules may have a counter of the kernel's. It counts the packets that look an element up or pass a rule.
// An element keeps its counter for as long as it is in its set, and a rule as long as its chain has the same rules.

// elementExpressions is NFTA_SET_ELEM_EXPRESSIONS, which x/sys/unix lacks.
const elementExpressions = 11

// Counter counts the packets that come so far in a rule.
func Counter() any { return &expr.Counter{} }

// counterName is that of the expression.
const counterName = "counter"

// CountIn finds the first counter in a list of expressions.
func CountIn(expressions []byte) (n dataplane.Traffic, ok bool) {
	nfnetlink.Attributes(expressions, func(_ uint16, e []byte) {
		if more, is := countOf(e); is && !ok {
			n, ok = more, true
		}
	})
	return n, ok
}

// countOf reads an expression that is a counter.
func countOf(expression []byte) (n dataplane.Traffic, ok bool) {
	if nfnetlink.Text(expression, unix.NFTA_EXPR_NAME) != counterName {
		return n, false
	}
	data := nfnetlink.Attribute(expression, unix.NFTA_EXPR_DATA)
	n.Packets = nfnetlink.Uint64(data, unix.NFTA_COUNTER_PACKETS)
	n.Bytes = nfnetlink.Uint64(data, unix.NFTA_COUNTER_BYTES)
	return n, true
}

// RuleCounts lists what the rules of a chain that have a counter have counted, in their order.
func (t *Table) RuleCounts(c *nfnetlink.Socket, chain string) (all []dataplane.Traffic, err error) {
	l := t.Listing(unix.NFT_MSG_GETRULE, func() { all = nil }, func(attrs []byte) {
		if nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN) != chain {
			return
		}
		if n, ok := CountIn(nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)); ok {
			all = append(all, n)
		}
	})
	l.Filter.Text(unix.NFTA_RULE_CHAIN, chain)
	if err := c.Dump(l); err != nil {
		return nil, fmt.Errorf("list %s: chain %s: %w", t, chain, err)
	}
	return all, nil
}

// counter gives the element of a step a counter that begins at 0.
func (t *Table) counter() {
	e := t.Tx.Open(unix.NFTA_SET_ELEM_EXPR)
	t.Tx.Text(unix.NFTA_EXPR_NAME, counterName)
	t.Tx.Close(t.Tx.Open(unix.NFTA_EXPR_DATA))
	t.Tx.Close(e)
}

// counts reports whether an element of a set has a counter.
func (s *Set) counts(data []byte) bool { return s.Counts != nil && s.Counts(data) }

// recount exchanges elements that should have a counter and have none, or the other way round, as those of another
// configuration or version.
func (t *Table) recount(set int, all []Element) {
	for _, e := range all {
		t.exchange(Entry{Set: set, Key: string(e.Key), Data: string(e.Data)})
	}
}

// NotAllowed is what the rule of a class that counts has dropped, see Admission.
func NotAllowed() []dataplane.Refused {
	return []dataplane.Refused{{Verdict: model.Drop, Reason: dataplane.SourceNotAllowed}}
}

// Guarded are what the rules of Guards have refused, and one for other addresses behind them.
func Guarded() []dataplane.Refused {
	dropped := dataplane.Refused{Verdict: model.Drop, Reason: dataplane.NoServicePort}
	rejected := dataplane.Refused{Verdict: model.Reject, Reason: dataplane.NoServicePort}
	return []dataplane.Refused{dropped, rejected, dropped, rejected, rejected}
}

// RefusedByRules lists what the rules of chains have refused. Those of a chain that count have these meanings, in their
// order.
func (t *Table) RefusedByRules(
	c *nfnetlink.Socket, chains map[string][]dataplane.Refused,
) (all []dataplane.Refused, err error) {
	for chain, meanings := range chains {
		counts, err := t.RuleCounts(c, chain)
		if err != nil {
			return nil, err
		}
		for i, n := range counts[:min(len(counts), len(meanings))] {
			if refused := meanings[i]; n.Packets > 0 {
				refused.Connections = n.Packets
				all = append(all, refused)
			}
		}
	}
	return all, nil
}

// RefusedByRows lists what rows have refused that refuse all clients. Their sets are numbered by scope.
func (t *Table) RefusedByRows(
	c *nfnetlink.Socket, sets []int, verdict func(model.Key, []byte) model.Verdict,
) (all []dataplane.Refused, err error) {
	for scope, set := range sets {
		var some []dataplane.Refused
		err := t.ListOf(c, t.Sets[set], func() { some = nil }, func(e Element) {
			if key, ok := DecodeKey(e.Key, model.Scope(scope)); ok && e.Count.Packets > 0 {
				some = append(some, dataplane.RefusedBy(key, verdict(key, e.Data), e.Count.Packets))
			}
		})
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}
