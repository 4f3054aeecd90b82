package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// locals are the addresses and ranges that are local for the sake of IPVS, which sees packets from
// elsewhere only if they are for this node. What is an address of one of the node's interfaces is local anyway.
type locals struct {
	handle *netlink.Handle
	fault  func(operation string) error
	mode   localMode
	users  map[netip.Addr]int // frontends that forward
	ranges []netip.Prefix     // of Service addresses; disjoint
	own    map[netip.Addr]bool
	held   map[netip.Prefix]bool
	// unused are those that may be surplus, nil: any.
	unused map[netip.Prefix]struct{}
}

// localMode is a way to make addresses local.
type localMode interface {
	// load lists what is there, and what belongs to the node itself.
	load() (held map[netip.Prefix]bool, err error)
	add(p netip.Prefix) error
	remove(p netip.Prefix) error
	// ranges reports whether whole ranges can be added.
	ranges() bool
	// link is the name of the interface whose addresses are not the node's own.
	link() string
	// clear deletes all that there is.
	clear() error
}

func openLocals(o Options, fault func(string) error) (*locals, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	l := &locals{handle: handle, fault: fault}
	switch o.AddressMode {
	case "", Route:
		l.mode = routes{handle, map[bool]net.IP{}}
	case Dummy:
		l.mode = dummy{handle}
	default:
		handle.Close()
		return nil, fmt.Errorf("address mode %q is none of %s, %s", o.AddressMode, Route, Dummy)
	}
	return l, nil
}

// load reads back what the kernel holds.
func (l *locals) load() (err error) {
	if err = l.fault("routes list"); err != nil {
		return err
	}
	l.unused = nil
	if l.held, err = l.mode.load(); err != nil {
		return err
	}
	l.own, err = ownAddresses(l.handle, l.mode.link())
	return err
}

// want takes over what a State needs.
func (l *locals) want(s *model.State) {
	l.users = map[netip.Addr]int{}
	for key, f := range s.Frontends {
		l.count(key, f, 1)
	}
	l.setRanges(s)
}

func (l *locals) count(key model.Key, f model.Frontend, n int) {
	if f.Verdict != model.Forward {
		return
	}
	if l.users[key.Addr] += n; l.users[key.Addr] > 0 {
		return
	}
	delete(l.users, key.Addr)
	if l.unused != nil {
		l.unused[single(key.Addr)] = struct{}{}
	}
}

