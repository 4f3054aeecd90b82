// Package nftables programs the rows into nf_tables, driven by netlink on one long-lived socket. The
// number of chains and sets does not depend on the number of Services: frontends and backends are
// elements of a few maps, one table for each address family.
//
//	prerouting ─ from a pod? ─► internal ─ internal-frontends ─┐            ┌ classes ─► forward-snat-offcluster: who
//	output ───────────────────►    │ not found                 ├─► token ─ serve         may, mark for SNAT
//	           others ────────► services ─ frontends ──────────┘            │
//	                               │ not found                              └ choosers ─► choose-3
//	                             guards: reject or drop                         slots: pool number . random mod 3 ─► dnat
//	postrouting: marked, or a backend that reaches itself ─► masquerade
//
// A Frontend row is one element of a frontends map. It says which class treats its packets (verdict, SNAT; one of
// fifteen), how many slots its pool has, and which pool that is. A backend is one element of slots, of which there are
// several maps (shard.go). So a change of an endpoint or a Service changes a few data elements. nf_tables re-examines
// all elements of a verdict map when one is added, but not those of a data map. Only a pool with affinity has rules of
// its own (memory.go), so that its clients have a memory of their own.
//
// These chains see the first packet of a connection only. Connections that conntrack knows live on.
package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Plane is the nftables data plane.
type Plane struct {
	dataplane.Base
	learned  dataplane.Learned
	config   dataplane.Config
	ruleset  *nft.Ruleset
	localnet localnet.Sysctl
	tables   []*table // IPv4, IPv6; nil: the kernel's content is not known
	ahead    planned  // the kernel as ReadAhead found it, until the next Sync; zero: unread
	clean    uint32   // Ruleset.Foreign when our tables were as they should be; 0: unknown
	flows    *flows   // nil: there are no flowtables
	stale    bool     // the flowtables are not as they should be
}

// planned is what the kernel holds and what there is to do, as long as no other program changes the ruleset.
type planned struct {
	foreign uint32
	tables  []*table
	tx      *nft.Transaction
}

var (
	_ dataplane.New       = New
	_ dataplane.Dataplane = (*Plane)(nil)
)

// Driver has planes without options.
func Driver() dataplane.Driver {
	d := dataplane.Driver{Name: "nftables", Open: New, Prepare: prepare, Inspect: inspect}
	return d.SeenBy(func(c dataplane.Config) (dataplane.Dataplane, error) { return look(c) })
}

