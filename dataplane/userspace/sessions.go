package userspace

import (
	"context"
	"fmt"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// saved are the sessions that the set clients has, of this process or one before.
func (p *Plane) saved(s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		var tables []*table
		for i := range nft.Families {
			tables = append(tables, p.newTable(i, nil))
		}
		wanted := true
		err := eachSaved(p.ruleset.Socket, tables, s, func(m dataplane.Session) { wanted = wanted && yield(m, nil) })
		if err != nil && wanted {
			yield(dataplane.Session{}, fmt.Errorf("userspace: list sessions: %w", err))
		}
	}
}

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	if p.proxy == nil && !p.listens() {
		return p.saved(s)
	}
	return func(yield func(dataplane.Session, error) bool) {
		if p.proxy == nil {
			return
		}
		var all []dataplane.Session // others must not wait while the caller handles them
		p.proxy.Rows.EachClient(time.Now(), func(m dataplane.Session) { all = append(all, m) })
		for _, m := range all {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// Save implements dataplane.Handover.
func (p *Plane) Save(context.Context) { p.save(false) }

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.proxy == nil {
		return p.learned.Keep(s, others)
	}
	return dataplane.Take(s, others, p.proxy.Rows.Taker())
}
