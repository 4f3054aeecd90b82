package kernelspace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// frontend names a load balancer: HNS has only one for each.
type frontend struct {
	vip      netip.Addr // not valid: all addresses of the node
	port     uint16
	protocol model.Protocol
	v6       bool
}

func (f frontend) String() string {
	switch {
	case f.vip.IsValid():
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(f.vip, f.port), f.protocol)
	case f.v6:
		return fmt.Sprintf("[node]:%d/%s", f.port, f.protocol)
	}
	return fmt.Sprintf("node:%d/%s", f.port, f.protocol)
}

func (f frontend) compare(o frontend) int {
	return cmp.Or(f.vip.Compare(o.vip), cmp.Compare(f.port, o.port), cmp.Compare(f.protocol, o.protocol),
		model.FalseFirst(f.v6, o.v6))
}

// balancer is a load balancer with addresses in place of the ids of endpoints.
type balancer struct {
	service  string
	pool     model.PoolID
	kind     model.Kind
	backends []model.Backend // all of one port; of kind HealthCheckNodePort: the node
	dsr      bool            // backends see the client's address
	kept     bool            // and the frontend's as the destination
	affinity bool
}

// layout is which load balancers a State means. Its changes are as large as those of the State:
//
//	rows ─► frontend ─► balancer ─► users of addresses
//	pool ─► frontends
//
// Rows of several addresses of the node are one load balancer.
type layout struct {
	everywhere bool // NodePorts are open on all addresses of the node
	features   hns.Features
	overlay    bool

	rows   map[model.Key]frontend
	keys   map[frontend][]model.Key // the rows of each
	wanted map[frontend]*balancer
	pools  map[model.PoolID]map[frontend]bool
	users  map[netip.Addr]int // how many balancers have it as a backend, or need an endpoint for it
}

func newLayout(everywhere bool, f hns.Features, overlay bool) *layout {
	return &layout{
		everywhere: everywhere, features: f, overlay: overlay,
		rows: map[model.Key]frontend{}, keys: map[frontend][]model.Key{}, wanted: map[frontend]*balancer{},
		pools: map[model.PoolID]map[frontend]bool{}, users: map[netip.Addr]int{},
	}
}

// change takes in what leads to s, and returns the load balancers that may differ, sorted, and the addresses that none
// needs any more.
func (l *layout) change(s *model.State, c model.Change) (dirty []frontend, idle []netip.Addr) {
	touched := map[frontend]bool{}
	for _, k := range c.Frontends.Delete {
		l.remove(k, touched)
	}
	for k, row := range c.Frontends.Set.All() {
		f, ok := l.frontend(k, row)
		if old, had := l.rows[k]; had && (!ok || old != f) {
			l.remove(k, touched)
		}
		if !ok {
			continue
		}
		if _, had := l.rows[k]; !had {
			l.rows[k] = f
			l.keys[f] = append(l.keys[f], k)
		}
		touched[f] = true
	}
	for id := range c.Pools.Keys() {
		for f := range l.pools[id] {
			touched[f] = true
		}
	}
	for f := range touched {
		idle = l.set(f, l.balancer(s, f), idle)
		dirty = append(dirty, f)
	}
	slices.SortFunc(dirty, frontend.compare)
	return dirty, slices.DeleteFunc(idle, func(a netip.Addr) bool { return l.users[a] > 0 })
}

// frontend is the load balancer of a row, if HNS can have one: it cannot refuse, it knows no clients of its own, and on
// loopback addresses it sees nothing. On overlay networks it has no IPv6.
func (l *layout) frontend(k model.Key, row model.Frontend) (frontend, bool) {
	f := frontend{k.Addr, k.Port, k.Protocol, k.Addr.Is6()}
	if row.Verdict != model.Forward || k.Scope != model.Any || k.Addr.IsLoopback() ||
		f.v6 && (l.overlay || !l.features.DualStack) {
		return f, false
	}
	if row.Kind == model.NodePort && l.everywhere {
		f.vip = netip.Addr{}
	}
	return f, true
}

