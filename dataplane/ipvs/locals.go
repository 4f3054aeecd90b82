package ipvs

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// IPVS sees packets in LOCAL_IN, so the address of a virtual server has to be local. There are three ways to make it
// so:
//
//	cidr    one route for each range of Service addresses, one for each other address
//	route   one route for each address
//	dummy   an address on kube-ipvs0, as kube-proxy has it
//
// A range that is local is the node's, for ports without a Service, too: the table refuses those. An address stays
// local while connections to it go on, though no frontend has it any more (pastaddresses.go).

// locals are the addresses and ranges that are local for the sake of IPVS. It sees packets from elsewhere only if they
// are for this node. An address of one of the node's interfaces is local anyway.
type locals struct {
	handle *netlink.Handle
	log    *slog.Logger
	fault  func(operation string) error
	routes *routes
	dummy  *dummy
	// way is that of the address mode, other is not. The addresses of other are left from another mode, and go when the
	// same addresses are local by way.
	way, other way
	whole      bool                 // ranges are made local as a whole
	users      map[netip.Addr]users // by frontends
	ranges     []netip.Prefix       // of Service addresses; disjoint
	addrs      []netlink.Addr       // of all interfaces
	own        map[netip.Addr]bool
	held       map[netip.Prefix]bool
	otherHeld  map[netip.Prefix]bool // prefixes that the other address mode has made local; nil: none
	// unused are those that may be surplus, nil: any.
	unused map[netip.Prefix]struct{}
}

// users are the frontends of an address. An address with rows of scope Internal only is not local: packets of other
// clients must pass the node (externalFailoverPolicy Passthrough). IPVS sees those of the node itself in LOCAL_OUT.
type users struct {
	forward int // of verdict Forward
	open    int // of scope Any
}

func (u users) want() bool { return u.forward > 0 && u.open > 0 }

// way is a way to make addresses local.
type way interface {
	// claim makes what the addresses shall be on.
	claim() error
	// load lists what is there of ours; addrs are those of all interfaces.
	load(addrs []netlink.Addr) (held map[netip.Prefix]bool, err error)
	add(p netip.Prefix) error
	remove(p netip.Prefix) error
	// clear deletes all that there is of ours.
	clear() error
}

