package daemon

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/takeover"
)

// lingering is the plane behind the ebpf plane. While that has no rows for it, it has nothing in the kernel, unless
// connections are open that other planes, or kube-proxy, have translated. Connection tracking knows them without any
// rule; but it translates their packets only as long as somebody hooks in there. So it stays, without rows, until they
// have ended.
type lingering struct {
	dataplane.Dataplane
	conntrack *netlink.Handle
	since     time.Time // zero: it does not linger
	look      time.Time // when to look the next time
	pause     time.Duration
}

// Sync implements dataplane.Dataplane.
func (l *lingering) Sync(ctx context.Context, s *model.State) error {
	l.since = time.Time{}
	return l.Dataplane.Sync(ctx, s)
}

// Remove has no rows from now on.
func (l *lingering) Remove(ctx context.Context) error {
	if !l.since.IsZero() {
		return nil
	}
	if !l.needed(func(netip.AddrPort, model.Protocol) bool { return true }) {
		return l.Dataplane.Remove(ctx)
	}
	if err := l.Dataplane.Sync(ctx, model.NewState()); err != nil {
		return err
	}
	l.since, l.pause = time.Now(), drainInterval
	l.look = l.since.Add(l.pause)
	return nil
}

// Remembered implements dataplane.Affine.
func (l *lingering) Remembered(ctx context.Context, id model.PoolID, a netip.Addr) (netip.AddrPort, bool, error) {
	if affine, ok := l.Dataplane.(dataplane.Affine); ok {
		return affine.Remembered(ctx, id, a)
	}
	return netip.AddrPort{}, false, nil
}

// Close implements dataplane.Dataplane.
func (l *lingering) Close() error {
	l.conntrack.Close()
	return l.Dataplane.Close()
}

// end removes all when no connection to a Service needs it any more, or has had its time.
func (l *lingering) end(ctx context.Context, s *model.State) error {
	if l.since.IsZero() || time.Now().Before(l.look) {
		return nil
	}
	ours := func(to netip.AddrPort, protocol model.Protocol) bool {
		d := s.Lookup(model.Packet{Protocol: protocol, Destination: to})
		return d.Verdict != model.Pass || d.Guard.IsValid()
	}
	if time.Since(l.since) < takeover.DefaultDrain && l.needed(ours) {
		l.pause = min(2*l.pause, takeoverInterval)
		l.look = time.Now().Add(l.pause)
		return nil
	}
	l.since = time.Time{}
	return l.Dataplane.Remove(ctx)
}

// needed reports whether connections to some destinations are translated by connection tracking. Flows of UDP go on
// without it.
func (l *lingering) needed(by func(netip.AddrPort, model.Protocol) bool) bool {
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := l.conntrack.ConntrackTableList(netlink.ConntrackTable, family)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // nobody tracks connections
			continue
		}
		if err != nil { // it is not known, as when the table changed while it was read
			return true
		}
		if slices.ContainsFunc(flows, func(f *netlink.ConntrackFlow) bool {
			to, ok := netip.AddrFromSlice(f.Forward.DstIP)
			protocol := model.Protocol(f.Forward.Protocol)
			return ok && isTranslated(f) && by(netip.AddrPortFrom(to.Unmap(), f.Forward.DstPort), protocol)
		}) {
			return true
		}
	}
	return false
}

// isTranslated reports whether somebody else answers on an open connection than who was asked.
func isTranslated(f *netlink.ConntrackFlow) bool {
	if tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP); ok {
		return tcp.State < nl.TCP_CONNTRACK_TIME_WAIT &&
			(!f.Forward.DstIP.Equal(f.Reverse.SrcIP) || f.Forward.DstPort != f.Reverse.SrcPort)
	}
	return f.Forward.Protocol == unix.IPPROTO_SCTP && !f.Forward.DstIP.Equal(f.Reverse.SrcIP)
}

// overLingering is the ebpf plane over one that lingers.
type overLingering struct {
	*ebpf.Plane
	behind *lingering
}

// newOverLingering makes that New.
func newOverLingering(o ebpf.Options, behind dataplane.New) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		l := &lingering{}
		o.Packets = func(c dataplane.Config) (_ dataplane.Dataplane, err error) {
			if l.conntrack, err = netlink.NewHandle(unix.NETLINK_NETFILTER); err != nil {
				return nil, err
			}
			if l.Dataplane, err = behind(c); err != nil {
				l.conntrack.Close()
				return nil, err
			}
			return l, nil
		}
		made, err := ebpf.New(o)(c)
		if err != nil {
			return nil, err
		}
		plane, ok := made.(*ebpf.Plane)
		if !ok {
			return nil, errors.New("the ebpf plane is not one") // New makes no other
		}
		return &overLingering{plane, l}, nil
	}
}

// Audit implements dataplane.Dataplane.
func (p *overLingering) Audit(ctx context.Context, s *model.State) ([]dataplane.Drift, error) {
	if err := p.behind.end(ctx, s); err != nil {
		return nil, err
	}
	return p.Plane.Audit(ctx, s)
}
