package userspace

import (
	"errors"
	"hash/fnv"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// What pools remember of clients outlives the process in the set clients, for the next one or another plane. Audit
// writes there who is new and who is remembered for a good deal longer, Close everything.
//
//	answered ─► clients of the pool ── unsaved ─► save ─► set clients ── eachClient ─► takeOver, Sessions

const (
	// maxSaved bounds what is written at once.
	maxSaved = 1 << 17
	// saveShare is which part of the time for which a pool remembers clients the set may lag behind.
	saveShare = 8
	// ending is when an element is so close to its end that nobody knows whether it is there.
	ending = 2 * time.Second
)

// poolName is a pool's name in keys of the set: two words.
func poolName(id model.PoolID) string {
	hash := fnv.New64a()
	hash.Write([]byte(id.String()))
	return string(hash.Sum(nil))
}

// memory is what a pool remembers of a client.
type memory struct {
	pool   *pool
	client netip.Addr
	choice
	lasts time.Duration
}

func (m memory) key() []byte { return append(m.client.AsSlice(), poolName(m.pool.id)...) }

// save brings the set up to date, and if this is the last time, to the second. Who comes next may do without.
func (p *Plane) save(last bool) {
	if p.proxy == nil || p.tables == nil {
		return
	}
	now := time.Now()
	todo := p.proxy.rows.unsaved(last, now)
	if len(todo) == 0 {
		return
	}
	err := p.write(todo, func(m memory) bool { return m.saved.After(now) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) { // somebody else has changed the set
		var there map[string]bool
		if there, err = p.savedKeys(); err == nil {
			err = p.write(todo, func(m memory) bool { return there[string(m.key())] })
		}
	}
	settle(todo, err == nil)
	if err != nil && last && p.config.Log != nil {
		p.config.Log.Warn("mode userspace: clients with session affinity may get other endpoints", "error", err)
	}
}

// write makes the set hold what clients chose, in place of what is there of them.
func (p *Plane) write(all []memory, there func(memory) bool) error {
	tx := &nf.Transaction{}
	now := time.Now()
	for i := range nf.Families {
		t := p.newTable(i, tx)
		for _, m := range all {
			if !t.Family.Mine(m.client) || !t.Family.Mine(m.backend.Addr()) {
				continue
			}
			if there(m) {
				t.Element(unix.NFT_MSG_DELSETELEM, clients, m.key(), nil)
				tx.Join()
			}
			t.Timed(t.Sets[clients], m.key(), nf.EncodeBackend(m.backend), nf.Life{Lasts: m.lasts, Left: m.until.Sub(now)})
		}
	}
	return p.commit(tx)
}

func (p *Plane) savedKeys() (map[string]bool, error) {
	keys := map[string]bool{}
	for i := range nf.Families {
		t := p.newTable(i, &nf.Transaction{})
		if err := t.List(p.conn, clients, func() {}, func(e nf.Element) { keys[string(e.Key)] = true }); err != nil {
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
		err = t.List(conn, clients, func() {}, func(e nf.Element) {
			backend, ok := nf.DecodeBackend(e.Data)
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

// handOver leaves what the pools remember in the kernel, and has those wait who would be redirected to nobody. Where
// another plane is in force, nobody is to wait, and that one remembers.
func (p *Plane) handOver() {
	if p.proxy == nil || p.tables == nil || p.phase.yields() {
		return
	}
	tx := &nf.Transaction{}
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
	if err != nil && p.config.Log != nil {
		p.config.Log.Warn("mode userspace: clients may be refused until the next process serves them", "error", err)
	}
	p.save(true)
}

// takeOver has the pools remember what the process before has left, and deletes what is of no use.
func (p *Plane) takeOver(rows *directory, s *model.State) error {
	var tables []*table
	for i := range nf.Families {
		t := p.newTable(i, &nf.Transaction{})
		if err := t.Load(p.conn, t.chains()); err != nil {
			return err
		}
		if err := p.undress(t); err != nil {
			return err
		}
		tables = append(tables, t)
	}
	return eachSaved(p.conn, tables, s, func(m dataplane.Session) {
		rows.pool(m.Pool).remember(m.Client, choice{backend: m.Backend, until: m.Until, saved: m.Until})
	})
}

// undress deletes the disguises that the process before has left.
func (p *Plane) undress(t *table) error {
	if !t.Exists || !t.FoundSets[t.Sets[disguises].Name] {
		return nil
	}
	err := t.List(p.conn, disguises, func() { t.Tx = &nf.Transaction{} }, func(e nf.Element) {
		t.Element(unix.NFT_MSG_DELSETELEM, disguises, e.Key, nil)
	})
	if err != nil || len(t.Tx.Steps) == 0 {
		return err
	}
	return p.commit(t.Tx)
}

// unsaved are the clients of whom the set is to be told: all of whom it does not know the last, or those that need it.
func (d *directory) unsaved(all bool, now time.Time) (found []memory) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, p := range d.pools {
		if len(found) < maxSaved {
			found = p.appendUnsaved(found, all, now)
		}
	}
	return found
}

func (p *pool) appendUnsaved(found []memory, all bool, now time.Time) []memory {
	p.mu.Lock()
	defer p.mu.Unlock()
	add := func(client netip.Addr) {
		c, ok := p.clients[client]
		switch {
		case ok && len(found) >= maxSaved, ok && c.saved.After(now) && c.saved.Before(now.Add(ending)):
			return // next time
		case ok && now.Before(c.until):
			found = append(found, memory{p, client, c, p.affinity})
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

// settle notes what the set has, or has not.
func settle(all []memory, done bool) {
	for _, m := range all {
		m.pool.settle(m, done)
	}
}

func (p *pool) settle(m memory, done bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !done {
		p.dirty[m.client] = struct{}{}
	} else if c, ok := p.clients[m.client]; ok {
		c.saved = m.until
		p.clients[m.client] = c
	}
}

// lose notes that the set has nobody.
func (d *directory) lose() {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, p := range d.pools {
		p.mu.Lock()
		for client, c := range p.clients {
			c.saved = time.Time{}
			p.clients[client] = c
			p.dirty[client] = struct{}{}
		}
		p.mu.Unlock()
	}
}

// eachClient calls f for each client that is remembered.
func (d *directory) eachClient(now time.Time, f func(dataplane.Session)) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for id, p := range d.pools {
		p.mu.Lock()
		for client, c := range p.clients {
			if now.Before(c.until) {
				f(dataplane.Session{Pool: id, Client: client, Backend: c.backend, Until: c.until})
			}
		}
		p.mu.Unlock()
	}
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
