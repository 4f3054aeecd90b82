package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return dataplane.ListSessions("nftables", func(f func(dataplane.Session)) (err error) {
		tables := p.tables
		if tables == nil {
			if tables, err = p.recognise(s); err != nil {
				return err
			}
		}
		for _, t := range tables {
			if err := t.eachSession(p, s, f); err != nil {
				return err
			}
		}
		return nil
	})
}

// recognise reads which pools of s the kernel holds under which numbers.
func (p *Plane) recognise(s *model.State) ([]*table, error) {
	var found []*table
	for _, t := range p.newTables(&nft.Transaction{}) {
		if err := t.Load(p.ruleset.Socket, t.knownChains()); err != nil {
			return nil, err
		}
		if !t.Exists || t.Foreign {
			continue
		}
		for _, set := range []int{frontends, internalFrontends, choices, backends} {
			if err := t.loadSet(p.ruleset.Socket, set); err != nil {
				return nil, err
			}
		}
		t.adopt(s)
		found = append(found, t)
	}
	return found, nil
}

// eachSession calls f with what the kernel holds of clients of pools of s that are known.
func (t *table) eachSession(p *Plane, s *model.State, f func(m dataplane.Session)) error {
	if err := p.config.Inject("nftables list"); err != nil {
		return err
	}
	now := time.Now()
	for id := range s.Pools {
		pool := t.pools[id]
		if pool == nil || pool.names == nil || !t.FoundSets[memoryName(pool.names.number)] {
			continue
		}
		err := t.ListOf(p.ruleset.Socket, t.memoryOf(pool.names), func() {}, func(e nft.Element) {
			h := handle(binary.NativeEndian.Uint32(e.Data))
			if client, ok := netip.AddrFromSlice(e.Key); ok {
				f(dataplane.Session{Pool: id, Client: client, Backend: t.backends[h], Until: now.Add(e.Left)})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// takeSessions returns what has the pools remember what other planes do, when they are planned and no frontend leads to
// them yet; nil: there are no sessions to take.
func (p *Plane) takeSessions(s *model.State) func([]*table) error {
	if p.learned.None() {
		return nil
	}
	return func(tables []*table) error {
		err := p.ruleset.Commit(tables[0].Tx) // it is that of all
		if dataplane.Known(err) {
			p.learned.TakeIn(p.config.Log, p.taker(s, tables))
		}
		return err
	}
}

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.tables == nil {
		return p.learned.Keep(s, others)
	}
	tx := &nft.Transaction{}
	for _, t := range p.tables {
		t.Tx = tx
		defer func() { t.Tx = nil }()
	}
	return dataplane.Take(s, others, p.taker(s, p.tables))
}

// taker takes what others remember in. The tables share a transaction.
func (p *Plane) taker(s *model.State, tables []*table) dataplane.Taker {
	return func(others *dataplane.Sessions) (n int, err error) {
		for _, t := range tables {
			some, failed := nft.Learner{
				Ruleset: p.ruleset, Tx: t.Tx,
				Own: func(f func(dataplane.Session)) error { return t.eachSession(p, s, f) },
				Put: func(one dataplane.Session, was *dataplane.Session) bool {
					return t.remember(one, was != nil, others.Lasts(one.Pool))
				},
			}.Take(others)
			n, err = n+some, errors.Join(err, failed)
		}
		if err != nil {
			err = fmt.Errorf("nftables: %w", err)
		}
		return n, err
	}
}

// remember has a pool remember a client, in the place of what it knows of it.
func (t *table) remember(one dataplane.Session, known bool, lasts time.Duration) bool {
	pool := t.pools[one.Pool]
	if pool == nil || pool.lasts == 0 || pool.names.handles[one.Backend] == 0 {
		return false
	}
	set, client := t.memoryOf(pool.names), one.Client.AsSlice()
	if known {
		t.ElementOf(unix.NFT_MSG_DELSETELEM, set, client, nil)
		t.Tx.Join()
	}
	h := pool.names.handles[one.Backend]
	t.Timed(set, client, nft.Native(uint32(h)), nft.Life{Lasts: lasts, Left: time.Until(one.Until)})
	return true
}
