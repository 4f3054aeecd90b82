package nft

import (
	"encoding/binary"
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

// Count is what a counter has counted.
type Count struct{ Packets, Bytes uint64 }

// Counter counts the packets that come so far in a rule.
func Counter() any { return &expr.Counter{} }

// counterName is that of the expression.
const counterName = "counter"

// CountIn finds the first counter in a list of expressions.
func CountIn(expressions []byte) (n Count, ok bool) {
	nfnetlink.Attributes(expressions, func(_ uint16, e []byte) {
		if more, is := countOf(e); is && !ok {
			n, ok = more, true
		}
	})
	return n, ok
}

// countOf reads an expression that is a counter.
func countOf(expression []byte) (n Count, ok bool) {
	if nfnetlink.Text(expression, unix.NFTA_EXPR_NAME) != counterName {
		return n, false
	}
	nfnetlink.Attributes(nfnetlink.Attribute(expression, unix.NFTA_EXPR_DATA), func(kind uint16, data []byte) {
		switch {
		case len(data) != 8:
		case kind == unix.NFTA_COUNTER_PACKETS:
			n.Packets = binary.BigEndian.Uint64(data)
		case kind == unix.NFTA_COUNTER_BYTES:
			n.Bytes = binary.BigEndian.Uint64(data)
		}
	})
	return n, true
}

// RuleCounts lists what the rules of a chain that have a counter have counted, in their order.
func (t *Table) RuleCounts(c *nfnetlink.Socket, chain string) (all []Count, err error) {
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

// AppendNotAllowed appends what the chain of a class has dropped by its rule for allowed sources, see Admission.
func (t *Table) AppendNotAllowed(
	all []dataplane.Refused, c *nfnetlink.Socket, chain string,
) ([]dataplane.Refused, error) {
	return t.AppendRefused(all, c, chain, dataplane.Refused{Verdict: model.Drop, Reason: dataplane.SourceNotAllowed})
}

// AppendGuarded appends what the rules of Guards have refused, and one for other addresses behind them.
func (t *Table) AppendGuarded(
	all []dataplane.Refused, c *nfnetlink.Socket, chain string,
) ([]dataplane.Refused, error) {
	dropped := dataplane.Refused{Verdict: model.Drop, Reason: dataplane.NoServicePort}
	rejected := dataplane.Refused{Verdict: model.Reject, Reason: dataplane.NoServicePort}
	return t.AppendRefused(all, c, chain, dropped, rejected, dropped, rejected, rejected)
}

// AppendRefused appends what the rules of a chain that have a counter have refused, of which each has a meaning.
func (t *Table) AppendRefused(
	all []dataplane.Refused, c *nfnetlink.Socket, chain string, meanings ...dataplane.Refused,
) ([]dataplane.Refused, error) {
	counts, err := t.RuleCounts(c, chain)
	for i, n := range counts[:min(len(counts), len(meanings))] {
		if meanings[i].Connections = n.Packets; n.Packets > 0 {
			all = append(all, meanings[i])
		}
	}
	return all, err
}
