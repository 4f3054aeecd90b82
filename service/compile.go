package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// Rows are what one Service adds to a State if no other Service contests its addresses. They are
// sorted by their keys.
type Rows struct {
	Frontends []model.Row[model.Key, model.Frontend]
	Pools     []model.Row[model.PoolID, model.Pool] // those that Frontends refer to
	Health    []model.Row[netip.AddrPort, model.Health]
	Problems  []Problem

	claims []claimed    // that the rows need
	of     *entry       // nil: of no Service in a Table
	used   []netip.Addr // terminating endpoints that get new connections, of Services with the annotation drain-barrier
}

// Compile computes the rows of a Service from its slices, which must be in the order of their names.
func Compile(v *View, s *Service, list []*Slice) Rows {
	c := compiler{view: v, service: s, slices: current(list)}
	c.compile()
	return c.rows
}

// begin prepares for another Service. The rows of the last one are overwritten.
func (c *compiler) begin(v *View, s *Service, list []*Slice) {
	over := c.rows
	*c = compiler{
		view: v, service: s, slices: list,
		ready: c.ready[:0], candidates: c.candidates[:0], addresses: c.addresses[:0], variants: c.variants[:0],
	}
	c.rows = Rows{
		Frontends: over.Frontends[:0], Pools: over.Pools[:0], Health: over.Health[:0], claims: over.claims[:0],
		used: over.used[:0],
	}
}

// compile fills c.rows. Rows and claims are sorted by their keys: the same objects always give the same rows, in
// whatever order they come.
func (c *compiler) compile() {
	if c.service == nil || c.service.Ignored != "" {
		return
	}
	if c.unhashed {
		c.problem("Service "+c.service.Name.String(), c.service.schedulerField(), Share, fmt.Sprintf(
			"the share of namespace %s in the node's %d tables of such schedulers is used up; the configured one is used",
			c.service.Name.Namespace, sharedTables))
	}
	if why := c.service.unscheduled(c.view.Mode); why != "" {
		c.problem("Service "+c.service.Name.String(), c.service.schedulerField(), Unsupported, why)
	}
	if name := c.returning(); name != "" && c.service.Rebalance > 0 {
		c.problem("Service "+c.service.Name.String(), annotation(rebalanceAnnotation), Unsupported,
			fmt.Sprintf("has no effect: by scheduler %s clients come back to their endpoints", name))
	}
	for _, ip := range c.service.ClusterIPs {
		c.ready = c.ready[:0]
		for i := range c.service.Ports {
			c.port(&c.service.Ports[i], ip)
		}
		c.health(ip)
		if c.view.HNS != nil {
			c.healthVIPs(ip)
		}
	}
	if c.view.HNS != nil {
		c.unsupportedOfAll()
	}
	slices.SortFunc(c.rows.Frontends, func(a, b model.Row[model.Key, model.Frontend]) int { return a.Key.Compare(b.Key) })
	slices.SortFunc(c.rows.Pools, func(a, b model.Row[model.PoolID, model.Pool]) int { return a.Key.Compare(b.Key) })
	slices.SortFunc(c.rows.Health, func(a, b model.Row[netip.AddrPort, model.Health]) int { return a.Key.Compare(b.Key) })
	slices.SortFunc(c.rows.claims, func(a, b claimed) int { return a.claim().compare(b.claim()) })
	c.rows.claims = slices.CompactFunc(c.rows.claims, func(a, b claimed) bool { return a.claim() == b.claim() })
	if c.unsaid > 0 {
		c.rows.Problems = append(c.rows.Problems, Problem{
			Object: "Service " + c.service.Name.String(), Reason: fmt.Sprintf("%d more problems", c.unsaid),
		})
	}
}

// problem names one, unless there are very many.
func (c *compiler) problem(object, field string, cause Cause, reason string) {
	if len(c.rows.Problems) == maxProblems {
		c.unsaid++
		return
	}
	c.rows.Problems = append(c.rows.Problems, Problem{Object: object, Field: field, Reason: reason, Cause: cause})
}

// takes reports whether the Service can be reached at an address, and reports a Problem if it cannot.
func (c *compiler) takes(e address, p model.Protocol) bool {
	why := c.view.refuse(e, p)
	if why != "" {
		c.problem("Service "+c.service.Name.String(), e.kind.String(), Precedence,
			fmt.Sprintf("%s/%s %s; the Service is not reached there", e.AddrPort, p, why))
	}
	return why == ""
}

