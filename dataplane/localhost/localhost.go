// Package localhost wraps a data plane so that NodePorts on the IPv6 loopback address work. Planes
// based on netfilter cannot do that: after the translation is undone, a backend's answer is a packet
// to ::1 that arrived on another interface than lo, and no sysctl makes IPv6 route such a packet (see
// rt6_need_strict in the kernel's net/ipv6/route.c; IPv4 has route_localnet, but IPVS sends nothing from
// there to other machines, see WrapBoth). So these frontends are served in user space, for the only client
// they have, which is this node itself:
//
//	State ─┬─ all other rows ──────► wrapped plane ─► kernel
//	       └─ [::1] that forward ──► a socket each ─► choose a backend ─► TCP: copy both ways
//	                                                                     UDP: a socket for each flow
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
	"maps"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/internal/defect"
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
			clients:   newClients(sockets),
			relays:    map[model.Key]*relay{},
			missing:   keys{},
			users:     map[model.PoolID]keys{},
			counted:   map[bool]int{},
		}
		return p, nil
	}
}

type plane struct {
	dataplane.Dataplane
	config  dataplane.Config
	ours    ours
	clients *clients
	known   bool                  // the last call succeeded
	part    *subset.Subset        // of its State, for the wrapped plane; nil: that has the State itself
	relays  map[model.Key]*relay  // of both scopes, as Any
	counted map[bool]int          // relays that the meter knows, by whether they are on [::1]
	missing keys                  // where a relay could not listen, or had to stop, at least once
	beyond  []error               // relays that had to stop for the sake of others, in the last call
	users   map[model.PoolID]keys // relays by their pools
}

// keys are destinations that are ours. What happens there, Lookup says, whatever the scope of the row.
type keys map[model.Key]struct{}

func (k keys) add(ours ours, key model.Key) {
	if ours(key) {
		key.Scope = model.Any
		k[key] = struct{}{}
	}
}

// Sync implements dataplane.Dataplane. It tries again to listen where that has failed.
func (p *plane) Sync(ctx context.Context, s *model.State) error {
	touched := p.lookAll(s)
	return p.settle(s, touched, p.Dataplane.Sync(ctx, inner(s, p.part)))
}

// Repair implements dataplane.Dataplane.
func (p *plane) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	touched := p.lookAll(s)
	return p.settle(s, touched, p.Dataplane.Repair(ctx, inner(s, p.part), r))
}

// lookAll derives the wrapped plane's State anew, and finds all destinations at which there is or shall be a relay.
func (p *plane) lookAll(s *model.State) (touched keys) {
	p.part, touched = look(s, p.ours)
	for key := range p.relays {
		touched.add(p.ours, key)
	}
	return touched
}

// Apply implements dataplane.Dataplane.
func (p *plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	touched := keys{}
	for key := range c.Frontends.Set.Keys() {
		touched.add(p.ours, key)
	}
	for _, key := range c.Frontends.Delete {
		touched.add(p.ours, key)
	}
	switch {
	case p.part == nil && len(touched) == 0:
		return p.Dataplane.Apply(ctx, s, c)
	case p.part == nil: // from now on the wrapped plane has a State of its own
		return p.Sync(ctx, s)
	}
	for id := range c.Pools.Set.All() {
		maps.Copy(touched, p.users[id])
	}
	c = p.part.Change(s, c)
	return p.settle(s, touched, p.Dataplane.Apply(ctx, p.part.State, c))
}

// settle makes relays serve what the State says, and adds its errors to that of the wrapped plane.
func (p *plane) settle(s *model.State, touched keys, inner error) error {
	p.known = inner == nil || errors.Is(inner, dataplane.ErrPartial)
	p.beyond = nil
	var errs []error
	for key := range touched {
		errs = append(errs, p.serve(s, key))
	}
	errs = append(errs, p.beyond...)
	p.count()
	switch err := errors.Join(errs...); {
	case err == nil:
		return inner
	case inner != nil:
		return errors.Join(inner, err)
	default:
		return fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
	}
}

// count tells how many relays came or went.
func (p *plane) count() {
	now := map[bool]int{}
	for key := range p.relays {
		now[key.Addr.Is6()]++
	}
	for _, v6 := range []bool{false, true} {
		if more := now[v6] - p.counted[v6]; more != 0 && p.config.Meter != nil {
			p.config.Meter.Listening(v6, more)
		}
	}
	p.counted = now
}

