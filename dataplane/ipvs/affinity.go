package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

const forgetTries = 5

// forget deletes the backends that have left their pools from the memory of affinity. It comes after the
// change, when nobody can choose them any more.
func (p *Plane) forget(k *kernel, needed bool) (err error) {
	if !needed {
		return nil
	}
	byNumber := map[uint32]*poolUse{}
	for _, use := range k.pools {
		if use.row.Affinity > 0 {
			byNumber[use.number] = use
		}
	}
	for range forgetTries {
		for _, t := range k.tables {
			if err := p.fault("nftables list"); err != nil {
				return err
			}
			if err := t.forgetSteps(p, byNumber); err != nil {
				return fmt.Errorf("list remembered clients: %w", err)
			}
		}
		if err = p.commit(k.tx); !errors.Is(err, unix.ENOENT) { // ENOENT: a client's time ran out meanwhile
			return err
		}
		*k.tx = nf.Transaction{}
	}
	return err
}

func (t *table) forgetSteps(p *Plane, pools map[uint32]*poolUse) error {
	present := map[string]bool{}
	err := t.List(p.conn, clients, func() { clear(present) }, func(e nf.Element) {
		present[string(e.Key)] = true
	})
	if err != nil {
		return err
	}
	var stale []string
	err = t.List(p.conn, affinity, func() { stale = nil }, func(e nf.Element) {
		_, number, ok := decodeClient(e.Key)
		backend, ok2 := nf.DecodeBackend(e.Data)
		if use := pools[number]; !ok || !ok2 || use == nil || !serves(use.row, backend) {
			stale = append(stale, string(e.Key))
		}
	})
	for _, key := range stale {
		if present[key] {
			t.element(unix.NFT_MSG_DELSETELEM, entry{clients, key, ""})
		}
		t.element(unix.NFT_MSG_DELSETELEM, entry{affinity, key, ""})
	}
	return err
}

func serves(p model.Pool, backend netip.AddrPort) bool {
	return slices.ContainsFunc(p.Backends, func(b model.Backend) bool { return b.AddrPort() == backend && b.Weight > 0 })
}

func decodeClient(key []byte) (client netip.Addr, pool uint32, ok bool) {
	if len(key) < 4 {
		return client, 0, false
	}
	n := len(key) - 4
	client, ok = netip.AddrFromSlice(key[:n])
	return client, nf.Number(key[n:]), ok
}

// Remembered implements dataplane.Affine.
func (p *Plane) Remembered(
	_ context.Context, id model.PoolID, client netip.Addr,
) (backend netip.AddrPort, ok bool, err error) {
	if p.held == nil || p.held.pools[id] == nil || client.Is6() != id.V6 {
		return backend, false, nil
	}
	t, want := p.held.tables[index(id.V6)], p.held.pools[id].number
	known := false
	err = t.List(p.conn, clients, func() { known = false }, func(e nf.Element) {
		c, n, whole := decodeClient(e.Key)
		known = known || whole && c == client && n == want
	})
	if err != nil || !known {
		return backend, false, err
	}
	err = t.List(p.conn, affinity, func() { ok = false }, func(e nf.Element) {
		if c, n, whole := decodeClient(e.Key); whole && c == client && n == want {
			backend, ok = nf.DecodeBackend(e.Data)
		}
	})
	if err != nil {
		return backend, false, fmt.Errorf("ipvs: list remembered clients: %w", err)
	}
	return backend, ok, nil
}
