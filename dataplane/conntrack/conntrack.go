// Package conntrack wraps a data plane so that stale flows are forgotten. Planes based on netfilter choose a backend
// for the first packet of a flow only; connection tracking remembers the choice for as long as packets come. A TCP
// connection ends with its backend, a UDP flow does not. A client that never pauses would go on sending to an address
// that is unused, or belongs to another pod.
//
//	Apply ─► wrapped plane ─► which UDP rows changed? ─► beside: list flows of these ─► delete the stale ones
//	                      └─► backends that pools lost ─► a moment later: TCP that these have not answered
//	Sync ──► wrapped plane ─────────────────────────► flows of all UDP rows, and TCP that came too early
//	Audit ─► has a TCP row come since? ─────────────► beside: TCP that came too early
//	         half a minute after a change of UDP ────► beside: flows of all UDP rows
//
// Looks beside have a goroutine of their own. The caller waits for them, unless there are very many flows: a flood
// makes as many as there may be.
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
			udp:   udpRows{rows: map[model.Key]*udpPool{}, pools: map[model.PoolID]*udpPool{}},
			looks: shared, attempts: attempts{looks: shared, config: c, lost: map[netip.AddrPort]bool{}},
			idle: idle{
				network: network, relayed: c.RelayMark(), mark: c.RelayMark() | cmp.Or(c.Mark, dataplane.DefaultMark),
				deaf: map[orphan]time.Time{},
			},
			orphans:  orphans{looks: shared, network: network, relayed: c.RelayMark(), until: map[orphan]time.Time{}},
			outcomes: outcomes.Watch{Network: network},
		}
		if r, ok := inner.(rulesetReader); ok {
			p.outcomes.Changed, p.orphans.changed, p.idle.changed = r.RulesetChanged, r.RulesetChanged, r.RulesetChanged
		}
		p.beside.reset()
		if c.Counters == dataplane.PerBackend && !p.others {
			p.traffic = watchTraffic()
		}
		return p, nil
	}
}

// rulesetReader is a plane that reads all of its rules when another program has changed the ruleset. It is told what
// this process has changed there: to read the rules of a million backends takes seconds.
type rulesetReader interface{ RulesetChanged() }

type plane struct {
	dataplane.Dataplane
	config    dataplane.Config
	conntrack *nfnetlink.Socket
	looks     *looks
	attempts  attempts
	idle      idle
	orphans   orphans
	outcomes  outcomes.Watch
	traffic   *traffic              // nil: not counted here
	state     *model.State          // as of the last call
	others    bool                  // the plane translates nothing itself
	carries   func(netip.Addr) bool // addresses at which its process serves flows that are translated; nil: none
	udp       udpRows
	beside    beside
	standby   bool      // another plane is in force
	pending   bool      // flows were not looked at, because another plane was in force
	sweep     time.Time // when all flows of UDP are to be looked at again; zero: they need not be
}

// looks are those for which no change waits. One goes on at a time.
type looks struct {
	sync.Mutex
	conntrack *nfnetlink.Socket // theirs
}

// aside does one thing at a time, beside a caller who learns the next time what it has done.
type aside struct {
	sync.Mutex // held while it goes on

	changed func() // see outcomes.Watch
	done    int
	err     error
	next    time.Time // it begins not earlier
}

// begin has something done, if it is time to, and returns what the last one has done. It leaves what goes on alone.
func (a *aside) begin(do func() (int, error)) (done int, err error) {
	if !a.TryLock() {
		return 0, nil
	}
	done, err, a.done, a.err = a.done, a.err, 0, nil
	if time.Now().Before(a.next) {
		a.Unlock()
		return done, err
	}
	go func() {
		defer a.Unlock()
		a.done, a.err = do()
	}()
	return done, err
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
	if !dataplane.Known(partial) {
		return partial
	}
	p.state = s
	p.beside.mu.Lock()
	p.udp.clear()
	for key, f := range s.Frontends {
		p.note(s, key, f)
	}
	p.beside.mu.Unlock()
	return cmp.Or(p.forgetAttempts(s), partial)
}

