package userspace

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// Memories are what this data plane, in a process that has ended, has left of what it remembered of clients in the
// network namespace of the calling thread; see dataplane.Affine.
func Memories(_ context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(yield func(dataplane.Memory, error) bool) {
		conn, err := nfnetlink.Dial()
		if err != nil {
			yield(dataplane.Memory{}, fmt.Errorf("userspace: %w", err))
			return
		}
		defer conn.Close()
		left(conn, c, s)(yield)
	}
}

// left is what the set clients has.
func left(conn *nfnetlink.Socket, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Memory, error] {
	return func(yield func(dataplane.Memory, error) bool) {
		var tables []*table
		for _, f := range nf.Families {
			tables = append(tables, newTable(f, c.CarriedMark(), listening{}, &nf.Transaction{}))
		}
		wanted := true
		err := eachSaved(conn, tables, s, func(m dataplane.Memory) { wanted = wanted && yield(m, nil) })
		if err != nil && wanted {
			yield(dataplane.Memory{}, fmt.Errorf("userspace: list remembered clients: %w", err))
		}
	}
}

// Memories implements dataplane.Affine.
func (p *Plane) Memories(_ context.Context, s *model.State) iter.Seq2[dataplane.Memory, error] {
	if p.proxy == nil && !p.listens() {
		return left(p.conn, p.config, s)
	}
	return func(yield func(dataplane.Memory, error) bool) {
		if p.proxy == nil {
			return
		}
		var all []dataplane.Memory // nobody else must wait while somebody thinks about them
		p.proxy.rows.eachClient(time.Now(), func(m dataplane.Memory) { all = append(all, m) })
		for _, m := range all {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// Inherit implements dataplane.Heir.
func (p *Plane) Inherit(c dataplane.Config) { p.config.Inherit, p.config.Waits = c.Inherit, c.Waits }

// Remember implements dataplane.Affine.
func (p *Plane) Remember(
	_ context.Context, s *model.State, others iter.Seq2[dataplane.Memory, error],
) (n int, err error) {
	if p.proxy == nil {
		return 0, errors.New("userspace: nobody is served; Sync first")
	}
	return dataplane.Take(s, others, p.proxy.rows.taker())
}

// taker takes what others remember in.
func (d *directory) taker() dataplane.Taker {
	return func(others *dataplane.Memories) (n int, err error) {
		d.eachClient(time.Now(), func(own dataplane.Memory) { others.Supersedes(own) })
		for m := range others.All() {
			pool := d.pool(m.Pool)
			if pool != nil && pool.remember(m.Client, choice{backend: m.Backend, until: m.Until}) {
				n++
			}
		}
		return n, nil
	}
}
