package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/internal/nft"
)

// inspect tells what this data plane has left in the network namespace of the calling thread.
func inspect() (t dataplane.Leftover, err error) {
	p, err := look(dataplane.Config{})
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for _, table := range p.newTables(&nft.Transaction{}) {
		err := table.LoadTable(p.ruleset.Socket)
		if err == nil && table.Exists {
			err = table.LoadChains(p.ruleset.Socket, nil)
		}
		if errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
			return t, nil
		}
		if err != nil {
			return t, fmt.Errorf("nftables: %w", err)
		}
		_, recorded := table.Chains[chainLocalnet]
		t.Rules, t.LocalnetWasOff = t.Rules || table.Exists, t.LocalnetWasOff || recorded
	}
	return t, nil
}

// look makes a plane that is not asked to program anything.
func look(c dataplane.Config) (*Plane, error) {
	ruleset, err := nft.Open(c.Inject)
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return &Plane{config: c, ruleset: ruleset, localnet: localnet.Open()}, nil
}