func (l *locals) setRanges(s *model.State) {
	l.ranges, l.unused = nil, nil
	if !l.mode.ranges() {
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
	return l.users[p.Addr()] > 0 && !l.own[p.Addr()] && !p.Addr().IsLoopback() && !slices.ContainsFunc(l.ranges, covered)
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

// idle is surplus, at a cost that depends on what has changed since the last call.
func (l *locals) idle() (surplus []netip.Prefix) {
	if l.unused == nil {
		surplus = l.surplus()
	}
	for p := range l.unused {
		if l.held[p] && !l.wants(p) {
			surplus = append(surplus, p)
		}
	}
	l.unused = map[netip.Prefix]struct{}{}
	return surplus
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (l *locals) add(missing []netip.Prefix) error {
	var errs []error
	for _, p := range missing {
		if err := l.fault("routes add"); err != nil {
			return err
		}
		if err := l.mode.add(p); err != nil {
			errs = append(errs, fmt.Errorf("make %s local: %w", p, err))
			continue
		}
		l.held[p] = true
	}
	return partial(errs)
}

func (l *locals) remove(surplus []netip.Prefix) error {
	var errs []error
	for _, p := range surplus {
		if err := l.fault("routes delete"); err != nil {
			return err
		}
		if err := l.mode.remove(p); err != nil {
			errs = append(errs, fmt.Errorf("make %s no longer local: %w", p, err))
			continue
		}
		delete(l.held, p)
	}
	return partial(errs)
}

// partial is dataplane.ErrPartial with the errors, or nil if there are none.
func partial(errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", dataplane.ErrPartial, err)
	}
	return nil
}

// ownAddresses are those of all interfaces but the one of that name.
func ownAddresses(h *netlink.Handle, but string) (map[netip.Addr]bool, error) {
	except := 0
	if but != "" {
		if link, err := h.LinkByName(but); err == nil {
			except = link.Attrs().Index
		}
	}
	addrs, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && a.LinkIndex != except {
			own[addr.Unmap()] = true
		}
	}
	return own, nil
}

// routes are local routes through the loopback interface, in the table that the kernel keeps those of
// the node's own addresses in: packets that pass the node take no further look-up for them.
type routes struct {
	handle *netlink.Handle
	nodes  map[bool]net.IP // the node's first address of each family, true for IPv6, once it was asked for
}

// protocol marks our routes ("ip route show table local proto 250").
const protocol = 250

const localTable = unix.RT_TABLE_LOCAL

func (routes) ranges() bool { return true }

// link is that of kube-proxy's addresses, which go.
func (routes) link() string { return dummyName }

func (r routes) load() (map[netip.Prefix]bool, error) {
	clear(r.nodes)
	held := map[netip.Prefix]bool{}
	all, err := r.list()
	for _, route := range all {
		if p, ok := prefixOf(route.Dst); ok {
			held[p] = true
		}
	}
	return held, err
}

func (r routes) list() (all []netlink.Route, err error) {
	filter := netlink.Route{Table: localTable, Protocol: protocol}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		some, err := r.handle.RouteListFiltered(family, &filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		all = append(all, some...)
	}
	return all, nil
}

func (r routes) add(p netip.Prefix) error {
	route := routeTo(p)
	route.Src = r.source(p.Addr())
	err := r.handle.RouteAppend(route)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

func (r routes) remove(p netip.Prefix) error {
	err := r.handle.RouteDel(routeTo(p))
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func (r routes) clear() error {
	all, err := r.list()
	for _, route := range all {
		err = errors.Join(err, r.handle.RouteDel(&route))
	}
	return err
}

// source is the address that processes of this node would have for packets to an address if it were not
// local. Left to itself the kernel takes the destination for the source.
func (r routes) source(a netip.Addr) net.IP {
	found, err := r.handle.RouteGet(a.AsSlice())
	switch {
	case err != nil || len(found) == 0:
		return nil // nobody here can have sent packets there; what is still sent is masqueraded
	case found[0].Type == unix.RTN_LOCAL:
		return r.node(a.Is6()) // it is still on kube-proxy's interface
	}
	return found[0].Src
}

// node is the node's first address of a family; nil: it has none.
func (r routes) node(v6 bool) net.IP {
	if ip, known := r.nodes[v6]; known {
		return ip
	}
	family := netlink.FAMILY_V4
	if v6 {
		family = netlink.FAMILY_V6
	}
	but, _ := r.handle.LinkByName(dummyName)
	addrs, _ := r.handle.AddrList(nil, family) // without one the kernel chooses
	r.nodes[v6] = nil
	for _, a := range addrs {
		const unwanted = unix.IFA_F_TEMPORARY | unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE
		proxys := but != nil && a.LinkIndex == but.Attrs().Index
		if !proxys && a.Scope == int(netlink.SCOPE_UNIVERSE) && a.Flags&unwanted == 0 {
			r.nodes[v6] = a.IP
			break
		}
	}
	return r.nodes[v6]
}

// loopbackIndex is that of lo in every network namespace.
const loopbackIndex = 1

func routeTo(p netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		LinkIndex: loopbackIndex, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: localTable, Protocol: protocol,
	}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	if size == 32 {
		addr = addr.Unmap()
	}
	return netip.PrefixFrom(addr, bits), ok
}

// dummy is the interface of kube-proxy's mode ipvs, with an address for each that shall be local.
type dummy struct{ handle *netlink.Handle }

const dummyName = "kube-ipvs0"

func (dummy) ranges() bool { return false }
func (dummy) link() string { return dummyName }

func (d dummy) load() (map[netip.Prefix]bool, error) {
	held := map[netip.Prefix]bool{}
	link, err := d.handle.LinkByName(dummyName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return held, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", dummyName, err)
	}
	addrs, err := d.handle.AddrList(link, netlink.FAMILY_ALL)
	for _, a := range addrs {
		if p, ok := prefixOf(a.IPNet); ok && !p.Addr().IsLinkLocalUnicast() {
			held[p] = true
		}
	}
	return held, err
}

// find makes the interface if need be. It stays down: its addresses are local all the same.
func (d dummy) find() (netlink.Link, error) {
	link, err := d.handle.LinkByName(dummyName)
	if !errors.As(err, &netlink.LinkNotFoundError{}) {
		return link, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = dummyName
	if err := d.handle.LinkAdd(&netlink.Dummy{LinkAttrs: attrs}); err != nil {
		return nil, fmt.Errorf("make interface %s: %w", dummyName, err)
	}
	return d.handle.LinkByName(dummyName)
}

func (d dummy) add(p netip.Prefix) error {
	link, err := d.find()
	if err != nil {
		return err
	}
	return d.handle.AddrReplace(link, addressOn(p))
}

func (d dummy) remove(p netip.Prefix) error {
	link, err := d.find()
	if err != nil {
		return err
	}
	err = d.handle.AddrDel(link, addressOn(p))
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil
	}
	return err
}

// addressOn makes IPv6 addresses deprecated, so that masquerading takes none of them for a source: it looks
// at the addresses of all interfaces.
func addressOn(p netip.Prefix) *netlink.Addr {
	n := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	a := &netlink.Addr{IPNet: n}
	if p.Addr().Is6() {
		a.Flags, a.ValidLft = unix.IFA_F_NODAD, math.MaxUint32
	}
	return a
}

func (d dummy) clear() error {
	link, err := d.handle.LinkByName(dummyName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	return d.handle.LinkDel(link)
}
