package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// drain leaves to another plane what begins. Connections need no rows. Flows of UDP do, and those that are the
// process's are known by the mark that connection tracking has for them.
func (p *Plane) drain(ctx context.Context, s *model.State) error {
	if p.proxy == nil {
		return nil
	}
	if p.listens() {
		return p.syncListeners(ctx, model.NewState())
	}
	if p.translates() {
		p.drainOver(s)
		return nil
	}
	p.proxy.Hurry(true)
	if p.phase == serving && p.tables != nil {
		// The rules first: rows and guards do not leave their sets at the same moment, though in one transaction. A packet
		// whose row is gone must not meet a guard of its range.
		if err := p.turn(draining); err != nil {
			return err
		}
	}
	p.tables, p.clean, p.phase = nil, 0, draining
	p.proxy.Rows.Replace(s)
	p.proxy.Expel(nil)
	// No rule marks attempts any more. Those that still have no row would be lost.
	waiting := forgetWaiting(p.ruleset.Socket, p.config.RelayMark())
	rows := model.NewState()
	if p.options.Redirect == ByTPROXY { // what is redirected connection tracking knows without any row
		rows = datagrams(s)
	}
	todo, err := p.plan(rows)
	if err == nil {
		err = p.commit(todo.tx)
	}
	if err == nil {
		p.settle(todo.tables)
		err = forget(p.ruleset.Socket, p.config.RelayMark(), (*tracked.Flow).Attempt, unanswered())
	}
	return errors.Join(waiting, err)
}

// Open implements dataplane.Handover.
func (p *Plane) Open() int {
	if p.proxy == nil {
		return 0
	}
	return p.proxy.Open()
}

// datagrams are the rows of UDP that forward. Another plane decides which clients they admit.
func datagrams(s *model.State) *model.State {
	out := model.NewState()
	out.Pods, out.Pools = s.Pods, s.Pools
	for key, f := range s.Frontends {
		if key.Protocol == model.UDP && f.Verdict == model.Forward {
			out.Frontends[key] = f
		}
	}
	return out
}

// forget has connection tracking forget flows that have one of the bits of a mark, are wanted, and pass a filter. The
// process answers these no more, and other planes do not translate a flow that began untranslated.
func forget(conn *nfnetlink.Socket, mark uint32, wanted func(*tracked.Flow) bool, filters ...tracked.Filter) error {
	var all []tracked.Filter
	for left := mark; left != 0; left &= left - 1 {
		for _, f := range filters {
			f.Mark = left & -left
			all = append(all, f)
		}
	}
	if _, err := tracked.ForgetListed(conn, wanted, all...); err != nil {
		return fmt.Errorf("forget the flows of the process: %w", err)
	}
	return nil
}

// forgetWaiting does so with attempts that wait for a while already. Others the process is about to answer, and has to
// know by their marks then.
func forgetWaiting(conn *nfnetlink.Socket, mark uint32) error {
	type ends struct{ from, to netip.AddrPort }
	asked, wait := map[ends]bool{}, unanswered()
	wait.Mark = mark
	_, err := tracked.List(conn, func(flow *tracked.Flow) bool {
		if flow.Attempt() {
			asked[ends{flow.From, flow.To}] = true
		}
		return false
	}, wait)
	if err != nil {
		return fmt.Errorf("list sockets that wait for the process: %w", err)
	}
	waits := func(flow *tracked.Flow) bool { return flow.Attempt() && asked[ends{flow.From, flow.To}] }
	return forget(conn, mark, waits, unanswered())
}

// unanswered are flows of TCP, among them the attempts of the node's own processes while ours was away.
func unanswered() tracked.Filter { return tracked.Filter{Protocol: model.TCP, Mask: tracked.Answered} }
