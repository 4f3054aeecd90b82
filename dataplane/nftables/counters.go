package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The kernel counts connections in the elements that it has found anyway:
//
//	served ──────────► connections of a pool, as long as it is there (counters: services)
//	slots, backends ─► connections of a backend, as long as the slot leads to it (counters: backends)
//	frontends ───────► those that a row refuses
//	rules ───────────► those from sources that are not allowed, and those that guards refuse
//
// A packet of an open connection meets none of them.

// counts says which elements of the sets have a counter. With 10,000 Services of ten endpoints, those of backends
// double the time of the first Sync, so that they are there only if they are asked for.
func (t *table) counts(d dataplane.Detail) {
	t.detail = d
	each := func([]byte) bool { return d == dataplane.PerBackend }
	t.Sets[backends].Counts = each
	for _, s := range t.Sets[slots:] {
		s.Counts = each
	}
	t.Sets[served].Counts = func([]byte) bool { return true }
	t.Sets[frontends].Counts, t.Sets[internalFrontends].Counts = refuses, refuses
}

// refuses reports whether the row of a token refuses all clients.
func refuses(data []byte) bool { return token(nft.Number(data)).verdict() != model.Forward }

// Counters implements dataplane.Observed.
func (p *Plane) Counters(context.Context) (c dataplane.Counters, err error) {
	if p.tables == nil {
		return c, errors.New("nftables: the kernel's content is not known")
	}
	tally := dataplane.Tally{}
	for _, t := range p.tables {
		if err := p.config.Inject("nftables list"); err != nil {
			return c, err
		}
		if err := t.countServed(p, tally); err != nil {
			return c, fmt.Errorf("nftables: %w", err)
		}
		refused, err := t.countRefused(p)
		if err != nil {
			return c, fmt.Errorf("nftables: %w", err)
		}
		c.Refused = append(c.Refused, refused...)
	}
	c.Served, c.Connections = tally.Served(), p.config.Counters != dataplane.NoDetail
	c.Sort()
	return c, nil
}

// countServed adds what has been sent to backends, as finely as it is counted.
func (t *table) countServed(p *Plane, tally dataplane.Tally) error {
	byNumber, byNames := map[uint32]model.PoolID{}, map[uint32]model.PoolID{}
	for id, p := range t.pools {
		if byNumber[p.number] = id; p.names != nil {
			byNames[p.names.number] = id
		}
	}
	ofNumber := func(number uint32) model.PoolID { return byNumber[number] }
	ofHandle := func(h uint32) model.PoolID { return byNames[handle(h).affinity()] }
	sets := map[int]func(key uint32) model.PoolID{}
	switch t.detail {
	case dataplane.PerPool:
		sets[served] = ofNumber
	case dataplane.PerBackend:
		sets[backends] = ofHandle
		for shard := range t.shards {
			sets[slots+shard] = ofNumber
		}
	}
	for set, of := range sets {
		all := dataplane.Tally{}
		err := t.ListOf(p.ruleset.Socket, t.Sets[set], func() { clear(all) }, func(e nft.Element) {
			row := dataplane.Served{Pool: of(binary.NativeEndian.Uint32(e.Key))}
			row.Connections = e.Count.Packets
			if row.Backend, _ = nft.DecodeBackend(e.Data); set == served {
				row.Several = dataplane.All
			}
			if row.Connections > 0 && row.Pool != (model.PoolID{}) {
				all.Add(row)
			}
		})
		if err != nil {
			return err
		}
		for _, s := range all.Served() {
			tally.Add(s)
		}
	}
	return nil
}

// countRefused lists what rows and rules have refused.
func (t *table) countRefused(p *Plane) ([]dataplane.Refused, error) {
	rows, err := t.RefusedByRows(p.ruleset.Socket, []int{frontends, internalFrontends},
		func(_ model.Key, data []byte) model.Verdict { return token(nft.Number(data)).verdict() })
	if err != nil {
		return nil, err
	}
	chains := map[string][]dataplane.Refused{nft.ChainServices: nft.Guarded()}
	for _, c := range allClasses() {
		if c.limited {
			chains[c.chain()] = nft.NotAllowed()
		}
	}
	rules, err := t.RefusedByRules(p.ruleset.Socket, chains)
	return append(rows, rules...), err
}
