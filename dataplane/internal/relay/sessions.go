package relay

import (
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
)

// Pools remember sessions of clients for the set in the kernel, and for other planes.

const (
	// maxSaved bounds what is written at once.
	maxSaved = 1 << 17
	// saveShare is which part of the time for which a pool remembers clients the set may lag behind.
	saveShare = 8
	// ending is the remaining time from which it is uncertain whether an element is still there.
	ending = 2 * time.Second
)

// A Session is what a pool remembers of a client.
type Session struct {
	dataplane.Session
	Lasts time.Duration
	Saved time.Time // until when the set has some backend for the client; zero: it has none
	pool  *pool
}

// Unsaved are the clients of whom the set is to be told: all of whom it does not know the last, or those that need it.
func (d *Directory) Unsaved(all bool, now time.Time) (found []Session) {
	d.eachPool(func(p *pool) {
		if len(found) < maxSaved {
			found = p.appendUnsaved(found, all, now)
		}
	})
	return found
}

// appendUnsaved adds those of a pool. The caller holds the lock.
func (p *pool) appendUnsaved(found []Session, all bool, now time.Time) []Session {
	add := func(client netip.Addr) {
		c, ok := p.clients[client]
		switch {
		case ok && len(found) >= maxSaved, ok && c.saved.After(now) && c.saved.Before(now.Add(ending)):
			return // next time
		case ok && now.Before(c.until):
			found = append(found, Session{
				Session: dataplane.Session{Pool: p.id, Client: client, Backend: c.backend, Until: c.until},
				Lasts:   p.affinity, Saved: c.saved, pool: p,
			})
		}
		delete(p.dirty, client)
	}
	if !all {
		for client := range p.dirty {
			add(client)
		}
		return found
	}
	for client, c := range p.clients {
		if c.until.Sub(c.saved) > time.Second {
			add(client)
		}
	}
	return found
}

// Settle notes what the set has, or has not.
func Settle(all []Session, done bool) {
	for _, m := range all {
		m.pool.settle(m, done)
	}
}

func (p *pool) settle(m Session, done bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !done {
		p.dirty[m.Client] = struct{}{}
	} else if c, ok := p.clients[m.Client]; ok {
		c.saved = m.Until
		p.clients[m.Client] = c
	}
}

// Lose notes that the set has lost all clients, so that all are written again.
func (d *Directory) Lose() {
	d.eachPool(func(p *pool) {
		for client, c := range p.clients {
			c.saved = time.Time{}
			p.clients[client] = c
			p.dirty[client] = struct{}{}
		}
	})
}

// EachClient calls f for each client that is remembered.
func (d *Directory) EachClient(now time.Time, f func(dataplane.Session)) {
	d.eachPool(func(p *pool) {
		for client, c := range p.clients {
			if now.Before(c.until) {
				f(dataplane.Session{Pool: p.id, Client: client, Backend: c.backend, Until: c.until})
			}
		}
	})
}

// remember has a client keep a backend. It reports false if the pool is full, or has no such backend.
func (p *pool) remember(client netip.Addr, c choice) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, known := p.clients[client]
	if !known && len(p.clients) >= maxClients || !p.has(c.backend) || p.affinity == 0 {
		return false
	}
	p.note(client, c)
	return true
}

// note keeps what is known of a client, and has it saved if the set lags too far behind.
func (p *pool) note(client netip.Addr, c choice) {
	if old, ok := p.clients[client]; ok && c.saved.IsZero() {
		c.saved = old.saved
		if old.backend != c.backend {
			p.dirty[client] = struct{}{}
		}
	}
	if c.until.Sub(c.saved) > p.affinity/saveShare {
		p.dirty[client] = struct{}{}
	}
	p.clients[client] = c
}

// Remember has a client keep a backend, which the set may have already. It reports false if the pool is full, or has no
// such backend.
func (d *Directory) Remember(m dataplane.Session, saved bool) bool {
	c := choice{backend: m.Backend, until: m.Until}
	if saved {
		c.saved = m.Until
	}
	p := d.pool(m.Pool)
	return p != nil && p.remember(m.Client, c)
}

// Taker takes what others remember in.
func (d *Directory) Taker() dataplane.Taker {
	return func(others *dataplane.Sessions) (n int, err error) {
		d.EachClient(time.Now(), func(own dataplane.Session) { others.Supersedes(own) })
		for m := range others.All() {
			if d.Remember(m, false) {
				n++
			}
		}
		return n, nil
	}
}
