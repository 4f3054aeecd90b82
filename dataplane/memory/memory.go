// Package memory is a whole data plane whose kernel is a map: the example of one, and for tests of what drives planes.
//
//	engine ── Sync, Apply, Audit, Learn, SetStage ─► plane ── operations, each of which may fail ──► Kernel: a table
//	daemon ── Inspect, Sessions, Drain, Remove ────► Driver ── of a process that has ended ────────►  for each name
//	tests ─── Send(packet) ─► Kernel ── of an open connection? else the first table that serves ───► Answer
package memory

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Name is that of the plane that New opens.
const Name = "memory"

// Nature says where the connections are that a plane has begun.
type Nature int

// The natures.
const (
	Tracked Nature = iota // in the kernel, without need of the table, as with nftables
	Tabled                // in the kernel, as long as the table is there, as with IPVS
	Relayed               // in the process, with which they end, as in mode userspace: in Standby it serves nothing
)

// Kernel holds a table for each name of a plane, and open connections. It outlives the planes. The zero value is empty.
// Any goroutine may call its methods. Time is that of package time: tests have it pass by testing/synctest.
type Kernel struct {
	mu     sync.Mutex
	tables map[string]*table
	open   map[Packet]Answer // connections
	chosen int               // how often a backend was: they are taken in turn
}

// table is there while it has rows or a process.
type table struct {
	rows     *model.State
	nature   Nature
	stage    dataplane.Stage
	process  *plane                                  // that has synced the table last; nil: it is closed, or has died
	holder   any                                     // with what connections end that begin: process, this table, or nil
	sessions map[dataplane.Session]dataplane.Session // by pool and client
}

// A Packet is equal to all others of its connection, or its flow of UDP.
type Packet struct {
	model.Packet
	SourcePort uint16
}

// Answer is what became of a packet.
type Answer struct {
	Verdict    model.Verdict
	Backend    model.Backend // of Forward; none: another program has deleted the pool
	Masquerade bool          // the backend sees the node as the client
	Plane      string        // that decided it; empty: no plane had a row
	Begins     bool          // the packet is the first one of a connection
	holder     any           // see table
}

// Send sends a packet. One of an open connection goes to its backend. The first table that serves and has a row for it,
// in the order of names, decides about any other.
func (k *Kernel) Send(p Packet) Answer {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a, ok := k.open[p]; ok {
		a.Begins = false
		return a
	}
	for _, name := range slices.Sorted(maps.Keys(k.tables)) {
		t := k.tables[name]
		a := t.decide(p.Packet, &k.chosen)
		a.Plane, a.holder, a.Begins = name, t.holder, a.Backend.Port > 0
		if a.Begins {
			k.open[p] = a
		}
		if a.Verdict != model.Pass {
			return a
		}
	}
	return Answer{}
}

// End ends a connection.
func (k *Kernel) End(p Packet) { k.with(Name, func(*table) { delete(k.open, p) }) }

// Do lends the rows of the plane Name, for reading or for doing what another program might do to them.
func (k *Kernel) Do(f func(*model.State)) { k.with(Name, func(t *table) { f(t.rows) }) }

// with lends the table of a name, an empty one if there is none.
func (k *Kernel) with(name string, f func(*table)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.tables == nil {
		k.tables, k.open = map[string]*table{}, map[Packet]Answer{}
	}
	t, ok := k.tables[name]
	if !ok {
		t = &table{rows: model.NewState(), sessions: map[dataplane.Session]dataplane.Session{}}
	}
	f(t)
	if k.tables[name] = t; t.process == nil && t.rows.Rows() == 0 {
		delete(k.tables, name)
	}
}

// end ends connections with their holder.
func (k *Kernel) end(holder any) {
	maps.DeleteFunc(k.open, func(_ Packet, a Answer) bool { return a.holder == holder })
}

func (k *Kernel) count(holder any) (n int) {
	for _, a := range k.open {
		if a.holder == holder {
			n++
		}
	}
	return n
}

// decide does what the specification says of the first packet of a connection, if the table serves.
func (t *table) decide(p model.Packet, chosen *int) Answer {
	if t.stage == dataplane.Draining || t.nature == Relayed && (t.process == nil || t.stage == dataplane.Standby) {
		return Answer{}
	}
	d := t.rows.Lookup(p)
	pool := t.rows.Pools[d.Pool]
	if len(pool.Serving()) == 0 {
		return Answer{Verdict: d.Verdict}
	}
	key := dataplane.Session{Pool: d.Pool, Client: p.Source}
	one := t.sessions[key]
	b, _ := pool.At(one.Backend)
	if b.Weight == 0 || pool.Affinity == 0 || !time.Now().Before(one.Until) {
		b = inTurn(pool, chosen)
	}
	if one = key; pool.Affinity > 0 {
		one.Backend, one.Until = b.AddrPort(), time.Now().Add(pool.Affinity)
		t.sessions[key] = one
	}
	if t.process != nil {
		t.process.served[dataplane.Served{Pool: d.Pool, Backend: b.AddrPort()}]++
	}
	return Answer{Verdict: d.Verdict, Backend: b, Masquerade: d.Masquerade(b)}
}

