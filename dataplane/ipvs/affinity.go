package ipvs

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// forget deletes the backends that have left their pools from the memory of affinity. It comes after the
// change, when no packet can choose them any more.
func (p *Plane) forget(k *kernel, needed bool) error {
	if !needed {
		return nil
	}
	byNumber := map[uint32]*poolUse{}
	for _, use := range k.pools {
		if use.row.Affinity > 0 {
			byNumber[use.number] = use
		}
	}
	return p.ruleset.Retry(k.tx, func() error {
		for _, t := range k.tables {
			if err := p.config.Inject("nftables list"); err != nil {
				return err
			}
			if err := t.forgetSteps(p, byNumber); err != nil {
				return fmt.Errorf("list sessions: %w", err)
			}
		}
		return nil
	})
}

// forgetSteps makes steps that delete clients whose backend does not serve their pool any more. It lists the set of
// clients first: the kernel refuses to delete an element that is not there.
func (t *table) forgetSteps(p *Plane, pools map[uint32]*poolUse) error {
	for number := range t.memories {
		known := map[string]bool{}
		err := t.ListOf(p.ruleset.Socket, t.clientsOf(number), func() { clear(known) }, func(e nft.Element) {
			known[string(e.Key)] = true
		})
		if err != nil {
			return err
		}
		var stale []string
		err = t.ListOf(p.ruleset.Socket, t.affinityOf(number), func() { stale = nil }, func(e nft.Element) {
			backend, ok := nft.DecodeBackend(e.Data)
			if use := pools[number]; !ok || use == nil || !serves(use.row, backend) {
				stale = append(stale, string(e.Key))
			}
		})
		if err != nil {
			return err
		}
		for _, key := range stale {
			if known[key] {
				t.ElementOf(unix.NFT_MSG_DELSETELEM, t.clientsOf(number), []byte(key), nil)
			}
			t.ElementOf(unix.NFT_MSG_DELSETELEM, t.affinityOf(number), []byte(key), nil)
		}
	}
	return nil
}

func serves(p model.Pool, backend netip.AddrPort) bool {
	b, _ := p.At(backend)
	return b.Weight > 0
}