// New opens the plane in the network namespace of the calling thread. It needs CAP_NET_ADMIN.
func New(c dataplane.Config) (dataplane.Dataplane, error) {
	c.Mark = cmp.Or(c.Mark, dataplane.DefaultMark)
	p, err := look(c)
	if err != nil {
		return nil, err
	}
	if c.Flowtable != dataplane.NoFlowtable {
		p.flows, err = watchDevices()
	}
	if err == nil {
		err = p.probe()
	}
	if p.flows != nil && errors.Is(err, dataplane.ErrUnsupported) {
		lacks := err
		err, p.flows = p.flows.close(), nil
		if err = errors.Join(err, p.probe()); err == nil {
			c.Logger().Warn("the kernel has no flowtables, so that all packets pass its hooks", "error", lacks)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nftables: %w", err), p.Close())
	}
	return p, nil
}

// probe has the kernel check, but not perform, a transaction with everything the plane may need.
func (p *Plane) probe() error {
	var tx nft.Transaction
	for _, t := range p.newTables(&tx) {
		t.Name, t.offloads = t.Name+"-probe", p.flows != nil
		if err := t.structure(); err != nil {
			return err
		}
		for _, affinity := range []time.Duration{0, time.Second} {
			backend := model.Backend{Addr: netip.IPv6LinkLocalAllNodes(), Port: 1, Weight: 1}
			if !t.Family.V6() {
				backend.Addr = netip.AddrFrom4([4]byte{224, 0, 0, 1})
			}
			id := model.PoolID{Service: affinity.String()}
			if err := t.setPool(id, model.Pool{Backends: []model.Backend{backend}, Affinity: affinity}); err != nil {
				return err
			}
		}
	}
	err := tx.Check(p.ruleset.Socket)
	if err == nil || errors.Is(err, unix.EPERM) {
		return err
	}
	return fmt.Errorf("%w: %w (Linux 5.13 or newer with nf_tables, NAT, numgen and masquerading is needed)",
		dataplane.ErrUnsupported, err)
}

func (p *Plane) newTables(tx *nft.Transaction) []*table {
	var tables []*table
	for _, f := range nft.Families {
		t := newTable(f, p.config.Mark, tx)
		t.counts(p.config.Counters)
		t.localnetWasOff = p.config.LocalnetWasOff
		tables = append(tables, t)
	}
	return tables
}

// Sync implements dataplane.Dataplane. It leaves correct objects untouched.
func (p *Plane) Sync(_ context.Context, s *model.State) error { return p.sync(s, nil) }

// Repair implements dataplane.Dataplane.
func (p *Plane) Repair(_ context.Context, s *model.State, r dataplane.Report) error {
	found, _ := r.Plan.(*planned)
	return p.sync(s, found)
}

// sync does what an Audit has found, unless another program has changed the ruleset since.
func (p *Plane) sync(s *model.State, found *planned) error {
	p.tables, p.clean = nil, 0
	before, err := p.ruleset.Foreign()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	takeSessions := p.takeSessions(s)
	read := planned{tx: &nft.Transaction{}}
	if p.ahead.tx != nil && p.ahead.foreign == before {
		read = p.ahead
	}
	p.ahead = planned{}
	var tables []*table
	tx := read.tx
	var partial error
	if found != nil && found.foreign == before && takeSessions == nil {
		tables, tx = found.tables, found.tx
	} else {
		tx.Early = func() { partial = p.commitMore(tx, partial) }
		tables, err = p.plan(s, read, takeSessions)
	}
	if !dataplane.Known(err) {
		return err
	}
	if partial = p.commitMore(tx, partial); !dataplane.Known(partial) {
		return partial
	}
	err, p.stale = p.finish(tables, errors.Join(err, partial)), true
	if err == nil {
		p.clean = before
	}
	if dataplane.Known(err) {
		err = errors.Join(err, p.renew())
	}
	return err
}

// commitMore performs further steps, unless those before have left the kernel unknown.
func (p *Plane) commitMore(tx *nft.Transaction, before error) error {
	if !dataplane.Known(before) {
		*tx = nft.Transaction{Early: tx.Early}
		return before
	}
	err := p.ruleset.Commit(tx)
	if !dataplane.Known(err) {
		return err
	}
	return errors.Join(before, err)
}

// plan finds the steps that lead from what the kernel holds to s. It reads that unless that was done. With ErrPartial
// the steps do so but for the rows that the error names. When all pools are planned, and no frontends, it calls ready,
// unless that is nil.
func (p *Plane) plan(s *model.State, read planned, ready func([]*table) error) ([]*table, error) {
	offloads, err := p.wantsFlowtable()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	tables, tx := read.tables, read.tx
	if tables == nil {
		if tables, err = p.read(tx); err != nil {
			return nil, err
		}
	}
	var errs []error
	for i, t := range tables {
		if t.Foreign {
			t = p.newTables(tx)[i]
			tables[i] = t
			t.Delete()
			ready, tx.Early = nil, nil // a new table takes the place of the old one at once
		}
		t.PodInterfaces, t.offloads, t.localnetIsOn = s.Pods.Interfaces, offloads, p.localnet.On()
		errs = append(errs, t.syncPools(s))
	}
	if ready != nil {
		err := ready(tables)
		if errs = append(errs, err); !dataplane.Known(err) {
			return nil, err
		}
	}
	for _, t := range tables {
		errs = append(errs, t.syncRows(s))
	}
	return tables, dataplane.Partial(errs...)
}

// finish settles, and adds what is not in force after that to what was not before.
func (p *Plane) finish(tables []*table, partial error) error {
	err := p.settle(tables)
	if !dataplane.Known(err) {
		return err
	}
	return errors.Join(partial, err)
}

// settle is called when the kernel has done what the tables' transaction says. With ErrPartial all is as
// it should be but for the rows that the error names.
func (p *Plane) settle(tables []*table) error {
	for _, t := range tables {
		if err := p.forget(t); err != nil {
			return err
		}
		t.numbers.settle()
		t.stickies.settle()
		t.Tx, t.byName = nil, nil
	}
	p.tables = tables
	return dataplane.Partial(p.settleLocalnet(tables))
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(_ context.Context, s *model.State, c model.Change) error {
	tables := p.tables
	if tables == nil {
		return errors.New("nftables: the kernel's content is not known; Sync first")
	}
	p.tables = nil
	tx := &nft.Transaction{}
	var errs []error
	for _, t := range tables {
		t.Tx = tx
		errs = append(errs, t.apply(s, c))
	}
	left := dataplane.Partial(errs...)
	partial := p.ruleset.Commit(tx)
	if partial != nil {
		p.clean = 0
	}
	if !dataplane.Known(partial) {
		return partial
	}
	return p.finish(tables, errors.Join(left, partial))
}

// Audit implements dataplane.Dataplane: each step that Sync would do is a difference. It does not look closer if no
// other program has changed the ruleset since the last successful call.
func (p *Plane) Audit(_ context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	partial := p.renew()
	r, err := p.audit(s, d)
	return r, cmp.Or(err, partial)
}

func (p *Plane) audit(s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	foreign, err := p.ruleset.Foreign()
	if err != nil {
		return r, fmt.Errorf("nftables: %w", err)
	}
	if p.tables != nil && p.tables[0].localnet {
		if drifts := p.localnet.Drift(); drifts != nil {
			return dataplane.Report{Drifts: drifts}, nil
		}
	}
	if p.tables != nil && foreign == p.clean && d == dataplane.Quick {
		return r, nil
	}
	tx := &nft.Transaction{}
	tables, err := p.plan(s, planned{tx: tx}, nil)
	if !dataplane.Known(err) {
		return r, err
	}
	switch {
	case len(tx.Steps) > 0 && err == nil:
		r.Plan = &planned{foreign, tables, tx}
	case len(tx.Steps) == 0 && p.tables != nil:
		p.clean = foreign
	}
	r.Drifts = tx.Drifts(s)
	return r, nil
}

// RulesetChanged notes a transaction of this process that is not the plane's.
func (p *Plane) RulesetChanged() { p.ruleset.Count() }

// Remove implements dataplane.Dataplane.
func (p *Plane) Remove(context.Context) error {
	p.tables, p.ahead = nil, planned{}
	if err := p.config.Inject("nftables remove"); err != nil {
		return err
	}
	tx := &nft.Transaction{}
	for _, t := range p.newTables(tx) {
		if err := t.LoadTable(p.ruleset.Socket); err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
		if !t.Exists || t.Family.V6() && defect.Is(defect.NFTablesRemove) {
			continue
		}
		if err := p.removeLocalnet(t); err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
		t.Delete()
	}
	if len(tx.Steps) == 0 {
		return nil
	}
	return p.ruleset.Commit(tx)
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	return errors.Join(p.flows.close(), p.ruleset.Close(), p.localnet.Close())
}

// forget deletes from the memory of affinity the backends that have left their pools, and then their handles. It comes
// after the change, when no packet can choose them any more. Packets add to that memory at any time. The listing shows
// a client that came after the change, and no later client can get such a backend.
func (p *Plane) forget(t *table) error {
	if len(t.stale) == 0 && !t.recheck {
		return nil
	}
	t.Tx = &nft.Transaction{}
	err := p.ruleset.Retry(t.Tx, func() error { return t.forgetSteps(p.ruleset.Socket) })
	if err == nil {
		t.forgotten()
	}
	return err
}

// forgetSteps makes steps that delete the clients of backends that have left, pool by pool, and then the handles of
// these backends.
func (t *table) forgetSteps(c *nfnetlink.Socket) error {
	stale, left := make(map[handle]bool, len(t.stale)), map[*names]bool{}
	for _, s := range t.stale {
		stale[s.handle], left[s.of] = true, true
	}
	for _, p := range t.pools {
		if p.lasts == 0 || !t.recheck && !left[p.names] {
			continue
		}
		set, steps := t.memoryOf(p.names), *t.Tx
		err := t.ListOf(c, set, func() { *t.Tx = steps }, func(e nft.Element) {
			h := handle(binary.NativeEndian.Uint32(e.Data))
			if _, known := t.backends[h]; stale[h] || !known {
				t.ElementOf(unix.NFT_MSG_DELSETELEM, set, e.Key, nil)
			}
		})
		if err != nil {
			return err
		}
	}
	for h := range stale {
		t.Element(unix.NFT_MSG_DELSETELEM, backends, nft.Native(uint32(h)), nil)
	}
	return nil
}

func (t *table) forgotten() {
	for _, s := range t.stale {
		delete(t.backends, s.handle)
		if s.of != nil {
			s.of.indexes.give(s.index())
			s.of.indexes.settle()
		}
	}
	t.stale, t.recheck = nil, false
}
