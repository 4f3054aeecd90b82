package relay

import (
	"iter"
	"maps"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// A Directory is what the goroutines that serve connections know of the rows. The plane's goroutine alone changes it.
type Directory struct {
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

func newDirectory() *Directory {
	return &Directory{rows: map[model.Key]row{}, pools: map[model.PoolID]*pool{}}
}

// A Packet is the first one of a connection.
type Packet struct {
	Protocol            model.Protocol
	Client, Destination netip.AddrPort
	Internal            bool     // rows of scope Internal are for the client
	Pod                 bool     // it is a pod
	From                *Answers // of a datagram: nil: its destination
}

// Endpoint is a destination, whatever the scope.
type Endpoint struct {
	netip.AddrPort
	Protocol model.Protocol
}

// EndpointOf is that of a row.
func EndpointOf(key model.Key) Endpoint { return Endpoint{key.AddrPort(), key.Protocol} }

// Touched are the destinations of rows that a change sets or deletes.
func Touched(c model.Change) map[Endpoint]bool {
	touched := map[Endpoint]bool{}
	for key := range c.Frontends.Keys() {
		touched[EndpointOf(key)] = true
	}
	return touched
}

func (e Endpoint) String() string { return e.AddrPort.String() + "/" + e.Protocol.String() }

// decision says where a connection may go, and as whom.
type decision struct {
	key  model.Key
	pool *pool
	snat bool
}

// service is the name of the Service that a connection is for.
func (d decision) service() string { return d.pool.id.Service }

// owner is whose a packet's place is. All processes of a node that ask a loopback address are one client.
func (d decision) owner(at Packet) share.Owner {
	return share.Of(d.service(), share.At(at.Client.Addr()))
}

// lookup is State.Lookup for what the kernel's rules have let through; ok is false if there is no row any more.
func (d *Directory) lookup(p Packet) (decision, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	key := model.Key{Addr: p.Destination.Addr(), Port: p.Destination.Port(), Protocol: p.Protocol, Scope: model.Internal}
	r, ok := d.rows[key]
	if !ok || !p.Internal {
		key.Scope = model.Any
		r, ok = d.rows[key]
	}
	if !ok || r.pool == nil || !r.allow.Allows(p.Client.Addr()) {
		return decision{}, false
	}
	snat := r.snat == model.Always || r.snat == model.OffCluster && !p.Pod
	return decision{key: key, pool: r.pool, snat: snat}, true
}

// masquerade is model.Decision.Masquerade. A loopback address means the node itself, wherever the packet goes.
func (d decision) masquerade(client netip.Addr, b model.Backend) bool {
	return d.snat || client.IsLoopback() || b.Local && b.Addr == client
}

// Replace makes the directory hold exactly s. Pools keep what they remember.
func (d *Directory) Replace(s *model.State) {
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

// Change performs a Change.
func (d *Directory) Change(c model.Change) {
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

func (d *Directory) setPools(pools iter.Seq2[model.PoolID, model.Pool]) {
	for id, p := range pools {
		if d.pools[id] == nil {
			d.pools[id] = newPool(id)
		}
		d.pools[id].set(p)
	}
}

func (d *Directory) setRows(frontends iter.Seq2[model.Key, model.Frontend]) {
	for key, f := range frontends {
		if f.Verdict != model.Forward {
			delete(d.rows, key)
			continue
		}
		d.rows[key] = row{snat: f.SNAT, allow: f, pool: d.pools[f.Pool]}
	}
}

func (d *Directory) pool(id model.PoolID) *pool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.pools[id]
}

// eachPool calls f with the pools, each under its lock.
func (d *Directory) eachPool(f func(*pool)) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, p := range d.pools {
		p.mu.Lock()
		f(p)
		p.mu.Unlock()
	}
}

// leads reports whether a destination's row of any scope still leads to a pool. It tells which flows are to end.
func (d *Directory) leads(key model.Key, p *pool) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.rows[key].pool == p
}

// Forwards reports whether a row of any scope leads somewhere.
func (d *Directory) Forwards(e Endpoint) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := model.Key{Addr: e.Addr(), Port: e.Port(), Protocol: e.Protocol, Scope: scope}
		if _, ok := d.rows[key]; ok {
			return true
		}
	}
	return false
}
