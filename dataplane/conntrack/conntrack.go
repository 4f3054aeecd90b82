// Package conntrack wraps a data plane so that stale flows are forgotten. Planes based on netfilter choose a backend
// for the first packet of a flow only; connection tracking remembers the choice for as long as packets come. A TCP
// connection ends with its backend, a UDP flow does not. A client that never pauses would go on sending to an address
// that is unused, or belongs to another pod.
//
//	Apply ─► wrapped plane ─► which UDP rows changed? ─► list flows of these ─► delete the stale ones
//	                      └─► backends that pools lost ─► a moment later: TCP that these have not answered
//	Sync ──► wrapped plane ─────────────────────────► the same of all, and TCP that came too early
//	Audit ─► has a TCP row come since? ─────────────► TCP that came too early
//	         half a minute after a change of UDP ────► the same as Sync
//
// A plane in stage Standby forgets nothing; the first Audit after it has become active does.
//
// A flow is stale if its destination is a Frontend and it is answered by an address that is no backend of it, draining
// ones included. It is stale, too, if the Frontend of its destination is gone; after a restart a guard tells.
//
// Established TCP connections are never touched, but for orphans. A client that tried before the rules were active has
// asked an address that no machine has, and goes on asking there for some two minutes. Connection tracking remembers,
// and renews with each attempt, that this is not translated. After Sync such unanswered attempts are forgotten, and the
// client's next one is translated. It comes a second later at the earliest. So, for a Service that Apply has brought,
// the next Audit is soon enough, and Apply need not look at all flows.
package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/outcomes"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// Wrap makes New make wrapped planes.
func Wrap(wrapped dataplane.New) dataplane.New { return wrap(wrapped, false, nil) }

// WrapUntranslated is Wrap for a plane that does not translate. Flows that are translated are those that another
// plane has begun, and only they can be stale. Those to an address that carries reports are the plane's own matter:
// its process serves them. A process that may not see flows has not translated any.
func WrapUntranslated(wrapped dataplane.New, carries func(netip.Addr) bool) dataplane.New {
	return wrap(wrapped, true, carries)
}

func wrap(wrapped dataplane.New, others bool, carries func(netip.Addr) bool) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		inner, err := wrapped(c)
		if err != nil {
			return nil, err
		}
		socket, err := nfnetlink.Dial()
		if err != nil {
			return nil, errors.Join(err, inner.Close())
		}
		beside, err := nfnetlink.Dial()
		if err != nil {
			return nil, errors.Join(err, socket.Close(), inner.Close())
		}
		network, err := namespace.Here()
		if err != nil {
			return nil, errors.Join(err, beside.Close(), socket.Close(), inner.Close())
		}
		shared := &looks{conntrack: beside}
		p := &plane{
			Dataplane: inner, config: c, conntrack: socket, others: others, carries: carries,
			rows: map[model.Key]model.PoolID{}, pools: map[model.PoolID]*udpPool{},
			looks: shared, attempts: attempts{looks: shared, config: c, lost: map[netip.AddrPort]bool{}},
			orphans:  orphans{looks: shared, network: network, relayed: c.RelayMark(), until: map[orphan]time.Time{}},
			outcomes: outcomes.Watch{Network: network},
		}
		if c.Counters == dataplane.PerBackend && !p.others {
			p.traffic = watchTraffic()
		}
		return p, nil
	}
}

type plane struct {
	dataplane.Dataplane
	config    dataplane.Config
	conntrack *nfnetlink.Socket
	looks     *looks
	attempts  attempts
	orphans   orphans
	outcomes  outcomes.Watch
	traffic   *traffic                   // nil: not counted here
	state     *model.State               // as of the last call
	others    bool                       // the plane translates nothing itself
	carries   func(netip.Addr) bool      // addresses at which its process serves flows that are translated; nil: none
	rows      map[model.Key]model.PoolID // UDP frontends that forward, as of the last call
	pools     map[model.PoolID]*udpPool  // their pools
	came      bool                       // Apply has brought TCP frontends that forward since flows were looked at
	standby   bool                       // another plane is in force
	pending   bool                       // flows were not looked at, because another plane was in force
	sweep     time.Time                  // when all flows of UDP are to be looked at again; zero: they need not be
}

