package userspace

import (
	"context"
	"fmt"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// leftSessions are what this data plane, in a process that has ended, has left of what it remembered of clients in the
// network namespace of the calling thread; see dataplane.Handover.
func leftSessions(_ context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		conn, err := nfnetlink.Dial()
		if err != nil {
			yield(dataplane.Session{}, fmt.Errorf("userspace: %w", err))
			return
		}
		defer conn.Close()
		left(conn, c, s)(yield)
	}
}

// left is what the set clients has.
func left(conn *nfnetlink.Socket, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		var tables []*table
		for _, f := range nft.Families {
			tables = append(tables, newTable(f, c.CarriedMark(), listening{}, &nft.Transaction{}))
		}
		wanted := true
		err := eachSaved(conn, tables, s, func(m dataplane.Session) { wanted = wanted && yield(m, nil) })
		if err != nil && wanted {
			yield(dataplane.Session{}, fmt.Errorf("userspace: list remembered clients: %w", err))
		}
	}
}

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(_ context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	if p.proxy == nil && !p.listens() {
		return left(p.ruleset.Socket, p.config, s)
	}
	return func(yield func(dataplane.Session, error) bool) {
		if p.proxy == nil {
			return
		}
		var all []dataplane.Session // nobody else must wait while somebody thinks about them
		p.proxy.Rows.EachClient(time.Now(), func(m dataplane.Session) { all = append(all, m) })
		for _, m := range all {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.proxy == nil {
		return p.learned.Keep(s, others)
	}
	return dataplane.Take(s, others, p.proxy.Rows.Taker())
}