func (l *layout) remove(k model.Key, touched map[frontend]bool) {
	f, ok := l.rows[k]
	if !ok {
		return
	}
	delete(l.rows, k)
	touched[f] = true
	if l.keys[f] = slices.DeleteFunc(l.keys[f], func(o model.Key) bool { return o == k }); len(l.keys[f]) == 0 {
		delete(l.keys, f)
	}
}

// balancer is what the rows of a frontend mean; nil: none.
func (l *layout) balancer(s *model.State, f frontend) *balancer {
	if len(l.keys[f]) == 0 {
		return nil
	}
	row := s.Frontends[l.keys[f][0]]
	pool := s.Pools[row.Pool]
	b := &balancer{
		service: row.Service, pool: row.Pool, kind: row.Kind, backends: pool.Serving(),
		dsr:  l.features.DSR && row.SNAT != model.Always,
		kept: l.features.DSR && row.Kept, affinity: l.features.Affinity && pool.Affinity > 0,
	}
	other := func(o model.Backend) bool { return o.Port != b.backends[0].Port }
	if slices.ContainsFunc(b.backends, other) {
		b.backends = slices.DeleteFunc(slices.Clone(b.backends), other)
	}
	return b
}

// set replaces the balancer of a frontend. It appends the addresses of the old one.
func (l *layout) set(f frontend, b *balancer, left []netip.Addr) []netip.Addr {
	if old := l.wanted[f]; old != nil {
		for _, a := range l.needs(f, old) {
			if l.users[a]--; l.users[a] == 0 {
				delete(l.users, a)
			}
			left = append(left, a)
		}
		if delete(l.pools[old.pool], f); len(l.pools[old.pool]) == 0 {
			delete(l.pools, old.pool)
		}
	}
	if b == nil {
		delete(l.wanted, f)
		return left
	}
	l.wanted[f] = b
	for _, a := range l.needs(f, b) {
		l.users[a]++
	}
	if l.pools[b.pool] == nil {
		l.pools[b.pool] = map[frontend]bool{}
	}
	l.pools[b.pool][f] = true
	return left
}

// needs are the addresses that must have endpoints: those of backends, and on overlay networks the ClusterIP's.
func (l *layout) needs(f frontend, b *balancer) (all []netip.Addr) {
	if b.kind != model.HealthCheckNodePort {
		for _, o := range b.backends {
			all = append(all, o.Addr)
		}
	}
	if l.overlay && b.kind == model.ClusterIP {
		all = append(all, f.vip)
	}
	return all
}

// document is the load balancer for HNS.
func (b *balancer) document(f frontend, endpoints []string, sourceVIP string) hns.LoadBalancer {
	m := hns.PortMapping{
		Protocol: uint32(f.protocol), InternalPort: b.backends[0].Port, ExternalPort: f.port,
		Flags: map[model.Kind]uint32{
			model.NodePort:       hns.LocalRoutedVIP | hns.VIPExternalIP,
			model.ExternalIP:     hns.VIPExternalIP,
			model.LoadBalancerIP: hns.VIPExternalIP,
		}[b.kind],
	}
	if b.kept {
		m.Flags |= hns.UseMux | hns.PreserveDIP
	}
	if b.affinity {
		m.DistributionType = hns.SourceIP
	}
	d := hns.LoadBalancer{
		Endpoints: endpoints, SourceVIP: sourceVIP, PortMappings: []hns.PortMapping{m}, SchemaVersion: hns.Schema(),
	}
	if f.vip.IsValid() {
		d.FrontendVIPs = []string{f.vip.String()}
	}
	if b.dsr {
		d.Flags |= hns.DSR
	}
	if f.v6 {
		d.Flags |= hns.IPv6
	}
	return d
}