// looks are those for which no change waits. One goes on at a time.
type looks struct {
	sync.Mutex
	conntrack *nfnetlink.Socket // theirs
}

type udpPool struct {
	backends []model.Backend
	users    int
}

// Sync implements dataplane.Dataplane.
func (p *plane) Sync(ctx context.Context, s *model.State) error {
	return p.replace(s, p.Dataplane.Sync(ctx, s))
}

// Repair implements dataplane.Dataplane.
func (p *plane) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	return p.replace(s, p.Dataplane.Repair(ctx, s, r))
}

// replace takes over all rows, as the wrapped plane has.
func (p *plane) replace(s *model.State, partial error) error {
	if partial != nil && !errors.Is(partial, dataplane.ErrPartial) {
		return partial
	}
	p.state = s
	clear(p.rows)
	clear(p.pools)
	for key, f := range s.Frontends {
		p.note(s, key, f)
	}
	return cmp.Or(p.forgetAttempts(s), partial)
}

// Audit implements dataplane.Dataplane.
func (p *plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	switch {
	case p.pending, p.attempts.failed.Swap(false), !p.sweep.IsZero() && time.Now().After(p.sweep):
		err = p.forgetAttempts(s)
	case p.came && !p.others && !p.standby:
		err = p.forget(&staleFlow{state: s}, look{attempts: true})
		p.came = err != nil
	}
	if err != nil {
		return r, err
	}
	return p.Dataplane.Audit(ctx, s, d)
}

// Counters implements dataplane.Observed.
func (p *plane) Counters(ctx context.Context) (dataplane.Counters, error) {
	c, err := p.Dataplane.Counters(ctx)
	if err == nil && p.traffic != nil && p.state != nil {
		err = p.traffic.add(&c, p.conntrack, p.state)
	}
	return c, err
}

// Outcomes implements dataplane.Observed.
func (p *plane) Outcomes(ctx context.Context, answered bool, f func(model.Outcome)) error {
	err := p.Dataplane.Outcomes(ctx, answered, f)
	switch {
	case p.others:
		return err
	case f == nil:
		return errors.Join(err, p.outcomes.Close())
	}
	return errors.Join(err, p.outcomes.Take(answered, f))
}

// SetStage implements dataplane.Handover.
func (p *plane) SetStage(ctx context.Context, s *model.State, to dataplane.Stage) (int, error) {
	p.standby = to == dataplane.Standby
	return p.Dataplane.SetStage(ctx, s, to)
}

// Apply implements dataplane.Dataplane.
func (p *plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	partial := p.Dataplane.Apply(ctx, s, c)
	if partial != nil && !errors.Is(partial, dataplane.ErrPartial) {
		return partial
	}
	p.state = s
	gone := map[model.Key]bool{}
	var of look
	p.lost(c.Pools, &of)
	for key, f := range c.Frontends.Set.All() {
		p.came = p.came || key.Protocol == model.TCP && f.Verdict == model.Forward
		of.to(key)
		p.drop(key)
		p.note(s, key, f)
	}
	for _, key := range c.Frontends.Delete {
		of.to(key)
		p.drop(key)
		if key.Protocol == model.UDP {
			key.Scope = model.Any
			gone[key] = true
		}
	}
	if p.standby {
		p.pending = true
		return partial
	}
	p.attempts.follow(&c)
	if len(of.udp) == 0 || defect.Is(defect.ConntrackFlow) {
		return partial
	}
	if p.sweep.IsZero() {
		p.sweep = time.Now().Add(sweepAfter)
	}
	return cmp.Or(p.forget(&staleFlow{state: s, gone: gone, translated: p.others}, of), partial)
}