// inTurn takes backends in an order that mixes them, each as often as its weight says. The factor is a prime number.
func inTurn(pool model.Pool, chosen *int) model.Backend {
	var all []model.Backend
	for _, b := range pool.Backends {
		all = append(all, slices.Repeat([]model.Backend{b}, int(b.Weight))...)
	}
	*chosen++
	return all[*chosen*2654435761%len(all)]
}

// apply changes rows. A session ends when its backend leaves the pool: it does not come back with the backend.
func (t *table) apply(c model.Change) {
	t.rows.Apply(c)
	for id, pool := range c.Pools.Set.All() {
		maps.DeleteFunc(t.sessions, func(key, one dataplane.Session) bool {
			b, _ := pool.At(one.Backend)
			return key.Pool == id && b.Weight == 0
		})
	}
}

// New opens the plane Name, whose connections are Tracked. It is a dataplane.New.
func (k *Kernel) New(c dataplane.Config) (dataplane.Dataplane, error) {
	return k.Driver(Name, Tracked).Open(c)
}

// Driver is that of planes with a name.
func (k *Kernel) Driver(name string, n Nature) dataplane.Driver {
	open := func(c dataplane.Config) *plane {
		return &plane{kernel: k, name: name, nature: n, config: c, served: map[dataplane.Served]uint64{}}
	}
	d := dataplane.Driver{
		Name: name,
		Open: func(c dataplane.Config) (dataplane.Dataplane, error) { return open(c), nil },
		Inspect: func() (left dataplane.Leftover, _ error) {
			k.with(name, func(t *table) { left.Rules, left.Retired = k.tables[name] != nil, t.stage == dataplane.Draining })
			return left, nil
		},
		Sessions: func(ctx context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
			return open(c).Sessions(ctx, s)
		},
		Remove: func(ctx context.Context, c dataplane.Config) error { return open(c).Remove(ctx) },
	}
	switch n {
	case Tabled:
		d.Drain = func(ctx context.Context, c dataplane.Config) (int, error) { return open(c).drain(ctx) }
	case Relayed:
		d.Carries = func(netip.Addr) bool { return false } // the process connects as the client
	}
	return d
}

// plane does one operation after the other, so that a fault, or the end of the context, leaves the Kernel half-way.
type plane struct {
	dataplane.Base
	kernel  *Kernel
	name    string
	nature  Nature
	config  dataplane.Config
	learned dataplane.Learned
	synced  bool
	served  map[dataplane.Served]uint64 // connections, by pool and backend
	stage   dataplane.Stage             // that the table gets with all rows
}

// do performs an operation on the plane's table, if none before it has failed.
func (p *plane) do(err *error, operation string, f func(*table)) {
	if *err != nil {
		return
	}
	if *err = p.config.Inject(operation); *err != nil {
		*err = fmt.Errorf("%s: %w", operation, *err)
		return
	}
	p.kernel.with(p.name, f)
}

// Sync has a table that is Draining take new connections when it holds all rows, not before.
func (p *plane) Sync(ctx context.Context, s *model.State) (err error) {
	var c model.Change
	p.do(&err, "table open", func(t *table) {
		t.process, t.nature, t.holder, p.synced = p, p.nature, [...]any{nil, t, p}[p.nature], true
		t.stage = max(t.stage, p.stage)
	})
	if err == nil {
		p.learned.TakeIn(p.config.Log, p.take)
	}
	p.do(&err, "rows read", func(t *table) { c = model.Diff(t.rows, s) })
	p.perform(ctx, &err, c)
	p.forget(&err, s)
	p.do(&err, "stage set", func(t *table) { t.stage = p.stage })
	return err
}

func (p *plane) Apply(ctx context.Context, s *model.State, c model.Change) (err error) {
	p.perform(ctx, &err, c)
	p.forget(&err, s)
	return err
}

func (p *plane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return p.Sync(ctx, s)
}

func (p *plane) Remove(ctx context.Context) (err error) {
	var c model.Change
	p.do(&err, "rows read", func(t *table) { c = model.Diff(t.rows, model.NewState()) })
	p.perform(ctx, &err, c)
	p.do(&err, "table delete", func(t *table) {
		t.process = nil
		p.kernel.end(t)
	})
	return err
}

