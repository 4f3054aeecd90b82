package memory

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
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
	process  *plane // that has synced the table last; nil: it is closed, or has died
	holder   any    // with what connections end that begin: process, this table, or nil
	sessions map[session]dataplane.Session
	served   map[dataplane.Served]uint64 // connections, by pool and backend
}

// session tells one from another.
type session struct {
	pool   model.PoolID
	client netip.Addr
}

// A Packet is equal to all others of its connection, or its flow of UDP.
type Packet struct {
	model.Packet
	SourcePort uint16
}

// Answer is what became of a packet.
type Answer struct {
	Verdict    model.Verdict
	Backend    model.Backend // of Forward
	Masquerade bool          // the backend sees the node as the client
	Plane      string        // that decided it; empty: no plane had a row
	Begins     bool          // the packet is the first one of a connection
	holder     any           // see table
}

// Send sends a packet. One of an open connection goes to its backend. Any other is decided by the first table that serves
// and has a row for it, in the order of names.
func (k *Kernel) Send(p Packet) Answer {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a, ok := k.open[p]; ok {
		a.Begins = false
		return a
	}
	for _, name := range slices.Sorted(maps.Keys(k.tables)) {
		t := k.tables[name]
		asleep := t.nature == Carried && (t.process == nil || t.stage == dataplane.Standby)
		if asleep || t.stage == dataplane.Draining {
			continue
		}
		a := t.decide(p.Packet, &k.chosen)
		if a.Verdict == model.Pass {
			continue
		}
		a.Plane, a.holder, a.Begins = name, t.holder, a.Verdict == model.Forward
		if a.Begins {
			k.open[p] = a
		}
		return a
	}
	return Answer{}
}

// End ends a connection.
func (k *Kernel) End(p Packet) { k.with(Name, func(*table) { delete(k.open, p) }) }

// Do lends the rows of the plane Name, for reading or for doing what another program might do to them.
func (k *Kernel) Do(f func(*model.State)) { k.with(Name, func(t *table) { f(t.rows) }) }

// String is these rows in canonical text form.
func (k *Kernel) String() (text string) {
	k.Do(func(rows *model.State) { text = rows.String() })
	return text
}

// with lends the table of a name, an empty one if there is none.
func (k *Kernel) with(name string, f func(*table)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.tables == nil {
		k.tables, k.open = map[string]*table{}, map[Packet]Answer{}
	}
	t := k.tables[name]
	if t == nil {
		t = &table{rows: model.NewState(), served: map[dataplane.Served]uint64{}}
		t.sessions = map[session]dataplane.Session{}
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

// decide does what the specification says of the first packet of a connection.
func (t *table) decide(p model.Packet, chosen *int) Answer {
	d := t.rows.Lookup(p)
	pool := t.rows.Pools[d.Pool]
	if d.Verdict == model.Forward && len(pool.Serving()) == 0 { // another program has deleted the pool
		d.Verdict = model.Drop
	}
	if d.Verdict != model.Forward {
		return Answer{Verdict: d.Verdict}
	}
	one := session{d.Pool, p.Source}
	b, ok := at(pool.Serving(), t.sessions[one].Backend)
	if !ok || pool.Affinity == 0 || !time.Now().Before(t.sessions[one].Until) {
		b = inTurn(pool, chosen)
	}
	if pool.Affinity > 0 {
		until := time.Now().Add(pool.Affinity)
		t.sessions[one] = dataplane.Session{Pool: d.Pool, Client: p.Source, Backend: b.AddrPort(), Until: until}
	}
	t.served[dataplane.Served{Pool: d.Pool, Backend: b.AddrPort()}]++
	return Answer{Verdict: d.Verdict, Backend: b, Masquerade: d.Masquerade(b)}
}

// inTurn takes backends one after the other, each as often as its weight says.
func inTurn(pool model.Pool, chosen *int) model.Backend {
	var all []model.Backend
	for _, b := range pool.Backends {
		all = append(all, slices.Repeat([]model.Backend{b}, int(b.Weight))...)
	}
	*chosen++
	return all[*chosen%len(all)]
}

// at is the backend at an address.
func at(all []model.Backend, addr netip.AddrPort) (b model.Backend, ok bool) {
	i := slices.IndexFunc(all, func(b model.Backend) bool { return b.AddrPort() == addr })
	if ok = i >= 0; ok {
		b = all[i]
	}
	return b, ok
}

// apply changes rows. A session ends when its backend leaves the pool: it does not come back with the backend.
func (t *table) apply(c model.Change) {
	t.rows.Apply(c)
	for id, pool := range c.Pools.Set.All() {
		maps.DeleteFunc(t.sessions, func(_ session, one dataplane.Session) bool {
			_, ok := at(pool.Serving(), one.Backend)
			return one.Pool == id && !ok
		})
	}
}
