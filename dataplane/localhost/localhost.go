// Package localhost wraps a data plane so that NodePorts on the IPv6 loopback address work. Planes
// based on netfilter cannot do that: after the translation is undone, a backend's answer is a packet
// to ::1 that arrived on another interface than lo, and no sysctl makes IPv6 route such a packet (see
// rt6_need_strict in the kernel's net/ipv6/route.c; IPv4 has route_localnet, but IPVS sends nothing from
// there to other machines, see WrapBoth). So these frontends are served in user space, for the only client
// they have, which is this node itself:
//
//	State ─┬─ all other rows ──────► wrapped plane ─► kernel
//	       └─ [::1] that forward ──► a socket each ─► package relay ─► backend
//
// Rows that reject or drop are the wrapped plane's, and so are SCTP frontends, as rows that reject:
// there is no relay for SCTP. This wrapper is the outermost one: when it fails because a port is
// taken, all others have done their work, and the error says so (dataplane.ErrPartial).
//
// An open TCP connection lives on when its backend leaves, its frontend goes or the plane is removed,
// but it ends with the process. A UDP flow ends with its backend or frontend. kube-proxy has the like
// of it for TCP (KEP-6032).
package localhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// Wrap makes New make wrapped planes.
func Wrap(wrapped dataplane.New) dataplane.New { return wrap(wrapped, onIPv6Loopback) }

// WrapBoth is Wrap for planes that cannot serve 127.0.0.0/8 either.
func WrapBoth(wrapped dataplane.New) dataplane.New { return wrap(wrapped, onLoopback) }

func wrap(wrapped dataplane.New, which ours) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		sockets, err := namespace.Here()
		if err != nil {
			return nil, fmt.Errorf("localhost: %w", err)
		}
		inner, err := wrapped(c)
		if err != nil {
			return nil, errors.Join(err, sockets.Close())
		}
		p := &plane{
			Dataplane: inner,
			config:    c,
			ours:      which,
			sockets:   sockets,
			places:    share.New((share.Files() - share.Reserve()) / 4),
			listeners: map[relay.Endpoint]*listener{},
			missing:   map[relay.Endpoint]bool{},
			counted:   map[bool]int{},
		}
		return p, nil
	}
}

type plane struct {
	dataplane.Dataplane
	config    dataplane.Config
	ours      ours
	sockets   namespace.Namespace
	known     bool                         // the last call succeeded
	part      *subset.Subset               // of its State, for the wrapped plane; nil: that has the State itself
	served    *subset.Subset               // likewise, for the relay; nil: nothing
	relay     *relay.Proxy                 // nil: there are no listeners
	places    *share.Pool                  // of listeners
	listeners map[relay.Endpoint]*listener // those that are open
	missing   map[relay.Endpoint]bool      // those that should be
	beyond    []error                      // listeners that were closed for the sake of others, in the last call
	counted   map[bool]int                 // those that the meter knows, by whether they are on [::1]
}

// Sync implements dataplane.Dataplane. It tries again to listen where that has failed.
func (p *plane) Sync(ctx context.Context, s *model.State) error {
	touched := p.derive(s)
	return p.settle(touched, p.Dataplane.Sync(ctx, inner(s, p.part)))
}

// Repair implements dataplane.Dataplane.
func (p *plane) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	touched := p.derive(s)
	return p.settle(touched, p.Dataplane.Repair(ctx, inner(s, p.part), r))
}

// derive makes the parts of a State anew, and finds where there is or shall be a listener.
func (p *plane) derive(s *model.State) map[relay.Endpoint]bool {
	p.part, p.served = p.ours.parts(s)
	touched := map[relay.Endpoint]bool{}
	for e := range p.listeners {
		touched[e] = true
	}
	if p.served != nil {
		for key := range p.served.Frontends {
			touched[relay.EndpointOf(key)] = true
		}
		p.report(nil)
	}
	return touched
}

