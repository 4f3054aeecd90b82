package daemon

import (
	"context"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/model"
)

// drainer is the plane behind the ebpf plane. Without rows for it, it has nothing in the kernel, unless connections are
// open that other planes, or kube-proxy, have translated. Connection tracking knows these without any rule. But it
// translates their packets only while a hook of netfilter uses it. So the plane stays, without rows, until they have
// ended.
type drainer struct {
	dataplane.Dataplane
	flows  *conntrack.Table
	mark   uint32 // of flows that this process carries
	hooked bool   // it has something in the kernel, rows or not
	drain  handover.Schedule
}

// lookShare bounds what looks cost, which read all that connection tracking knows: one part in so many of the time.
const lookShare = 100

// Sync implements dataplane.Dataplane.
func (l *drainer) Sync(ctx context.Context, s *model.State) error {
	l.drain, l.hooked = handover.Schedule{}, true
	return l.Dataplane.Sync(ctx, s)
}

// Repair implements dataplane.Dataplane.
func (l *drainer) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return l.Sync(ctx, s)
}

// Remove has no rows from now on.
func (l *drainer) Remove(ctx context.Context) error {
	if l.drain.Began() {
		return nil
	}
	if !l.needed(func(netip.AddrPort, model.Protocol) bool { return true }) {
		return l.remove(ctx)
	}
	l.hooked = true
	if err := l.Dataplane.Sync(ctx, model.NewState()); err != nil {
		return err
	}
	l.drain.Next(0)
	return nil
}

func (l *drainer) remove(ctx context.Context) error {
	l.drain, l.hooked = handover.Schedule{}, false
	return l.Dataplane.Remove(ctx)
}

// Close implements dataplane.Dataplane.
func (l *drainer) Close() error {
	l.flows.Close()
	return l.Dataplane.Close()
}

// end removes all when no connection to a Service needs it any more, or has had its time.
func (l *drainer) end(ctx context.Context, s *model.State) error {
	if !l.drain.Due() {
		return nil
	}
	ours := func(to netip.AddrPort, protocol model.Protocol) bool {
		d := s.Lookup(model.Packet{Protocol: protocol, Destination: to})
		return d.Verdict != model.Pass || d.Guard.IsValid()
	}
	began := time.Now()
	if !l.drain.Over(drainTime) && l.needed(ours) {
		l.drain.Next(lookShare * time.Since(began))
		return nil
	}
	return l.remove(ctx)
}

// needed reports whether connection tracking translates connections to some destinations. For UDP these come from
// connected sockets of the node itself, which only connection tracking translates. Other flows leave the table soon:
// the ebpf plane handles their packets before connection tracking does.
func (l *drainer) needed(by func(netip.AddrPort, model.Protocol) bool) bool {
	needed, err := l.flows.Needed(by)
	return needed || err != nil // it is not known, as when the table changed while it was read
}

// servedBy returns the address that answers a flow of UDP instead of its destination, because the flow is translated,
// or relayed by this process. The address is not valid if the flow is neither.
func (l *drainer) servedBy(f ebpf.UDPFlow) (netip.AddrPort, error) {
	who, tracked, err := l.flows.Answers(model.UDP, f.From, f.To)
	ours := who.Mark&l.mark != 0
	if !tracked || !ours && (!l.hooked || who.From == f.To) {
		return netip.AddrPort{}, err
	}
	return who.From, nil
}

// overDrainer is the ebpf plane over a drainer.
type overDrainer struct {
	dataplane.Dataplane
	behind *drainer
}

// newOverDrainer makes that New.
func newOverDrainer(o ebpf.Options, behind dataplane.New) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		l := &drainer{}
		o.ServedBy = l.servedBy
		l.mark = c.RelayMark()
		o.Packets = func(c dataplane.Config) (_ dataplane.Dataplane, err error) {
			if l.flows, err = conntrack.OpenTable(); err != nil {
				return nil, err
			}
			if l.Dataplane, err = behind(c); err != nil {
				l.flows.Close()
				return nil, err
			}
			return l, nil
		}
		made, err := ebpf.New(o)(c)
		if err != nil {
			return nil, err
		}
		return &overDrainer{made, l}, nil
	}
}

// Audit implements dataplane.Dataplane.
func (p *overDrainer) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if err := p.behind.end(ctx, s); err != nil {
		return r, err
	}
	return p.Dataplane.Audit(ctx, s, d)
}
