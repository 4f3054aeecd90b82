package userspace

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// Drain implements dataplane.Carrier. Connections need no rows. Flows of UDP do, and those that are the process's are
// known by the mark that connection tracking has for them.
func (p *Plane) Drain(ctx context.Context, s *model.State) (connections int, err error) {
	if p.proxy == nil {
		return 0, nil
	}
	if p.listens() {
		return p.Carried(), p.syncListeners(ctx, model.NewState())
	}
	if p.translates() {
		return p.drainOver(s), nil
	}
	p.tables, p.clean, p.draining = nil, 0, true
	p.proxy.rows.replace(s)
	p.proxy.expel(nil)
	rows := model.NewState()
	if p.options.Redirect == ByTPROXY { // what is redirected connection tracking knows without any row
		rows = datagrams(s)
	}
	tables, tx, err := p.plan(rows)
	if err == nil {
		err = p.commit(tx)
	}
	if err == nil {
		p.settle(tables)
	}
	return p.Carried(), err
}

// Carried implements dataplane.Carrier.
func (p *Plane) Carried() int {
	if p.proxy == nil {
		return 0
	}
	p.proxy.flows.mu.Lock()
	defer p.proxy.flows.mu.Unlock()
	return p.proxy.flows.count + int(p.proxy.connections.Load())
}

// datagrams are the rows of UDP that forward. Whom they admit, another plane decides.
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

// forget has connection tracking of both families forget flows with a mark: nobody answers them any more, and others
// do not translate what was not translated in the beginning.
func forget(mark uint32) error {
	if mark == 0 {
		return nil
	}
	for _, f := range nf.Families {
		family := netlink.InetFamily(f.Number)
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, ours(mark)); err != nil {
			return fmt.Errorf("forget the flows of the process: %w", err)
		}
	}
	return nil
}

// ours are flows of UDP with a mark.
type ours uint32

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (mark ours) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	return f.Forward.Protocol == unix.IPPROTO_UDP && f.Mark&uint32(mark) != 0
}