// Apply implements dataplane.Dataplane.
func (p *plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	if p.part == nil {
		for key := range c.Frontends.Set.Keys() {
			if p.ours(key) {
				return p.Sync(ctx, s) // from now on the wrapped plane has a State of its own
			}
		}
		return p.Dataplane.Apply(ctx, s, c)
	}
	err := p.Dataplane.Apply(ctx, p.part.State, p.part.Change(s, c))
	served := p.served.Change(s, c)
	p.report(&served)
	return p.settle(relay.Touched(served), err)
}

// report has the relay know what is served; c is the change that led to that, or nil.
func (p *plane) report(c *model.Change) {
	switch {
	case p.relay == nil && len(p.served.Frontends) == 0:
		return
	case p.relay == nil:
		p.start()
		p.relay.Rows.Replace(p.served.State)
	case c == nil:
		p.relay.Rows.Replace(p.served.State)
	case defect.Is(defect.LocalhostBackends):
		p.relay.Rows.Change(model.Change{Frontends: c.Frontends})
	default:
		p.relay.Rows.Change(*c)
	}
	p.relay.Expel(c)
}

const (
	dialTimeout = 5 * time.Second
	maxDials    = 6                // backends that a connection tries
	idle        = 30 * time.Second // after which a flow of UDP ends, as in connection tracking one without answers
	maxPlaces   = 4096             // of connections, and of flows, if there are files for so many
)

// ResetOrphans implements dataplane.Observed.
func (p *plane) ResetOrphans(ctx context.Context, gone dataplane.Gone) (int, error) {
	n, err := p.Dataplane.ResetOrphans(ctx, gone)
	if p.relay != nil {
		n += p.relay.ResetOrphans(gone)
	}
	return n, err
}

// CloseIdle implements dataplane.Observed.
func (p *plane) CloseIdle(ctx context.Context, of *dataplane.Idle) (int, error) {
	n, err := p.Dataplane.CloseIdle(ctx, of)
	if p.relay != nil {
		n += p.relay.CloseIdle(of)
	}
	return n, err
}

// start makes the relay. It leaves files to the listeners, and to the rest of the process.
func (p *plane) start() {
	files := share.Files() - share.Reserve()
	p.relay = relay.New(relay.Options{
		DialTimeout: dialTimeout, Dials: maxDials, IdleTimeout: socket.Never, HalfClosedTimeout: socket.Never,
		FlowTimeout: idle, StreamTimeout: idle,
		MaxConnections: min(maxPlaces, files/8), MaxFlows: min(maxPlaces, files/8), Extra: files / 16,
	}, p.sockets)
}

// release ends all but connections.
func (p *plane) release() {
	if p.relay != nil {
		p.relay.Release()
		p.relay = nil
	}
}

// settle has listeners at the endpoints that should have one, and adds its errors to that of the wrapped plane.
func (p *plane) settle(touched map[relay.Endpoint]bool, inner error) error {
	p.known = dataplane.Known(inner)
	p.beyond = nil
	var errs []error
	for e := range touched {
		errs = append(errs, p.serve(e))
	}
	errs = append(errs, p.beyond...)
	if len(p.listeners) == 0 {
		p.release()
	}
	p.count()
	switch err := errors.Join(errs...); {
	case err == nil:
		return inner
	case inner != nil:
		return errors.Join(inner, err)
	default:
		return dataplane.Partial(err)
	}
}

// count tells how many listeners came or went.
func (p *plane) count() {
	now := map[bool]int{}
	for e := range p.listeners {
		now[e.Addr().Is6()]++
	}
	for _, v6 := range []bool{false, true} {
		if more := now[v6] - p.counted[v6]; more != 0 && p.config.Meter != nil {
			p.config.Meter.Listening(v6, more)
		}
	}
	p.counted = now
}