// current leaves out mirrored slices if there are real ones.
func current(list []*Slice) []*Slice {
	mirrored := func(s *Slice) bool { return s.Mirrored }
	if !slices.ContainsFunc(list, mirrored) {
		return list
	}
	if own := slices.DeleteFunc(slices.Clone(list), mirrored); len(own) > 0 {
		return own
	}
	return list
}

// compiler gathers the rows of one Service.
type compiler struct {
	view    *View
	service *Service
	slices  []*Slice
	rows    Rows
	ready   []netip.Addr // of endpoints on this node, of the family at hand, if anybody asks

	notListening bool                          // there is no listener for its health check
	unhashed     bool                          // there is no table for its scheduler
	unsaid       int                           // problems beyond maxProblems
	allowed      map[netip.Addr][]netip.Prefix // source ranges of addresses, which all ports share

	candidates []candidate // memory for those of one port
	addresses  []address   // likewise
	variants   []variant   // of one address
}

// port adds the rows of one port of the Service in the family of one of its ClusterIPs.
func (c *compiler) port(p *Port, ip netip.Addr) {
	c.candidates = c.view.gather(c.candidates[:0], p, c.slices, ip.Is4() != defect.Is(defect.ServiceFamily))
	id := c.service.pool(p, ip)
	if c.view.Arrive != nil {
		c.view.Arrive(c.service, id, c.candidates)
	}
	s := choose(c.view, c.service, id, c.candidates)
	c.inspect(&s)
	if c.view.HNS != nil {
		c.unsupported(p, &s)
	}
	pools := [2]model.PoolID{id, {Service: id.Service, V6: id.V6, Local: true}}
	var used [2]bool
	c.addresses = c.service.addresses(c.addresses[:0], c.view, p, ip)
	for _, e := range c.addresses {
		if !c.takes(e, p.Protocol) {
			continue
		}
		c.rows.claims = append(c.rows.claims, e.claim(c.view, c.service))
		allow := c.allow(e)
		c.variants = c.service.variants(c.variants[:0], c.view, e)
		for _, l := range c.variants {
			row := model.Frontend{Service: id.Service, Verdict: s.verdict(l.pool), Allow: allow, Kind: e.kind,
				Kept: c.service.Preserve && e.kind == model.LoadBalancerIP && c.view.HNS != nil}
			if row.Verdict == model.Forward {
				row.Pool, row.SNAT, row.Hooked = pools[l.pool], l.snat, c.service.Hooked
				used[l.pool] = true
			} else if c.service.passes(e) {
				continue // routing decides
			} else if l.scope == model.Internal && row.Verdict == model.Reject && !e.Addr().IsLoopback() {
				continue // the row for all clients says the same
			}
			key := model.Key{Addr: e.Addr(), Port: e.Port(), Protocol: p.Protocol, Scope: l.scope}
			c.rows.Frontends = append(c.rows.Frontends, model.Row[model.Key, model.Frontend]{Key: key, Value: row})
		}
	}
	if c.service.Barrier {
		c.rows.used = s.ending(c.rows.used, used)
	}
	for i := range pools {
		if used[i] {
			pool := model.Pool{Backends: s.backends(i), Affinity: c.service.Affinity, Scheduler: c.scheduler()}
			if p.Protocol == model.TCP && c.returning() == "" {
				pool.Rebalance = c.service.Rebalance
			}
			c.rows.Pools = append(c.rows.Pools, model.Row[model.PoolID, model.Pool]{Key: pools[i], Value: pool})
		}
	}
}

// allow are the sources that may reach an address: nil means all.
func (c *compiler) allow(e address) []netip.Prefix {
	if e.kind != model.LoadBalancerIP || c.service.SourceRanges == nil {
		return nil
	}
	allow, ok := c.allowed[e.Addr()]
	if !ok {
		if c.allowed == nil {
			c.allowed = map[netip.Addr][]netip.Prefix{}
		}
		allow = c.service.allow(c.view, e)
		c.allowed[e.Addr()] = allow
	}
	return allow
}

// portName is the name of a Service's port in rows.
func portName(service Name, port string) string {
	if port == "" {
		return service.Namespace + "/" + service.Name
	}
	return service.Namespace + "/" + service.Name + ":" + port
}

