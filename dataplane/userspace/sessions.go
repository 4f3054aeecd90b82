package userspace

import (
	"context"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// saved are the sessions that the set clients has, of this process or one before.
func (p *Plane) saved(s *model.State) iter.Seq2[dataplane.Session, error] {
	return dataplane.ListSessions("userspace", func(f func(dataplane.Session)) error {
		var tables []*table
		for i := range nft.Families {
			tables = append(tables, p.newTable(i, nil))
		}
		return eachSaved(p.ruleset.Socket, tables, s, f)
	})
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
