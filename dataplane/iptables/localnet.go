package iptables

import (
	"context"
	"errors"
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// prepare sets the sysctl in favour of a later process that may not, in a pod with CAP_NET_ADMIN alone. The rules
// that belong to it, and the record that it was off, are there before.
func prepare(o Options) func(dataplane.Config) error {
	return func(c dataplane.Config) (err error) {
		opened, err := New(o)(c)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, opened.Close()) }()
		p := opened.(*Plane)
		if p.localnet.On() {
			return nil
		}
		if err := p.prepareLocalnet(); err != nil {
			return fmt.Errorf("iptables: %w", err)
		}
		return p.localnet.Set("1")
	}
}

// prepareLocalnet leaves what another process has programmed as it is.
func (p *Plane) prepareLocalnet() error {
	ctx, id := context.Background(), tableID{name: tableNames[nat]}
	have, err := p.backend.load(id)
	if err != nil {
		return err
	}
	record := &change{table: id, set: map[string][]rule{chainLocalnet: nil}, known: map[string]bool{}}
	if err := p.write(ctx, []*change{record}); err != nil {
		return err
	}
	if _, programmed := have.chains[chainIn]; programmed {
		return nil
	}
	return p.Sync(ctx, model.NewState())
}
