package userspace

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// What pools remember of clients is handed to the next process in the set clients: Close puts it there, the first Sync
// takes it out. Each client's time begins anew then.

// maxHanded bounds what is handed over.
const maxHanded = 1 << 17

// poolName is a pool's name in keys of the set: two words.
func poolName(id model.PoolID) string {
	hash := fnv.New64a()
	hash.Write([]byte(id.String()))
	return string(hash.Sum(nil))
}

// handOver leaves what the pools remember in the kernel, and has those wait who would be redirected to nobody. Who
// comes next may do without.
func (p *Plane) handOver() {
	if p.proxy == nil || p.tables == nil {
		return
	}
	tx := &nf.Transaction{}
	left := maxHanded
	for _, t := range p.tables {
		t.Tx = tx
		for _, protocol := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
			t.Element(unix.NFT_MSG_NEWSETELEM, away, []byte{byte(protocol), 0, 0, 0}, nil)
		}
		p.proxy.rows.eachClient(time.Now(), func(id model.PoolID, client netip.Addr, backend netip.AddrPort) {
			if left > 0 && t.Family.Mine(client) && t.Family.Mine(backend.Addr()) {
				left--
				key := append(client.AsSlice(), poolName(id)...)
				t.Element(unix.NFT_MSG_NEWSETELEM, clients, key, nf.EncodeBackend(backend))
			}
		})
	}
	err := p.commit(tx)
	if err != nil {
		err = p.commit(tx) // there is no later
	}
	if err != nil && p.config.Log != nil {
		p.config.Log.Warn("mode userspace: clients with session affinity may get other endpoints", "error", err)
	}
}

// takeOver has the pools remember what the process before has left.
func (p *Plane) takeOver(rows *directory, s *model.State) error {
	names := map[string]model.PoolID{}
	for id, pool := range s.Pools {
		if pool.Affinity > 0 {
			names[poolName(id)] = id
		}
	}
	for i := range nf.Families {
		t := p.newTable(i, &nf.Transaction{})
		if err := t.Load(p.conn, t.chains()); err != nil {
			return err
		}
		if err := p.undress(t); err != nil {
			return err
		}
		if !t.Exists || !t.FoundSets[t.Sets[clients].Name] {
			continue
		}
		err := t.List(p.conn, clients, func() {}, func(e nf.Element) {
			backend, ok := nf.DecodeBackend(e.Data)
			n := len(e.Key) - binary.Size(uint64(0))
			if !ok || n < 0 {
				return
			}
			client, ok := netip.AddrFromSlice(e.Key[:n])
			if id, known := names[string(e.Key[n:])]; ok && known {
				rows.pool(id).remember(client, backend, time.Now())
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
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

// eachClient calls f for each client that is remembered.
func (d *directory) eachClient(now time.Time, f func(model.PoolID, netip.Addr, netip.AddrPort)) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for id, p := range d.pools {
		p.mu.Lock()
		for client, c := range p.clients {
			if now.Before(c.until) {
				f(id, client, c.backend)
			}
		}
		p.mu.Unlock()
	}
}

// remember takes a client's backend over.
func (p *pool) remember(client netip.Addr, b netip.AddrPort, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.clients) < maxClients && p.has(b) {
		p.clients[client] = choice{b, now.Add(p.affinity)}
	}
}