// Close does what the death of the process does.
func (p *plane) Close() error {
	p.kernel.with(p.name, func(t *table) {
		if t.process == p {
			t.process = nil
		}
		p.kernel.end(p)
	})
	return nil
}

func (p *plane) Audit(_ context.Context, s *model.State, _ dataplane.Depth) (r dataplane.Report, err error) {
	p.forget(&err, s) // if rows went in Standby
	p.do(&err, "rows read", func(t *table) {
		missing := surplus(s, t.rows, dataplane.Drift{Want: "a row"})
		r.Drifts = append(missing, surplus(t.rows, s, dataplane.Drift{Have: "a row"})...)
	})
	return r, err
}

// surplus are the rows, in text form, that only the first of two States has.
func surplus(one, other *model.State, as dataplane.Drift) (all []dataplane.Drift) {
	others := other.Lines()
	for _, as.Object = range one.Lines() {
		if _, ok := slices.BinarySearch(others, as.Object); !ok {
			as.Class, _, _ = strings.Cut(as.Object, " ")
			all = append(all, as)
		}
	}
	return all
}

// perform keeps an order in which no row refers to a pool that is not there, and no guard takes the packets of a
// frontend that is still to come.
func (p *plane) perform(ctx context.Context, err *error, c model.Change) {
	set := func(operation string, c model.Change) {
		*err = cmp.Or(*err, ctx.Err())
		p.do(err, operation, func(t *table) { t.apply(c) })
	}
	pools, frontends := c.Pools, c.Frontends
	pools.Delete, frontends.Delete, c.Pools.Set, c.Frontends.Set = nil, nil, nil, nil
	set("pool set", model.Change{Pools: pools, Health: c.Health, Pods: c.Pods})
	set("frontend set", model.Change{Frontends: frontends})
	set("guard set", model.Change{Guards: c.Guards})
	set("frontend and pool delete", model.Change{Frontends: c.Frontends, Pools: c.Pools})
}

// forget ends flows of UDP whose row or backend is gone, by whichever plane: their clients would not notice.
func (p *plane) forget(err *error, s *model.State) {
	p.do(err, "flows forget", func(*table) {
		maps.DeleteFunc(p.kernel.open, func(k Packet, a Answer) bool {
			_, ok := s.Pools[s.Lookup(k.Packet).Pool].At(a.Backend.AddrPort())
			return !ok && k.Protocol == model.UDP && p.stage == dataplane.Active
		})
	})
}

// SetStage leaves a table alone that is not this plane's: before the first Sync, or when a younger one has it.
func (p *plane) SetStage(_ context.Context, _ *model.State, to dataplane.Stage) (_ int, err error) {
	p.do(&err, "stage set", func(t *table) {
		if p.stage = to; t.process == p {
			t.stage = to
		}
	})
	return p.Open(), err
}

func (p *plane) Open() (n int) {
	p.kernel.with(p.name, func(*table) { n = p.kernel.count(p) })
	return n
}

// drain removes the table when no connection needs it any more. Until then it takes nothing new.
func (p *plane) drain(ctx context.Context) (need int, err error) {
	p.do(&err, "stage set", func(t *table) { t.stage, need = dataplane.Draining, p.kernel.count(t) })
	if err != nil || need > 0 {
		return need, err
	}
	return 0, p.Remove(ctx)
}

func (p *plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		var all []dataplane.Session
		var err error
		p.do(&err, "sessions read", func(t *table) { all = slices.Collect(maps.Values(t.sessions)) })
		for _, one := range all {
			if s.Pools[one.Pool].Affinity > 0 && time.Now().Before(one.Until) && !yield(one, nil) {
				return
			}
		}
		if err != nil {
			yield(dataplane.Session{}, err)
		}
	}
}

func (p *plane) Learn(_ context.Context, s *model.State, all iter.Seq2[dataplane.Session, error]) (int, error) {
	if p.synced {
		return dataplane.Take(s, all, p.take)
	}
	return p.learned.Keep(s, all)
}

// take has the table remember what it does not remember for as long, which is known to the second.
func (p *plane) take(m *dataplane.Sessions) (n int, err error) {
	p.do(&err, "sessions set", func(t *table) {
		for one := range m.All() {
			key := dataplane.Session{Pool: one.Pool, Client: one.Client}
			if one.Until.Sub(t.sessions[key].Until) > time.Second {
				t.sessions[key] = one
				n++
			}
		}
	})
	return n, err
}

func (p *plane) Counters(context.Context) (c dataplane.Counters, err error) {
	p.do(&err, "counters read", func(*table) {
		for row, n := range p.served {
			row.Connections = n
			c.Served = append(c.Served, row)
		}
	})
	c.Connections = true
	c.Sort()
	return c, err
}
