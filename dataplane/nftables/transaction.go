package nftables

import "fairlead.dev/fairlead/internal/nft"

// commit performs the steps, but for a few that the kernel refuses: the error is then dataplane.ErrPartial.
func (p *Plane) commit(t *nft.Transaction) error {
	return t.Commit(p.conn, func(steps []nft.Step) error { return p.send(t, steps) })
}

// send performs steps as one kernel transaction: all or none of them.
func (p *Plane) send(t *nft.Transaction, steps []nft.Step) error {
	if err := p.config.Inject("nftables commit"); err != nil {
		return err
	}
	err := t.Send(p.conn, steps)
	if err == nil {
		p.own++
	}
	return err
}
