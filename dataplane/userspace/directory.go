package userspace

import (
	"iter"
	"maps"
	"net/netip"
	"sync"
	"time"

	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// directory is what the goroutines that serve connections know of the rows. The plane's goroutine alone changes it.
type directory struct {
	mu    sync.RWMutex
	rows  map[model.Key]row
	pools map[model.PoolID]*pool
}

// row is a frontend that forwards.
type row struct {
	snat  model.SNAT
	allow model.Frontend // for Allows: a row may have changed after the packet has passed the kernel's rules
	pool  *pool
}

func newDirectory() *directory {
	return &directory{rows: map[model.Key]row{}, pools: map[model.PoolID]*pool{}}
}

// packet is the first one of a connection.
type packet struct {
	protocol            model.Protocol
	client, destination netip.AddrPort
	origin              origin
	redirected          *redirection // to the sockets that answer; nil: brought by TPROXY
}

// decision says where a connection may go, and as whom.
type decision struct {
	key  model.Key
	pool *pool
	snat bool
}

// service is the name of the Service that a connection is for.
func (d decision) service() string { return d.pool.id.Service }

// owner is whose the connection of a client is.
func (d decision) owner(client netip.AddrPort) share.Owner {
	return share.Of(d.service(), share.At(client.Addr()))
}

// lookup is State.Lookup for what the kernel's rules have let through; ok is false if there is no row any more.
func (d *directory) lookup(p packet) (decision, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	key := model.Key{Addr: p.destination.Addr(), Port: p.destination.Port(), Protocol: p.protocol, Scope: model.Internal}
	r, ok := d.rows[key]
	if !ok || p.origin == elsewhere {
		key.Scope = model.Any
		r, ok = d.rows[key]
	}
	if !ok || r.pool == nil || !r.allow.Allows(p.client.Addr()) {
		return decision{}, false
	}
	snat := r.snat == model.Always || r.snat == model.OffCluster && p.origin != fromPod
	return decision{key: key, pool: r.pool, snat: snat}, true
}

// masquerade is model.Decision.Masquerade. A loopback address means the node itself, wherever the packet goes.
func (d decision) masquerade(client netip.Addr, b model.Backend) bool {
	return d.snat || client.IsLoopback() || b.Local && b.Addr == client
}

// replace makes the directory hold exactly s. Pools keep what they remember.
func (d *directory) replace(s *model.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.pools {
		if _, ok := s.Pools[id]; !ok {
			delete(d.pools, id)
		}
	}
	d.setPools(maps.All(s.Pools))
	clear(d.rows)
	d.setRows(maps.All(s.Frontends))
}

// change performs a Change.
func (d *directory) change(c model.Change) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setPools(c.Pools.Set.All())
	d.setRows(c.Frontends.Set.All())
	for _, key := range c.Frontends.Delete {
		delete(d.rows, key)
	}
	for _, id := range c.Pools.Delete {
		delete(d.pools, id)
	}
}

func (d *directory) setPools(pools iter.Seq2[model.PoolID, model.Pool]) {
	for id, p := range pools {
		if d.pools[id] == nil {
			d.pools[id] = newPool(id)
		}
		d.pools[id].set(p)
	}
}

func (d *directory) setRows(frontends iter.Seq2[model.Key, model.Frontend]) {
	for key, f := range frontends {
		if f.Verdict != model.Forward {
			delete(d.rows, key)
			continue
		}
		d.rows[key] = row{snat: f.SNAT, allow: f, pool: d.pools[f.Pool]}
	}
}

func (d *directory) pool(id model.PoolID) *pool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.pools[id]
}

// leads reports whether a destination's row of any scope still leads to a pool. It tells which flows are to end.
func (d *directory) leads(key model.Key, p *pool) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.rows[key].pool == p
}

// forget has the pools forget clients whose time has run out.
func (d *directory) forget(now time.Time) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, p := range d.pools {
		p.forget(now)
	}
}