// wants is the pool that an endpoint leads to; ok is false if there shall be no listener.
func (p *plane) wants(e relay.Endpoint) (id model.PoolID, ok bool) {
	if p.served == nil {
		return id, false
	}
	for _, scope := range []model.Scope{model.Internal, model.Any} {
		key := model.Key{Addr: e.Addr(), Port: e.Port(), Protocol: e.Protocol, Scope: scope}
		if f, ok := p.served.Frontends[key]; ok {
			return f.Pool, true
		}
	}
	return id, false
}

func (p *plane) serve(e relay.Endpoint) error {
	delete(p.missing, e)
	id, ok := p.wants(e)
	if !ok {
		p.end(e)
		return nil
	}
	if p.listeners[e] != nil {
		return nil
	}
	if err := p.listen(e, id); err != nil {
		p.missing[e] = true
		if p.config.Meter != nil {
			p.config.Meter.NotListening(e.Addr().Is6())
		}
		return refused(e, id, err)
	}
	return nil
}

func refused(e relay.Endpoint, id model.PoolID, err error) error {
	return fmt.Errorf("frontend %s of %s: %w", e, id.Service, err)
}

// listener is one among all.
type listener struct {
	io.Closer
	plane *plane
	at    relay.Endpoint
	place share.Place
}

// listen opens a listener, which another plane of the same user may have, too, so that one can take over from the
// other. Programs that do not ask for sharing still get and cause "address already in use".
func (p *plane) listen(e relay.Endpoint, id model.PoolID) error {
	if err := p.config.Inject("localhost listen"); err != nil {
		return err
	}
	l := &listener{plane: p, at: e}
	err := p.sockets.Do(func() (err error) {
		internal := func(netip.Addr) relay.Packet { return relay.Packet{Internal: true} }
		l.Closer, err = p.relay.Listen(e, internal, socket.Shared)
		return err
	})
	if err != nil {
		return err
	}
	if !p.places.Enter(&l.place, share.Of(id.Service, share.Client{}), 1, l) {
		return errors.Join(errBeyond, l.Close())
	}
	p.listeners[e] = l
	return nil
}

// errBeyond: the process has only so many files.
var errBeyond = errors.New("its namespace has more than its share of the sockets that the process may open; " +
	"raise the limit of open files (ulimit -n, LimitNOFILE), or have fewer NodePorts")

// Used implements share.Holder.
func (*listener) Used() int64 { return 0 }

// Yield implements share.Holder. It is called by the plane's goroutine, which alone makes listeners.
func (l *listener) Yield() {
	p := l.plane
	p.end(l.at)
	p.missing[l.at] = true
	id, _ := p.wants(l.at)
	p.beyond = append(p.beyond, refused(l.at, id, errBeyond))
}

func (p *plane) end(e relay.Endpoint) {
	if l := p.listeners[e]; l != nil {
		p.places.Leave(&l.place)
		l.Close()
		delete(p.listeners, e)
	}
}

// Audit implements dataplane.Dataplane. Of listeners it knows those that this process could not open: those of another
// one are not in the kernel to be read.
func (p *plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	if p.relay != nil {
		p.relay.Forget(time.Now())
	}
	part := p.part
	if !p.known {
		part, _ = p.ours.parts(s)
	}
	r, err := p.Dataplane.Audit(ctx, inner(s, part), d)
	for e := range p.missing {
		if id, ok := p.wants(e); ok {
			r.Drifts = append(r.Drifts, dataplane.Drift{
				Class: "listeners", Object: "listener " + e.String(), Want: "relay to " + id.String(),
			})
		}
	}
	return r, err
}

func (p *plane) endAll() {
	for e := range p.listeners {
		p.end(e)
	}
	p.count()
	p.known, p.part, p.served = false, nil, nil
	clear(p.missing)
	p.release()
}

// Remove implements dataplane.Dataplane.
func (p *plane) Remove(ctx context.Context) error {
	p.endAll()
	return p.Dataplane.Remove(ctx)
}

// Close implements dataplane.Dataplane.
func (p *plane) Close() error {
	p.endAll()
	return errors.Join(p.Dataplane.Close(), p.sockets.Close())
}
