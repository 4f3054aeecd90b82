package userspace

import (
	"context"
	"errors"
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// phase is what becomes of packets that begin something.
//
//	closed ─ Sync ─► serving ─ Drain ─► draining ─ Sync ─┐
//	  └──── Sync, in Standby ───► waiting ◄──────────────┤
//	                              waiting ─ Enter ─► serving
type phase int

const (
	closed   phase = iota // there was no Sync yet
	waiting               // another plane is in force still: everything is prepared, and nothing is taken
	serving               // they are taken
	draining              // another plane is in force, see Drain
)

// yields reports whether they are another plane's.
func (p phase) yields() bool { return p == waiting || p == draining }

// begin is for Sync. A plane that serves goes on with that, whatever else may be there.
func (p *Plane) begin() {
	if p.phase == serving {
		return
	}
	p.phase = serving
	if p.standby {
		p.phase = waiting
	}
	if p.proxy != nil {
		p.proxy.Hurry(p.phase == waiting)
	}
}

// SetStage implements dataplane.Handover.
func (p *Plane) SetStage(ctx context.Context, s *model.State, to dataplane.Stage) (open int, err error) {
	p.standby = to == dataplane.Standby
	if p.over != nil {
		_, err = p.over.SetStage(ctx, s, to)
	}
	switch {
	case err != nil:
	case to == dataplane.Active:
		_ = p.Outcomes(ctx, false, func(model.Outcome) {}) // old ones: the engine asked another plane
		err = p.enter(ctx)
	case to == dataplane.Draining, p.listens(): // the next plane is to have the addresses
		err = p.drain(ctx, s)
	}
	return p.Open(), err
}

// enter takes packets: a few rules, those that lead packets to the sockets, become what they are else.
func (p *Plane) enter(ctx context.Context) error {
	if p.phase != waiting || p.listens() {
		return nil
	}
	if p.translates() {
		return p.enterOver(ctx)
	}
	if p.tables == nil {
		return errors.New("userspace: the kernel's content is not known; Sync first")
	}
	err := p.turn(serving)
	if dataplane.Known(err) {
		p.proxy.Hurry(false)
		p.save(false) // now: the other plane has these sessions too, and ends before the next Save
	}
	return err
}

// turn makes the rules those of another phase. The rows stay.
func (p *Plane) turn(next phase) error {
	tables := p.tables
	p.tables, p.phase = nil, next
	tx := &nft.Transaction{}
	for _, t := range tables {
		t.Tx, t.phase = tx, next
		if err := t.Structure(t.chains()); err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
	}
	err := p.commit(tx)
	if dataplane.Known(err) {
		p.settle(tables)
	}
	return err
}
