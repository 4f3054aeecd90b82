package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The kernel counts for each virtual server and each of its real servers, as long as they are there. A pool has as many
// virtual servers as it has frontends. The difference between the counters of virtual and real servers is that of
// real servers that are gone.
//
// Connections that affinity sends past IPVS are counted by the rule of the pool that does so (recall in memory.go).

// Counters implements dataplane.Observed.
func (p *Plane) Counters(context.Context) (dataplane.Counters, error) {
	if p.held == nil {
		return dataplane.Counters{}, errors.New("ipvs: the kernel's content is not known")
	}
	tally := dataplane.Tally{}
	if err := p.countServed(tally); err != nil {
		return dataplane.Counters{}, fmt.Errorf("ipvs: %w", err)
	}
	refused, err := p.countByTable(tally)
	if err != nil {
		return dataplane.Counters{}, fmt.Errorf("ipvs: %w", err)
	}
	c := dataplane.Counters{Connections: true, Traffic: true, Served: tally.Served(), Refused: refused}
	c.Sort()
	return c, nil
}

// countByTable adds what affinity has sent past IPVS, and lists what was refused.
func (p *Plane) countByTable(tally dataplane.Tally) (all []dataplane.Refused, err error) {
	if err := p.config.Inject("nftables list"); err != nil {
		return nil, err
	}
	pools := p.held.affinityPools()
	for _, t := range p.held.tables {
		for number := range t.memories {
			counts, err := t.RuleCounts(p.ruleset.Socket, ownName(recallPrefix, number))
			if err != nil {
				return nil, err
			}
			if len(counts) > 0 && counts[0].Packets > 0 {
				row := dataplane.Served{Pool: pools[number], Several: dataplane.ByAffinity}
				row.Connections = counts[0].Packets
				tally.Add(row)
			}
		}
		rows, err := t.RefusedByRows(p.ruleset.Socket, []int{frontends, internalFrontends},
			func(key model.Key, _ []byte) model.Verdict { return p.held.frontends[key].Verdict })
		if err != nil {
			return nil, err
		}
		chains := map[string][]dataplane.Refused{nft.ChainServices: nft.Guarded()}
		for c := range t.classes {
			if c.limited {
				chains[c.chain()] = nft.NotAllowed()
			}
		}
		rules, err := t.RefusedByRules(p.ruleset.Socket, chains)
		if err != nil {
			return nil, err
		}
		all = append(append(all, rows...), rules...)
	}
	return all, nil
}

func (p *Plane) countServed(tally dataplane.Tally) error {
	listed, err := p.client.Servers()
	if err != nil {
		return err
	}
	for key, id := range p.held.wanted {
		rest := listed[key].Stats
		if rest.Conns == 0 { // most Services have no client on a node
			continue
		}
		destinations, err := p.client.Destinations(key)
		if err != nil {
			return err
		}
		for _, d := range destinations {
			backend := d.Addr
			if _, ok := p.held.pools[id].row.At(backend); !ok {
				continue
			}
			tally.Add(served(id, backend, d.Stats))
			rest = rest.Less(d.Stats)
		}
		if rest.Conns > 0 {
			tally.Add(served(id, netip.AddrPort{}, rest))
		}
	}
	return nil
}

func served(id model.PoolID, backend netip.AddrPort, s ipvs.Stats) dataplane.Served {
	return dataplane.Served{Pool: id, Backend: backend, Sum: dataplane.Sum{
		Connections: s.Conns,
		ToBackend:   dataplane.Traffic{Packets: s.InPackets, Bytes: s.InBytes},
		ToClient:    dataplane.Traffic{Packets: s.OutPackets, Bytes: s.OutBytes},
	}}
}