// Audit implements dataplane.Dataplane.
func (p *plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	switch {
	case p.pending, p.attempts.failed.Swap(false):
		err = p.forgetAttempts(s)
	case !p.standby:
		of := look{attempts: p.beside.expects()}
		if !p.sweep.IsZero() && time.Now().After(p.sweep) {
			of.udp, of.sweep, p.sweep = allUDP, true, time.Time{}
		}
		err = p.seek(of)
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
	of := p.follow(s, &c) // first, or a look beside would take flows to new backends for stale
	partial := p.Dataplane.Apply(ctx, s, c)
	if !dataplane.Known(partial) {
		return partial
	}
	p.state = s
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
	return cmp.Or(p.seek(of), partial)
}

// follow takes over a change. It returns which flows the change can have made stale.
func (p *plane) follow(s *model.State, c *model.Change) (of look) {
	p.beside.mu.Lock()
	defer p.beside.mu.Unlock()
	p.udp.lost(c.Pools, &of)
	for key, f := range c.Frontends.Set.All() {
		if key.Protocol == model.TCP && f.Verdict == model.Forward && !p.others {
			p.beside.came[key.AddrPort()] = true
		}
		of.to(key)
		p.udp.drop(key)
		p.note(s, key, f)
	}
	for _, key := range c.Frontends.Delete {
		of.to(key)
		p.udp.drop(key)
		if key.Protocol == model.UDP {
			key.Scope = model.Any
			p.beside.gone[key] = true
		}
	}
	return of
}

// note remembers a frontend.
func (p *plane) note(s *model.State, key model.Key, f model.Frontend) {
	switch key.Protocol {
	case model.SCTP:
		p.attempts.sctp.Store(true)
	case model.UDP:
		p.udp.note(s, key, f)
	}
}

// forgetAttempts forgets those to reach frontends before they were there, and stale flows.
func (p *plane) forgetAttempts(s *model.State) error {
	if p.pending = p.standby; p.pending {
		return nil
	}
	err := p.forget(p.conntrack, stateView{s}, look{udp: allUDP, attempts: !p.others})
	if p.pending = err != nil; err == nil {
		p.sweep = time.Time{}
		p.beside.reset()
	}
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
	sweep    bool             // of all of UDP, half a minute after a change
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

// concerns reports whether flows of UDP of an address family are looked at.
func (l *look) concerns(v6 bool) bool {
	return slices.ContainsFunc(l.udp, func(f tracked.Filter) bool { return !f.HasAddress() || f.V6() == v6 })
}

// to adds flows to a frontend.
func (l *look) to(key model.Key) {
	if key.Protocol == model.UDP {
		l.add(tracked.Filter{Protocol: model.UDP, To: key.AddrPort()})
	}
}

// forget deletes the stale flows.
func (p *plane) forget(conntrack *nfnetlink.Socket, v view, of look) error {
	if err := p.config.Inject("conntrack delete"); err != nil {
		return err
	}
	start, filters := time.Now(), of.udp
	if of.attempts {
		filters = slices.Concat(filters, p.attempts.unanswered())
	}
	stale := &staleFlow{view: v, translated: p.others, carries: p.carries, relayMark: p.config.RelayMark()}
	flows, err := tracked.ForgetListed(conntrack, func(f *tracked.Flow) bool {
		if f.Protocol == model.UDP {
			return stale.stale(f)
		}
		return stale.misled(f)
	}, filters...)
	if p.others && errors.Is(err, unix.EPERM) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete stale flows from connection tracking: %w", err)
	}
	early := 0
	udp := map[bool]int{} // by whether it is IPv6
	for _, f := range flows {
		if f.Protocol == model.UDP {
			udp[f.To.Addr().Is6()]++
		} else {
			early++
		}
	}
	for _, v6 := range []bool{false, true} {
		if p.config.Meter != nil && of.concerns(v6) {
			p.config.Meter.Forgot(v6, udp[v6], time.Since(start))
		}
	}
	say(p.config, "deleted tracked UDP flows to backends that were removed", udp[false]+udp[true])
	say(p.config, "deleted tracked connection attempts that the rules lead elsewhere now", early)
	return nil
}

func say(c dataplane.Config, what string, flows int) {
	if flows > 0 {
		c.Logger().Info(what, "flows", flows)
	}
}

// staleFlow tells which flows contradict the rows.
type staleFlow struct {
	view
	translated bool                  // only flows that are
	carries    func(netip.Addr) bool // see plane
	relayMark  uint32                // the mark of flows that a process of the node answers; they are its own
}

// view says what there is where flows go.
type view interface {
	// frontend reports whether there is one, and whether it forwards to a backend.
	frontend(at model.Key, to netip.AddrPort) (known, forwards bool)
	// opened reports whether a frontend forwards TCP.
	opened(at netip.AddrPort) bool
	// removed reports whether there was a frontend, although there is none.
	removed(at model.Key) bool
}

// misled reports whether an unanswered attempt should go to a backend, and does not, or goes to one that was removed.
func (f *staleFlow) misled(flow *tracked.Flow) bool {
	if flow.To != flow.Answers {
		return f.stale(flow)
	}
	return flow.Attempt() && flow.Mark&f.relayMark == 0 && flow.Zone == 0 && f.opened(flow.To)
}

// stale reports whether a flow is. A CNI may track its packets in zones, and translate them elsewhere (Open vSwitch).
func (f *staleFlow) stale(flow *tracked.Flow) bool {
	to, answers := flow.To, flow.Answers
	others := f.translated || flow.Zone != 0
	switch {
	case flow.Mark&f.relayMark != 0, others && to == answers, f.carries != nil && f.carries(answers.Addr()):
		return false
	}
	at := model.Key{Addr: to.Addr(), Port: to.Port(), Protocol: flow.Protocol}
	some := false
	for _, at.Scope = range []model.Scope{model.Internal, model.Any} { // the latter is the one that removed takes
		known, forwards := f.frontend(at, answers)
		if forwards {
			return false
		}
		some = some || known
	}
	return some || to != answers && f.removed(at)
}

// stateView is a view of a State.
type stateView struct{ *model.State }

func (v stateView) frontend(at model.Key, to netip.AddrPort) (known, forwards bool) {
	row, known := v.Frontends[at]
	_, has := v.Pools[row.Pool].At(to)
	return known, known && has && row.Verdict == model.Forward
}

func (v stateView) opened(at netip.AddrPort) bool { return len(v.PoolsAt(model.TCP, at)) > 0 }

// removed asks the guards: after a restart nothing else is known of Services that no longer exist.
func (v stateView) removed(at model.Key) bool {
	return v.Lookup(model.Packet{Protocol: at.Protocol, Destination: at.AddrPort()}).Guard.IsValid()
}

// Close implements dataplane.Dataplane.
func (p *plane) Close() error {
	p.lookBeside() // for what is left to forget
	p.attempts.look()
	for _, a := range []*aside{&p.idle.aside, &p.orphans.aside} { // after their looks
		a.Lock()
		defer a.Unlock()
	}
	return errors.Join(p.orphans.closeTables(), p.looks.conntrack.Close(), p.outcomes.Close(), p.orphans.network.Close(),
		p.traffic.close(), p.conntrack.Close(), p.Dataplane.Close())
}