func openLocals(o Options, log *slog.Logger, fault func(string) error) (*locals, error) {
	excluded, err := o.excluded()
	if err != nil {
		return nil, err
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	l := &locals{
		handle: handle, log: log, fault: fault,
		routes: newRoutes(handle),
		dummy:  &dummy{handle: handle, excluded: excluded},
	}
	l.way, l.other, l.whole = l.routes, l.dummy, true
	switch o.AddressMode {
	case "", CIDR:
	case Route:
		l.whole = false
	case Dummy:
		l.way, l.other, l.whole = l.dummy, l.routes, false
	default:
		handle.Close()
		return nil, fmt.Errorf("address mode %q is none of %s, %s, %s", o.AddressMode, CIDR, Route, Dummy)
	}
	return l, nil
}

// claim makes what the addresses shall be on. A kernel that cannot have the interface has routes.
func (l *locals) claim() error {
	if err := l.fault("routes claim"); err != nil {
		return err
	}
	err := l.way.claim()
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	l.log.Warn("this kernel cannot create a dummy interface (module dummy); address mode cidr is used",
		"error", err)
	l.way, l.other, l.whole = l.routes, l.dummy, true
	return nil
}

// load reads back what the kernel holds.
func (l *locals) load() (err error) {
	if err = l.fault("routes list"); err != nil {
		return err
	}
	l.unused = nil
	if l.addrs, err = addresses(l.handle); err != nil {
		return err
	}
	if l.held, err = l.way.load(l.addrs); err != nil {
		return err
	}
	l.own, err = l.ownAddresses()
	return err
}

// loadAll reads back what the other modes have left, too.
func (l *locals) loadAll() (err error) {
	if err = l.load(); err != nil {
		return err
	}
	l.otherHeld, err = l.other.load(l.addrs)
	return err
}

// claimed reports whether an address is on the interface that is ours in this mode. It may have been kube-proxy's.
func (l *locals) claimed(a netip.Addr) bool { return l.way == l.dummy && l.dummy.held[single(a)] }

// want takes over what a State needs.
func (l *locals) want(s *model.State) {
	l.users = map[netip.Addr]users{}
	for key, f := range s.Frontends {
		l.count(key, f, 1)
	}
	l.setRanges(s)
}

func (l *locals) count(key model.Key, f model.Frontend, n int) {
	u := l.users[key.Addr]
	if f.Verdict == model.Forward {
		u.forward += n
	}
	if key.Scope == model.Any && f.Verdict != model.Pass { // that of no row
		u.open += n
	}
	if l.users[key.Addr] = u; u.want() {
		return
	}
	if u == (users{}) {
		delete(l.users, key.Addr)
	}
	if l.unused != nil {
		l.unused[single(key.Addr)] = struct{}{}
	}
}

func (l *locals) setRanges(s *model.State) {
	l.ranges, l.unused = nil, nil
	if !l.whole {
		return
	}
	var all []netip.Prefix
	for p := range s.Guards {
		if !p.IsSingleIP() {
			all = append(all, p)
		}
	}
	l.ranges = model.Disjoint(all)
}

// wants reports whether an address or range should be held. Loopback addresses are always local.
func (l *locals) wants(p netip.Prefix) bool {
	if !p.IsSingleIP() {
		return slices.Contains(l.ranges, p)
	}
	covered := func(r netip.Prefix) bool { return r.Contains(p.Addr()) }
	a := p.Addr()
	return l.users[a].want() && !l.own[a] && !a.IsLoopback() && !slices.ContainsFunc(l.ranges, covered)
}

// missing are those of the given that should be held and are not.
func (l *locals) missing(candidates []netip.Prefix) (missing []netip.Prefix) {
	for _, p := range candidates {
		if l.wants(p) && !l.held[p] {
			missing = append(missing, p)
		}
	}
	return missing
}

// all are the candidates of a whole State.
func (l *locals) all() []netip.Prefix {
	all := slices.Clone(l.ranges)
	for a := range l.users {
		all = append(all, single(a))
	}
	return all
}

// surplus are those that are held and should not be.
func (l *locals) surplus() (surplus []netip.Prefix) {
	for p := range l.held {
		if !l.wants(p) {
			surplus = append(surplus, p)
		}
	}
	return surplus
}

// idle is surplus but for where connections go on, at a cost that depends on what has changed since the last call.
func (l *locals) idle(ending ending) (surplus []netip.Prefix) {
	candidates := slices.Collect(maps.Keys(l.unused))
	if l.unused == nil {
		candidates = l.surplus()
	}
	l.unused = map[netip.Prefix]struct{}{}
	for _, p := range candidates {
		switch {
		case !l.held[p] || l.wants(p):
		case ending.keep(p):
			l.unused[p] = struct{}{}
		default:
			surplus = append(surplus, p)
		}
	}
	return surplus
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (l *locals) add(missing []netip.Prefix) error {
	var errs []error
	for _, p := range missing {
		if err := l.fault("routes add"); err != nil {
			return err
		}
		if err := l.way.add(p); err != nil {
			errs = append(errs, fmt.Errorf("make %s local: %w", p, err))
			continue
		}
		l.held[p] = true
	}
	return dataplane.Partial(errs...)
}

func (l *locals) remove(surplus []netip.Prefix) error {
	return l.removeFrom(l.way, l.held, surplus)
}

// removeFormer removes addresses that other modes have left, once they are local by this mode, or no connection needs
// them.
func (l *locals) removeOther(ending ending) (gone []netip.Prefix, err error) {
	if l.otherHeld == nil {
		return nil, nil
	}
	for p := range l.otherHeld {
		if l.holds(p) || !ending.keep(p) {
			gone = append(gone, p)
		}
	}
	if err := l.removeFrom(l.other, l.otherHeld, gone); err != nil || len(l.otherHeld) > 0 {
		return gone, err
	}
	l.otherHeld = nil
	return gone, l.other.clear()
}

// holds reports whether an address is local by the way of the address mode.
func (l *locals) holds(p netip.Prefix) bool {
	if l.held[p] {
		return true
	}
	return slices.ContainsFunc(l.ranges, func(r netip.Prefix) bool { return l.held[r] && r.Contains(p.Addr()) })
}

func (l *locals) removeFrom(way way, held map[netip.Prefix]bool, surplus []netip.Prefix) error {
	var errs []error
	for _, p := range surplus {
		if err := l.fault("routes delete"); err != nil {
			return err
		}
		if err := way.remove(p); err != nil {
			errs = append(errs, fmt.Errorf("make %s no longer local: %w", p, err))
			continue
		}
		delete(held, p)
	}
	return dataplane.Partial(errs...)
}

// clear deletes everything that any mode has made.
func (l *locals) clear() error {
	if err := l.fault("routes delete"); err != nil {
		return err
	}
	return errors.Join(l.routes.clear(), l.dummy.clear())
}

// ownAddresses are those of all interfaces but the one for addresses of Services.
func (l *locals) ownAddresses() (map[netip.Addr]bool, error) {
	link, err := l.dummy.find()
	if err != nil {
		return nil, err
	}
	own := map[netip.Addr]bool{}
	for _, a := range l.addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && (link == nil || a.LinkIndex != link.Attrs().Index) {
			own[addr.Unmap()] = true
		}
	}
	return own, nil
}

// addresses are those of all interfaces.
func addresses(h *netlink.Handle) ([]netlink.Addr, error) {
	addrs, err := list(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return addrs, nil
}

// listTries is how often a list is asked for that changes while the kernel writes it.
const listTries = 10

// list repeats what lists many objects until none of them changed meanwhile.
func list[T any](once func() ([]T, error)) (all []T, err error) {
	for range listTries {
		if all, err = once(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
