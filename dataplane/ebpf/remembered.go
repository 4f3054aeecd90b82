package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

var _ dataplane.Affine = (*Plane)(nil)

// Remembered implements dataplane.Affine. Programs know a client by the network namespace of its sockets, or by the
// address of its packets: so the namespace that has the address is looked for first.
func (p *Plane) Remembered(ctx context.Context, id model.PoolID, client netip.Addr) (netip.AddrPort, bool, error) {
	if p.tables == nil || p.tables.pools[id] == nil || client.Is6() != id.V6 {
		return netip.AddrPort{}, false, nil
	}
	spaces, err := namespaces()
	if err != nil {
		return netip.AddrPort{}, false, err
	}
	keys := []objectsAddr{address(client)}
	for _, ns := range spaces {
		if cookie, err := whose(ns, client); err == nil && cookie != 0 { // else it has ended, or may not be entered
			keys = slices.Insert(keys, 0, clientOf(cookie))
		}
		ns.Close()
	}
	for _, key := range keys {
		if backend, ok, err := p.affinity(id, key); ok || err != nil {
			return backend, ok, err
		}
	}
	if behind, ok := p.behind.(dataplane.Affine); ok {
		return behind.Remembered(ctx, id, client)
	}
	return netip.AddrPort{}, false, nil
}

// clientOf is what stands for all sockets of a network namespace; see client in bpf/sock.c.
func clientOf(cookie uint64) objectsAddr {
	return objectsAddr{Word: [4]uint32{^uint32(0), 0, uint32(cookie >> 32), uint32(cookie)}}
}

// cookie is that of the namespace that a client is, if it is one.
func (a objectsAddr) cookie() (cookie uint64, ok bool) {
	return uint64(a.Word[2])<<32 | uint64(a.Word[3]), a.Word[0] == ^uint32(0) && a.Word[1] == 0
}

// affinity is the backend that a client had, if the pool has it still and not too much time has passed.
func (p *Plane) affinity(id model.PoolID, client objectsAddr) (netip.AddrPort, bool, error) {
	var a objectsAffinity
	err := p.memory[objectsMapAffinities].Lookup(objectsAffinityKey{Client: client, Pool: poolName(id)}, &a)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return netip.AddrPort{}, false, nil
	}
	if err != nil {
		return netip.AddrPort{}, false, fmt.Errorf("ebpf: remembered clients: %w", err)
	}
	clock, err := readClock()
	if err != nil {
		return netip.AddrPort{}, false, err
	}
	pool := p.tables.pools[id]
	lasts := time.Duration(p.tables.entries[pool.number].Affinity) * time.Second
	backend := a.Backend.addrPort()
	return backend, clock.wall.Sub(clock.time(a.Last)) < lasts && hasBackend(pool.backends, backend), nil
}

// whose is the cookie of a network namespace that has an address; 0: it has not.
func whose(ns *os.File, a netip.Addr) (cookie uint64, err error) {
	cookie, addrs, err := spaceOf(ns)
	if err != nil || !slices.Contains(addrs, a) {
		return 0, err
	}
	return cookie, nil
}
