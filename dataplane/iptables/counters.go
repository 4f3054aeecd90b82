package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// The kernel counts the packets that meet a rule. Those of table nat see the first packet of a connection, and those of
// table filter each attempt that is refused:
//
//	nat     KUBE-PODS-…, KUBE-PART-…, KUBE-STICK-… ─► DNAT: connections of a backend
//	filter  a chain for each reason ────────────────► REJECT, DROP
//
// A chain that changes is written anew. Its rules take over what they had counted (xt.Table, nfTables.chainRules).

// refusals are the chains in which connections end that are refused.
var refusals = map[string]dataplane.Refused{
	chainReject:    {Verdict: model.Reject, Reason: dataplane.NoEndpoints},
	chainNoLocal:   {Verdict: model.Drop, Reason: dataplane.NoLocalEndpoints},
	chainOthers:    {Verdict: model.Drop, Reason: dataplane.SourceNotAllowed},
	chainNoRow:     {Verdict: model.Reject, Reason: dataplane.NoServicePort},
	chainNoRowDrop: {Verdict: model.Drop, Reason: dataplane.NoServicePort},
}

// Counters implements dataplane.Dataplane. Refusals are counted by their reason alone.
func (p *Plane) Counters(context.Context) (c dataplane.Counters, err error) {
	if p.families == nil {
		return c, errors.New("iptables: the kernel's content is not known")
	}
	c.Connections = p.config.Counters != dataplane.NoDetail
	served, refused := dataplane.Tally{}, map[string]uint64{}
	for _, f := range p.families {
		if err := p.config.Inject("iptables list"); err != nil {
			return c, err
		}
		err := p.backend.counts(tableID{f.v6, tableNames[filter]}, slices.Collect(maps.Keys(refusals)),
			func(chain string, _ netip.AddrPort, n uint64) { refused[chain] += n })
		if err == nil && c.Connections {
			pools := f.poolChains()
			err = p.backend.counts(tableID{f.v6, tableNames[nat]}, slices.Collect(maps.Keys(pools)),
				func(chain string, to netip.AddrPort, n uint64) {
					if to.IsValid() {
						served.Add(dataplane.Served{Pool: pools[chain], Backend: to, Sum: dataplane.Sum{Connections: n}})
					}
				})
		}
		if err != nil {
			return c, fmt.Errorf("iptables: %w", err)
		}
	}
	for chain, n := range refused {
		r := refusals[chain]
		r.Connections = n
		c.Refused = append(c.Refused, r)
	}
	c.Served = served.Served()
	c.Sort()
	return c, nil
}

// poolChains are the chains with rules that translate.
func (l *layout) poolChains() map[string]model.PoolID {
	chains := map[string]model.PoolID{}
	for e := range l.entries {
		chains[e.chain()] = e.pool
	}
	for of, below := range l.parts {
		for _, chain := range below {
			chains[chain] = of.pool
		}
	}
	return chains
}
