package ipvs

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		if err := p.listSessions(s, yield); err != nil {
			yield(dataplane.Session{}, fmt.Errorf("ipvs: list sessions: %w", err))
		}
	}
}

func (p *Plane) listSessions(s *model.State, yield func(dataplane.Session, error) bool) (err error) {
	k := p.held
	if k == nil {
		if k, err = p.recognise(s); err != nil {
			return err
		}
	}
	wanted := true
	for _, t := range k.tables {
		err := p.eachSession(t, k.affinityPoolsOf(s), func(m dataplane.Session) { wanted = wanted && yield(m, nil) })
		if err != nil || !wanted {
			return err
		}
	}
	return nil
}

// recognise reads which pools of s the kernel holds under which numbers.
func (p *Plane) recognise(s *model.State) (*kernel, error) {
	k := &kernel{rows: newRows(), tables: newTables(p.config.Mark, &nft.Transaction{})}
	for i, t := range k.tables {
		if err := p.load(t); err != nil {
			return nil, err
		}
		if t.Foreign {
			k.tables[i] = newTable(t.Family, t.Mark, t.Tx)
		}
	}
	k.adopt(s, k.tables)
	return k, nil
}

// affinityPools are the pools with affinity by their numbers.
func (r *rows) affinityPools() map[uint32]model.PoolID {
	pools := map[uint32]model.PoolID{}
	for id, use := range r.pools {
		if use.row.Affinity > 0 {
			pools[use.number] = id
		}
	}
	return pools
}

// affinityPoolsOf are those of s.
func (r *rows) affinityPoolsOf(s *model.State) map[uint32]model.PoolID {
	pools := r.affinityPools()
	maps.DeleteFunc(pools, func(_ uint32, id model.PoolID) bool { _, ok := s.Pools[id]; return !ok })
	return pools
}

// eachSession calls f with what a table holds of clients of pools. Of a client whose time is over the backend may still
// be there.
func (p *Plane) eachSession(t *table, pools map[uint32]model.PoolID, f func(m dataplane.Session)) error {
	if !t.Exists {
		return nil
	}
	if err := p.config.Inject("nftables list"); err != nil {
		return err
	}
	for number, id := range pools {
		if id.V6 != t.Family.V6() || !t.remembers(number) {
			continue
		}
		until, now := map[string]time.Time{}, time.Now()
		err := t.ListOf(p.ruleset.Socket, t.clientsOf(number), func() { clear(until) }, func(e nft.Element) {
			until[string(e.Key)] = now.Add(e.Left)
		})
		if err != nil {
			return err
		}
		err = t.ListOf(p.ruleset.Socket, t.affinityOf(number), func() {}, func(e nft.Element) {
			client, ok := netip.AddrFromSlice(e.Key)
			if backend, ok2 := nft.DecodeBackend(e.Data); ok && ok2 {
				f(dataplane.Session{Pool: id, Client: client, Backend: backend, Until: until[string(e.Key)]})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.held == nil {
		return p.learned.Keep(s, others)
	}
	return dataplane.Take(s, others, p.taker(s, p.held))
}

// taker takes what others remember in.
func (p *Plane) taker(s *model.State, k *kernel) dataplane.Taker {
	return func(others *dataplane.Sessions) (n int, err error) {
		pools, numbers := k.affinityPoolsOf(s), map[model.PoolID]uint32{}
		for number, id := range pools {
			numbers[id] = number
		}
		for _, t := range k.tables {
			some, failed := nft.Learner{
				Ruleset: p.ruleset, Tx: t.Tx,
				Own: func(f func(dataplane.Session)) error { return p.eachSession(t, pools, f) },
				Put: func(one dataplane.Session, was *dataplane.Session) bool {
					number, ok := numbers[one.Pool]
					if !ok || !t.Family.Mine(one.Client) {
						return false
					}
					if was != nil {
						t.forgetClient(number, one.Client, !was.Until.IsZero())
					}
					t.rememberClient(number, one, others.Lasts(one.Pool))
					return true
				},
			}.Take(others)
			n, err = n+some, errors.Join(err, failed)
		}
		if err != nil {
			err = fmt.Errorf("ipvs: %w", err)
		}
		return n, err
	}
}

// forgetClient deletes a client, and all that is remembered of it, in the transaction of the steps that follow.
func (t *table) forgetClient(number uint32, client netip.Addr, known bool) {
	key := client.AsSlice()
	if known {
		t.ElementOf(unix.NFT_MSG_DELSETELEM, t.clientsOf(number), key, nil)
		t.Tx.Join()
	}
	t.ElementOf(unix.NFT_MSG_DELSETELEM, t.affinityOf(number), key, nil)
	t.Tx.Join()
}

// rememberClient adds a client with its backend.
func (t *table) rememberClient(number uint32, m dataplane.Session, lasts time.Duration) {
	key, left := m.Client.AsSlice(), time.Until(m.Until)
	t.Timed(t.affinityOf(number), key, nft.EncodeBackend(m.Backend), nft.Life{Lasts: lasts + spare, Left: left + spare})
	t.Tx.Join()
	t.Timed(t.clientsOf(number), key, nil, nft.Life{Lasts: lasts, Left: left})
}