// pool is the one with all endpoints of a port, in the family of an address.
func (s *Service) pool(p *Port, ip netip.Addr) model.PoolID {
	return model.PoolID{Service: portName(s.Name, p.Name), V6: ip.Is6()}
}

// rowOwner is the name of the Service that portName has named.
func rowOwner(row string) Name {
	namespace, name, _ := strings.Cut(row, "/")
	name, _, _ = strings.Cut(name, ":")
	return Name{Namespace: namespace, Name: name}
}

// verdict is what happens to connections that want a pool. If only local backends are wanted and
// there are none, silence lets the client or the load balancer try another node.
func (s *selection) verdict(pool int) model.Verdict {
	switch {
	case s.serving[pool] > 0:
		return model.Forward
	case s.serving[clusterPool] > 0, defect.Is(defect.ServiceVerdict):
		return model.Drop
	}
	return model.Reject
}

// inspect counts ready endpoints on this node for the load balancer's health check, and reports
// those that cannot be endpoints.
func (c *compiler) inspect(s *selection) {
	for i := range s.candidates {
		e := &s.candidates[i]
		if e.known != nil && e.known.level <= trialLevel {
			c.problem(e.slice.object(), "endpoints", Unhealthy, fmt.Sprintf("%s %s", e, s.consequence(e)))
		}
		switch {
		case e.use[clusterPool] == serviceAddress:
			c.problem(e.slice.object(), "endpoints", Invalid,
				fmt.Sprintf("%s is an address of a Service; the endpoint is left out, it would make a loop", e.Addr()))
		case e.use[clusterPool] == nodeAddress:
			c.problem(e.slice.object(), "endpoints", Unsupported,
				fmt.Sprintf("%s is an address of this node, for which HNS has no endpoint; it is left out", e.Addr()))
		case c.service.HealthCheckNodePort != 0 && e.use[localPool] == serves && e.endpoint.Ready:
			c.ready = append(c.ready, e.Addr())
		}
	}
}

// object is the slice's kind and name, for people.
func (s *Slice) object() string {
	if s.Mirrored {
		return "Endpoints " + Name{Namespace: s.Name.Namespace, Name: s.Service}.String()
	}
	return "EndpointSlice " + s.Name.String()
}

// health adds a health check server on each address where load balancers may ask. It counts addresses: an endpoint that
// serves two ports is one.
func (c *compiler) health(ip netip.Addr) {
	all := c.service.healthChecks(c.view)
	if len(all) == 0 {
		return
	}
	if c.notListening {
		c.problem("Service "+c.service.Name.String(), "spec.healthCheckNodePort", Share, fmt.Sprintf(
			"the share of namespace %s in the node's %d listeners for health checks is used up; load balancers get no answer",
			c.service.Name.Namespace, sharedListeners))
		return
	}
	slices.SortFunc(c.ready, netip.Addr.Compare)
	c.ready = slices.Compact(c.ready)
	for _, claim := range all {
		at := address{AddrPort: claim.claim().addrPort(), kind: claim.at}
		if claim.addr.Is4() == ip.Is4() && c.takes(at, model.TCP) {
			c.rows.claims = append(c.rows.claims, claim)
			c.rows.Health = append(c.rows.Health, model.Row[netip.AddrPort, model.Health]{
				Key:   at.AddrPort,
				Value: model.Health{Service: c.service.Name.String(), Local: len(c.ready)},
			})
		}
	}
}

// healthChecks are where the Service's health is told: where NodePorts are open, and at the load balancer's addresses.
// Google's load balancers ask there. Its nodes take packets for these addresses, which no interface has.
func (s *Service) healthChecks(v *View) (all []claimed) {
	port := s.HealthCheckNodePort
	if port == 0 {
		return nil
	}
	add := func(at model.Kind, addrs []netip.Addr) {
		for _, a := range addrs {
			if hasFamily(s.ClusterIPs, a) {
				all = append(all, claimed{a, port, model.TCP, at})
			}
		}
	}
	add(model.HealthCheckNodePort, v.NodePorts)
	taken := slices.ContainsFunc(s.Ports, func(p Port) bool { return p.Port == port && p.Protocol == model.TCP })
	if v.HNS == nil && !taken {
		add(model.LoadBalancerIP, slices.DeleteFunc(slices.Clone(s.LoadBalancerIPs), func(a netip.Addr) bool {
			return has(v.NodePorts, a)
		}))
	}
	return all
}