// lost takes over changed pools, and has flows looked for to the backends that those of UDP have lost.
func (p *plane) lost(d model.Delta[model.PoolID, model.Pool], of *look) {
	for id, now := range d.Set.All() {
		u := p.pools[id]
		if u == nil {
			continue
		}
		for _, b := range u.backends {
			if _, ok := now.At(b.AddrPort()); !ok {
				of.add(tracked.Filter{Protocol: model.UDP, Answers: b.AddrPort()})
			}
		}
		u.backends = now.Backends
	}
}

// note remembers that a frontend uses a pool for UDP.
func (p *plane) note(s *model.State, key model.Key, f model.Frontend) {
	if key.Protocol == model.SCTP {
		p.attempts.sctp.Store(true)
	}
	if key.Protocol != model.UDP || f.Verdict != model.Forward {
		return
	}
	u := p.pools[f.Pool]
	if u == nil {
		u = &udpPool{}
		p.pools[f.Pool] = u
	}
	u.backends = s.Pools[f.Pool].Backends
	u.users++
	p.rows[key] = f.Pool
}

func (p *plane) drop(key model.Key) {
	id, ok := p.rows[key]
	if !ok {
		return
	}
	delete(p.rows, key)
	if u := p.pools[id]; u.users > 1 {
		u.users--
	} else {
		delete(p.pools, id)
	}
}

// forgetAttempts forgets those to reach frontends before they were there, and stale flows.
func (p *plane) forgetAttempts(s *model.State) error {
	if p.pending = p.standby; p.pending {
		return nil
	}
	err := p.forget(&staleFlow{state: s, translated: p.others}, look{udp: allUDP, attempts: !p.others})
	p.came, p.pending, p.sweep = err != nil, err != nil, time.Time{}
	return err
}

// sweepAfter is the time until a full look finds flows that looks at single flows have missed. A packet on another
// processor may have chosen a removed backend just before the rules changed. And the kernel may list a table that grows
// with gaps.
const sweepAfter = 30 * time.Second

// look says which flows may be stale. The kernel is to pass over all others: a busy node has very many, and a flood of
// datagrams makes as many as there may be, while changes wait. Passing over a flow takes a tenth of reading it
// (BenchmarkList in internal/tracked).
type look struct {
	udp      []tracked.Filter // one after the other
	attempts bool             // of TCP
}

var allUDP = []tracked.Filter{{Protocol: model.UDP}}

// maxLooks is how many filters there may be: each passes over all flows, those of TCP, too.
const maxLooks = 4

// add adds a filter. By addresses of IPv6 the kernel cannot choose (tracked.Filter), so that each such look may read as
// much. Where there would be too many looks, they are by ports alone, as those to a Service have few. Where there would
// still be too many, all flows of UDP are read.
func (l *look) add(f tracked.Filter) {
	if slices.ContainsFunc(l.udp, func(have tracked.Filter) bool { return includes(have, f) }) {
		return
	}
	second := func(other tracked.Filter) bool { return f.V6() && other.V6() }
	if len(l.udp) < maxLooks && !slices.ContainsFunc(l.udp, second) {
		l.udp = append(l.udp, f)
		return
	}
	var ports []tracked.Filter
	for _, f := range append(slices.Clone(l.udp), f) {
		if f = withoutAddress(f); !slices.Contains(ports, f) {
			ports = append(ports, f)
		}
	}
	if l.udp = ports; len(ports) > maxLooks {
		l.udp = allUDP
	}
}

func withoutAddress(f tracked.Filter) tracked.Filter {
	f.To = netip.AddrPortFrom(netip.Addr{}, f.To.Port())
	f.Answers = netip.AddrPortFrom(netip.Addr{}, f.Answers.Port())
	return f
}

// includes reports whether a filter has all that another one has.
func includes(all, f tracked.Filter) bool {
	return all == f || all == withoutAddress(f) || all == allUDP[0]
}

