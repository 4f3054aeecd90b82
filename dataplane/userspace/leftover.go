package userspace

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
)

// inspect tells what this data plane has left in the network namespace of the calling thread.
func inspect() (t dataplane.Leftover, err error) {
	p, err := look(dataplane.Config{})
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for i, family := range families() {
		table := p.newTable(i, &nft.Transaction{})
		// EINVAL: the kernel has no nf_tables.
		if err := table.LoadTable(p.ruleset.Socket); err != nil && !errors.Is(err, unix.EINVAL) {
			return t, fmt.Errorf("userspace: %w", err)
		}
		have, err := p.routes.load(family)
		if err != nil {
			return t, fmt.Errorf("userspace: %w", err)
		}
		t.Rules = t.Rules || table.Exists || len(have.rules)+len(have.routes)+len(have.own) > 0
	}
	return t, nil
}

// look makes a plane that is not asked to serve anything.
func look(c dataplane.Config) (*Plane, error) {
	p, err := open(c, Options{})
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	return p, nil
}
