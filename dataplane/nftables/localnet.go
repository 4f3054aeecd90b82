package nftables

import (
	"errors"
	"fmt"
	"iter"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// chainLocalnet records that it was we who set the sysctl route_localnet.
const chainLocalnet = "route-localnet-was-off"

// prepare sets the sysctl in favour of a later process that may not, in a pod with CAP_NET_ADMIN alone.
// The rule that belongs to it, and the record that it was off, are there before.
func prepare(c dataplane.Config) (err error) {
	opened, err := New(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opened.Close()) }()
	p := opened.(*Plane)
	if p.localnet.On() {
		return nil
	}
	tx := &nft.Transaction{}
	t := p.newTables(tx)[0]
	if err := p.load(t); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	if !t.Exists {
		if err := t.structure(); err != nil {
			return err
		}
	}
	if err := t.SetChain(nft.Chain{Name: chainLocalnet}); err != nil {
		return err
	}
	if err := p.ruleset.Commit(tx); err != nil {
		return err
	}
	return p.localnet.Set("1")
}

// needLocalnet records, in the transaction, that the sysctl is about to be set, or that another plane has set it.
func (t *table) needLocalnet(frontends iter.Seq2[model.Key, model.Frontend]) error {
	if t.Family.V6() || t.localnet {
		return nil
	}
	for key, f := range frontends {
		if f.Verdict == model.Forward && localnet.Contains(key.Addr) {
			t.localnet = true
			break
		}
	}
	needed := t.localnet && !t.localnetIsOn || t.localnetWasOff
	if _, recorded := t.Chains[chainLocalnet]; recorded || !needed {
		return nil
	}
	return t.SetChain(nft.Chain{Name: chainLocalnet})
}

// settleLocalnet sets the sysctl if it is needed, and puts it back if it no longer is and we set it.
func (p *Plane) settleLocalnet(tables []*table) error {
	for _, t := range tables {
		if t.localnet && !p.localnet.On() {
			return p.localnet.Set("1")
		}
	}
	return nil
}

// removeLocalnet puts the sysctl back before the table goes that says that we set it.
func (p *Plane) removeLocalnet(t *table) error {
	err := t.LoadChains(p.ruleset.Socket, nil)
	if _, recorded := t.Chains[chainLocalnet]; recorded && !p.config.KeepLocalnet {
		err = errors.Join(err, p.localnet.Set("0"))
	}
	return err
}
