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
	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// Memories are what this data plane, in whatever process, remembers of clients in the network namespace of the calling
// thread; see dataplane.Affine.
func Memories(ctx context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(yield func(dataplane.Memory, error) bool) {
		p, err := look(c)
		if err != nil {
			yield(dataplane.Memory{}, err)
			return
		}
		defer p.Close()
		p.Memories(ctx, s)(yield)
	}
}

// Memories implements dataplane.Affine.
func (p *Plane) Memories(_ context.Context, s *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(yield func(dataplane.Memory, error) bool) {
		if err := p.tell(s, yield); err != nil {
			yield(dataplane.Memory{}, fmt.Errorf("nftables: list remembered clients: %w", err))
		}
	}
}

func (p *Plane) tell(s *model.State, yield func(dataplane.Memory, error) bool) (err error) {
	tables := p.tables
	if tables == nil {
		if tables, err = p.recognise(s); err != nil {
			return err
		}
	}
	wanted := true
	for _, t := range tables {
		if err := p.config.Inject("nftables list"); err != nil {
			return err
		}
		err := t.eachMemory(p, func(m dataplane.Memory) { wanted = wanted && yield(m, nil) })
		if err != nil || !wanted {
			return err
		}
	}
	return nil
}

// recognise reads which pools of s the kernel holds under which numbers.
func (p *Plane) recognise(s *model.State) ([]*table, error) {
	var found []*table
	for _, t := range p.newTables(&nf.Transaction{}) {
		if err := t.Load(p.conn, t.constantChains()); err != nil {
			return nil, err
		}
		if !t.Exists || t.Foreign {
			continue
		}
		for _, set := range []int{frontends, internalFrontends, choices, backends} {
			if err := t.loadSet(p.conn, set); err != nil {
				return nil, err
			}
		}
		t.adopt(s)
		found = append(found, t)
	}
	return found, nil
}

// eachMemory calls f with what the kernel holds of clients of pools that are known.
func (t *table) eachMemory(p *Plane, f func(m dataplane.Memory)) error {
	now := time.Now()
	for id, pool := range t.pools {
		if pool.names == nil || !t.FoundSets[memoryName(pool.names.number)] {
			continue
		}
		err := t.ListOf(p.conn, t.memoryOf(pool.names), func() {}, func(e nf.Element) {
			h := handle(binary.NativeEndian.Uint32(e.Data))
			if client, ok := netip.AddrFromSlice(e.Key); ok {
				f(dataplane.Memory{Pool: id, Client: client, Backend: t.backends[h], Until: now.Add(e.Left)})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// inherit returns what has the pools remember what other planes do, when they are planned and no frontend leads to them
// yet; nil: nothing is to be inherited.
func (p *Plane) inherit(ctx context.Context, s *model.State) func([]*table) error {
	if p.config.Inherit == nil {
		return nil
	}
	return func(tables []*table) error {
		err := p.flush(tables[0].Tx) // it is that of all
		if isPartial(err) {
			p.config.TakeIn(ctx, s, p.taker(tables))
		}
		return err
	}
}

// Remember implements dataplane.Affine.
func (p *Plane) Remember(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Memory, error],
) (n int, err error) {
	if p.tables == nil {
		return 0, errors.New("nftables: the kernel's content is not known; Sync first")
	}
	tx := &nf.Transaction{}
	for _, t := range p.tables {
		t.Tx = tx
		defer func() { t.Tx = nil }()
	}
	return dataplane.Take(s, others, p.taker(p.tables))
}

// taker takes what others remember in. The tables share a transaction.
func (p *Plane) taker(tables []*table) dataplane.Taker {
	return func(others *dataplane.Memories) (n int, err error) {
		for _, t := range tables {
			some, failed := p.takeIn(t, others)
			n, err = n+some, errors.Join(err, failed)
		}
		return n, err
	}
}

const (
	// takeInTries is how often what others remember is compared anew: clients come meanwhile, or their time runs out.
	takeInTries = 5
	// takeInPart is how many are sent at once.
	takeInPart = 1 << 14
)

// takeIn has the pools of a table remember what other planes do.
func (p *Plane) takeIn(t *table, others *dataplane.Memories) (int, error) {
	n, err := p.takeInOnce(t, others)
	for range takeInTries {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) {
			break
		}
		_, err = p.takeInOnce(t, others)
	}
	if err != nil {
		err = fmt.Errorf("nftables: remember clients of another data plane: %w", err)
	}
	return n, err
}

func (p *Plane) takeInOnce(t *table, others *dataplane.Memories) (n int, err error) {
	if err := p.config.Inject("nftables list"); err != nil {
		return 0, err
	}
	type key struct {
		model.PoolID
		netip.Addr
	}
	superseded := map[key]bool{}
	err = t.eachMemory(p, func(own dataplane.Memory) {
		if others.Supersedes(own) {
			superseded[key{own.Pool, own.Client}] = true
		}
	})
	if err != nil {
		return 0, err
	}
	for one := range others.All() {
		pool := t.pools[one.Pool]
		if pool == nil || pool.lasts == 0 || pool.names.handles[one.Backend] == 0 {
			continue
		}
		set, client := t.memoryOf(pool.names), one.Client.AsSlice()
		if superseded[key{one.Pool, one.Client}] {
			t.ElementOf(unix.NFT_MSG_DELSETELEM, set, client, nil)
			t.Tx.Join()
		}
		h := pool.names.handles[one.Backend]
		t.Timed(set, client, nf.Native(uint32(h)), nf.Life{Lasts: others.Lasts(one.Pool), Left: time.Until(one.Until)})
		if n++; n%takeInPart == 0 {
			err = errors.Join(err, p.flush(t.Tx))
		}
	}
	return n, errors.Join(err, p.flush(t.Tx))
}

// flush performs the steps of a transaction, which is empty then.
func (p *Plane) flush(tx *nf.Transaction) error {
	err := p.commit(tx)
	*tx = nf.Transaction{}
	return err
}