// wants is the pool that a relay serves; ok is false if there shall be none.
func wants(s *model.State, key model.Key) (id model.PoolID, ok bool) {
	d := s.Lookup(model.Packet{Protocol: key.Protocol, Source: key.Addr, Destination: key.AddrPort()})
	return d.Pool, d.Verdict == model.Forward && key.Protocol != model.SCTP
}

func (p *plane) serve(s *model.State, key model.Key) (err error) {
	id, ok := wants(s, key)
	if !ok {
		p.end(key)
		return nil
	}
	r := p.relays[key]
	if r == nil {
		if r, err = p.listen(key, id, s.Pools[id]); err != nil {
			p.missing[key] = struct{}{}
			if p.config.Meter != nil {
				p.config.Meter.NotListening(key.Addr.Is6())
			}
			return refused(key, id, err)
		}
		p.relays[key] = r
	}
	p.leave(key, r)
	if p.users[id] == nil {
		p.users[id] = keys{}
	}
	p.users[id][key] = struct{}{}
	if !defect.Is(defect.LocalhostBackends) {
		r.use(id, s.Pools[id])
	}
	return nil
}

func refused(key model.Key, id model.PoolID, err error) error {
	return fmt.Errorf("frontend %s/%s of %s: %w", key.AddrPort(), key.Protocol, id.Service, err)
}

func (p *plane) listen(key model.Key, id model.PoolID, pool model.Pool) (*relay, error) {
	if err := p.config.Inject("localhost listen"); err != nil {
		return nil, err
	}
	r, err := listen(p.clients, key, id, pool)
	if err != nil {
		return nil, err
	}
	if !p.clients.listeners.Enter(&r.place, share.Of(id.Service, share.Client{}), 1, &standing{r, p, key}) {
		r.close()
		return nil, errBeyond
	}
	return r, nil
}

// errBeyond: the process has only so many files.
var errBeyond = errors.New("its namespace has more than its share of the sockets that the process may open; " +
	"raise the limit of open files (ulimit -n, LimitNOFILE), or have fewer NodePorts")

// standing is a relay among all.
type standing struct {
	*relay
	plane *plane
	key   model.Key
}

// Used implements share.Holder.
func (*standing) Used() int64 { return 0 }

// Yield implements share.Holder. It is called by the plane's goroutine, which alone makes relays.
func (s *standing) Yield() {
	id := s.id()
	s.plane.end(s.key)
	s.plane.missing[s.key] = struct{}{}
	s.plane.beyond = append(s.plane.beyond, refused(s.key, id, errBeyond))
}

// leave takes a relay from the users of its pool.
func (p *plane) leave(key model.Key, r *relay) {
	id := r.id()
	users := p.users[id]
	if delete(users, key); len(users) == 0 {
		delete(p.users, id)
	}
}

func (p *plane) end(key model.Key) {
	if r := p.relays[key]; r != nil {
		p.clients.listeners.Leave(&r.place)
		r.close()
		p.leave(key, r)
		delete(p.relays, key)
	}
}

// Audit implements dataplane.Dataplane. Of relays it knows those that this process could not make: the
// relays of another one are not in the kernel to be read.
func (p *plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	part := p.part
	if !p.known {
		part, _ = look(s, p.ours)
	}
	r, err := p.Dataplane.Audit(ctx, inner(s, part), d)
	for key := range p.missing {
		if id, ok := wants(s, key); ok && p.relays[key] == nil {
			object := fmt.Sprintf("listener %s/%s", key.AddrPort(), key.Protocol)
			want := "relay to " + id.String()
			r.Drifts = append(r.Drifts, dataplane.Drift{Class: "listeners", Object: object, Want: want})
		}
	}
	return r, err
}

func (p *plane) endAll() {
	for key := range p.relays {
		p.end(key)
	}
	p.count()
	p.known, p.part = false, nil
	clear(p.missing)
}

// Remove implements dataplane.Dataplane.
func (p *plane) Remove(ctx context.Context) error {
	p.endAll()
	return p.Dataplane.Remove(ctx)
}

// Close implements dataplane.Dataplane.
func (p *plane) Close() error {
	p.endAll()
	return errors.Join(p.Dataplane.Close(), p.clients.close(), p.clients.sockets.Close())
}
