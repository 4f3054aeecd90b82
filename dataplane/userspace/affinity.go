package userspace

import (
	"errors"
	"hash/fnv"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The pools' sessions outlive the process in the set clients, for the next one or another plane. Save writes there new
// clients and those that are remembered for a good deal longer. Close writes all.
//
//	answered ─► clients of the pool ── Unsaved ─► save ─► set clients ── eachSaved ─► takeOver, Sessions

// poolName is a pool's name in keys of the set: two words.
func poolName(id model.PoolID) string {
	hash := fnv.New64a()
	hash.Write([]byte(id.String()))
	return string(hash.Sum(nil))
}

func keyOf(s relay.Session) []byte { return append(s.Client.AsSlice(), poolName(s.Pool)...) }

// save brings the set up to date, and if this is the last time, to the second. The next process may do without.
func (p *Plane) save(last bool) {
	if p.proxy == nil || p.tables == nil {
		return
	}
	now := time.Now()
	todo := p.proxy.Rows.Unsaved(last, now)
	if len(todo) == 0 {
		return
	}
	err := p.write(todo, func(m relay.Session) bool { return m.Saved.After(now) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) { // another program has changed the set
		var there map[string]bool
		if there, err = p.savedKeys(); err == nil {
			err = p.write(todo, func(m relay.Session) bool { return there[string(keyOf(m))] })
		}
	}
	relay.Settle(todo, err == nil)
	if err != nil && last {
		p.config.Logger().Warn("mode userspace: clients with session affinity may get other endpoints", "error", err)
	}
}

// write makes the set hold what clients chose, in place of what is there of them.
func (p *Plane) write(all []relay.Session, there func(relay.Session) bool) error {
	tx := &nft.Transaction{}
	now := time.Now()
	for i := range nft.Families {
		t := p.newTable(i, tx)
		for _, m := range all {
			if !t.Family.Mine(m.Client) || !t.Family.Mine(m.Backend.Addr()) {
				continue
			}
			if there(m) {
				t.Element(unix.NFT_MSG_DELSETELEM, clients, keyOf(m), nil)
				tx.Join()
			}
			t.Timed(t.Sets[clients], keyOf(m), nft.EncodeBackend(m.Backend), nft.Life{Lasts: m.Lasts, Left: m.Until.Sub(now)})
		}
	}
	return p.commit(tx)
}

func (p *Plane) savedKeys() (map[string]bool, error) {
	keys := map[string]bool{}
	for i := range nft.Families {
		t := p.newTable(i, &nft.Transaction{})
		add := func(e nft.Element) { keys[string(e.Key)] = true }
		if err := t.List(p.ruleset.Socket, clients, func() {}, add); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

// eachSaved calls f with what the set has of pools of s.
func eachSaved(conn *nfnetlink.Socket, tables []*table, s *model.State, f func(dataplane.Session)) error {
	names := map[string]model.PoolID{}
	for id, pool := range s.Pools {
		if pool.Affinity > 0 {
			names[poolName(id)] = id
		}
	}
	if len(names) == 0 {
		return nil
	}
	now := time.Now()
	for _, t := range tables {
		found, err := t.Finds(conn, clients)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		err = t.List(conn, clients, func() {}, func(e nft.Element) {
			backend, ok := nft.DecodeBackend(e.Data)
			n := int(t.Family.Address.Words()) * 4
			if !ok || len(e.Key) < n {
				return
			}
			client, ok := netip.AddrFromSlice(e.Key[:n])
			if id, known := names[string(e.Key[n:])]; ok && known {
				f(dataplane.Session{Pool: id, Client: client, Backend: backend, Until: now.Add(e.Left)})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// handOver leaves the pools' sessions in the kernel, and has new clients wait while no process serves them. Where
// another plane is in force, no client is to wait, and that plane remembers.
func (p *Plane) handOver() {
	if p.proxy == nil || p.tables == nil || p.phase.yields() || p.standby {
		return
	}
	tx := &nft.Transaction{}
	for _, t := range p.tables {
		t.Tx = tx
		for _, protocol := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
			t.Element(unix.NFT_MSG_NEWSETELEM, away, []byte{byte(protocol), 0, 0, 0}, nil)
		}
	}
	err := p.commit(tx)
	if err != nil {
		err = p.commit(tx) // there is no later
	}
	if err != nil {
		p.config.Logger().Warn("mode userspace: clients may be refused until the next process serves them", "error", err)
	}
	p.save(true)
}

// takeOver has the pools remember what the process before has left, and deletes what is of no use.
func (p *Plane) takeOver(rows *relay.Directory, s *model.State) error {
	var tables []*table
	for i := range nft.Families {
		t := p.newTable(i, &nft.Transaction{})
		if err := t.Load(p.ruleset.Socket, t.chains()); err != nil {
			return err
		}
		if err := p.dropSourceNAT(t); err != nil {
			return err
		}
		tables = append(tables, t)
	}
	return eachSaved(p.ruleset.Socket, tables, s, func(m dataplane.Session) {
		rows.Remember(m, true)
	})
}

// dropSourceNAT deletes the source addresses that the process before has left.
func (p *Plane) dropSourceNAT(t *table) error {
	if !t.Exists || !t.FoundSets[t.Sets[sourceAddresses].Name] {
		return nil
	}
	err := t.List(p.ruleset.Socket, sourceAddresses, func() { t.Tx = &nft.Transaction{} }, func(e nft.Element) {
		t.Element(unix.NFT_MSG_DELSETELEM, sourceAddresses, e.Key, nil)
	})
	if err != nil || len(t.Tx.Steps) == 0 {
		return err
	}
	return p.commit(t.Tx)
}
