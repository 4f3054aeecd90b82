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
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// leftSessions are what this data plane, in whatever process, remembers of clients in the network namespace of the
// calling thread; see dataplane.Handover.
func leftSessions(ctx context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		conn, err := nfnetlink.Dial()
		if err != nil {
			yield(dataplane.Session{}, fmt.Errorf("ipvs: %w", err))
			return
		}
		defer conn.Close()
		(&Plane{config: c, conn: conn}).Sessions(ctx, s)(yield)
	}
}

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		if err := p.tell(s, yield); err != nil {
			yield(dataplane.Session{}, fmt.Errorf("ipvs: list remembered clients: %w", err))
		}
	}
}

func (p *Plane) tell(s *model.State, yield func(dataplane.Session, error) bool) (err error) {
	k := p.held
	if k == nil {
		if k, err = p.recognise(s); err != nil {
			return err
		}
	}
	wanted := true
	for _, t := range k.tables {
		err := p.eachSession(t, k.stickyOf(s), func(m dataplane.Session) { wanted = wanted && yield(m, nil) })
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

// sticky are the pools with affinity by their numbers.
func (r *rows) sticky() map[uint32]model.PoolID {
	pools := map[uint32]model.PoolID{}
	for id, use := range r.pools {
		if use.row.Affinity > 0 {
			pools[use.number] = id
		}
	}
	return pools
}

// stickyOf are those of s.
func (r *rows) stickyOf(s *model.State) map[uint32]model.PoolID {
	pools := r.sticky()
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
		err := t.ListOf(p.conn, t.clientsOf(number), func() { clear(until) }, func(e nft.Element) {
			until[string(e.Key)] = now.Add(e.Left)
		})
		if err != nil {
			return err
		}
		err = t.ListOf(p.conn, t.affinityOf(number), func() {}, func(e nft.Element) {
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
		numbers := map[model.PoolID]uint32{}
		for number, id := range k.stickyOf(s) {
			numbers[id] = number
		}
		for _, t := range k.tables {
			some, failed := p.takeIn(taking{t, k.stickyOf(s), numbers, others})
			n, err = n+some, errors.Join(err, failed)
		}
		return n, err
	}
}

// taking is what a table is to take in.
type taking struct {
	*table
	pools   map[uint32]model.PoolID
	numbers map[model.PoolID]uint32
	others  *dataplane.Sessions
}

const (
	// takeInTries is how often what others remember is compared anew: clients come meanwhile, or their time runs out.
	takeInTries = 5
	// takeInPart is how many are sent at once.
	takeInPart = 1 << 13
)

func (p *Plane) takeIn(t taking) (int, error) {
	n, err := p.takeInOnce(t)
	for range takeInTries {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) {
			break
		}
		_, err = p.takeInOnce(t)
	}
	if err != nil {
		err = fmt.Errorf("ipvs: remember clients of another data plane: %w", err)
	}
	return n, err
}

func (p *Plane) takeInOnce(t taking) (n int, err error) {
	type client struct {
		model.PoolID
		netip.Addr
	}
	superseded := map[client]dataplane.Session{}
	err = p.eachSession(t.table, t.pools, func(own dataplane.Session) {
		if t.others.Supersedes(own) {
			superseded[client{own.Pool, own.Client}] = own
		}
	})
	if err != nil {
		return 0, err
	}
	for one := range t.others.All() {
		number, ok := t.numbers[one.Pool]
		if !ok || !t.Family.Mine(one.Client) {
			continue
		}
		if own, ok := superseded[client{one.Pool, one.Client}]; ok {
			t.forgetClient(number, one.Client, !own.Until.IsZero())
		}
		t.rememberClient(number, one, t.others.Lasts(one.Pool))
		if n++; n%takeInPart == 0 {
			err = errors.Join(err, p.commit(t.Tx))
		}
	}
	return n, errors.Join(err, p.commit(t.Tx))
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