// in are the filters of UDP for flows of one address family.
func (l *look) in(v6 bool) (filters []tracked.Filter) {
	for _, f := range l.udp {
		if !f.HasAddress() || f.V6() == v6 {
			filters = append(filters, f)
		}
	}
	return filters
}

// to adds flows to a frontend.
func (l *look) to(key model.Key) {
	if key.Protocol == model.UDP {
		l.add(tracked.Filter{Protocol: model.UDP, To: key.AddrPort()})
	}
}

// forget deletes the stale flows of both families.
func (p *plane) forget(stale *staleFlow, of look) error {
	stale.relayMark = p.config.RelayMark()
	stale.carries = p.carries
	for _, v6 := range []bool{false, true} {
		if err := p.config.Inject("conntrack delete"); err != nil {
			return err
		}
		start := time.Now()
		var udp, early int
		var err error
		looks := of.in(v6)
		for _, f := range looks {
			n, failed := tracked.ForgetListed(p.conntrack, v6, f, stale.stale)
			udp, err = udp+n, errors.Join(err, failed)
		}
		if of.attempts && err == nil {
			for _, f := range p.attempts.unanswered() {
				n, failed := tracked.ForgetListed(p.conntrack, v6, f, stale.misled)
				early, err = early+n, errors.Join(err, failed)
			}
		}
		if p.others && errors.Is(err, unix.EPERM) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("delete stale flows from connection tracking: %w", err)
		}
		if p.config.Meter != nil && len(looks) > 0 {
			p.config.Meter.Forgot(v6, udp, time.Since(start))
		}
		say(p.config, "deleted tracked UDP flows to backends that were removed", udp)
		say(p.config, "deleted tracked connection attempts that the rules lead elsewhere now", early)
	}
	return nil
}

func say(c dataplane.Config, what string, flows int) {
	if flows > 0 && c.Log != nil {
		c.Log.Info(what, "flows", flows)
	}
}

// staleFlow tells which flows contradict the State.
type staleFlow struct {
	state      *model.State
	gone       map[model.Key]bool    // frontends that were deleted, as Any
	translated bool                  // only flows that are
	carries    func(netip.Addr) bool // see plane
	relayMark  uint32                // the mark of flows that a process of the node answers; they are its own
}

// misled reports whether an unanswered attempt should go to a backend, and does not, or goes to one that was removed.
func (f *staleFlow) misled(flow *tracked.Flow) bool {
	if flow.To != flow.Answers {
		return f.stale(flow)
	}
	return flow.Attempt() && flow.Mark&f.relayMark == 0 &&
		len(f.state.PoolsAt(model.TCP, flow.To)) > 0
}

// stale reports whether a flow is.
func (f *staleFlow) stale(flow *tracked.Flow) bool {
	to, answers := flow.To, flow.Answers
	switch {
	case flow.Mark&f.relayMark != 0, f.translated && to == answers, f.carries != nil && f.carries(answers.Addr()):
		return false
	}
	key := model.Key{Addr: to.Addr(), Port: to.Port(), Protocol: flow.Protocol}
	known := false
	for _, key.Scope = range []model.Scope{model.Internal, model.Any} { // the latter is the one in gone
		row, ok := f.state.Frontends[key]
		known = known || ok
		if _, has := f.state.Pools[row.Pool].At(answers); ok && row.Verdict == model.Forward && has {
			return false
		}
	}
	return known || to != answers && (f.gone[key] || f.guarded(flow))
}

// guarded reports whether a destination would be one of a Service that no longer exists.
func (f *staleFlow) guarded(flow *tracked.Flow) bool {
	return f.state.Lookup(model.Packet{Protocol: flow.Protocol, Destination: flow.To}).Guard.IsValid()
}

// Close implements dataplane.Dataplane.
func (p *plane) Close() error {
	p.attempts.look() // for what is left to forget
	return errors.Join(p.orphans.close(), p.looks.conntrack.Close(), p.outcomes.Close(), p.orphans.network.Close(),
		p.traffic.close(), p.conntrack.Close(), p.Dataplane.Close())
}
