package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// use says what an endpoint is in a pool, or by which rule it is not in it.
type use uint8

const (
	serves         use = iota // takes new connections
	drains                    // serves while it terminates, but others are ready
	noWeight                  // its weight is 0; the last that is in the pool
	notReady                  // neither ready, nor serving while it terminates
	notLocal                  // on another node, and the traffic policy is Local
	otherNode                 // its hints are for other nodes
	otherZone                 // its hints are for other zones
	serviceAddress            // its address belongs to a Service: it would make a loop
	otherPort                 // not at the one target port that HNS serves
	nodeAddress               // an address of this node, for which HNS has no endpoint
	duplicate                 // another endpoint has the same address and port
	ejected                   // it does not answer clients of this node, while others do
)

func (u use) String() string {
	return [...]string{"serves", "terminating", "no-weight", "not-ready", "not-local", "node-hint", "zone-hint",
		"service-address", "target-port", "node-address", "duplicate", "ejected"}[u]
}

// The two pools a Service port can have. They are chosen independently of each other (KEP-1669).
const (
	clusterPool = iota // all endpoints, of which hints may select some
	localPool          // those on this node
)

// candidate is an endpoint for one port of a Service, and what it is in each pool.
type candidate struct {
	netip.AddrPort
	endpoint *Endpoint
	slice    *Slice
	local    bool
	use      [2]use
	lacks    uint8 // sixteenths of the share that is its by weight
	known    *backendHealth
}

// takes reports whether the endpoint is ready for new connections.
func (e *Endpoint) takes() bool { return e.Ready && e.Weight > 0 }

// takes does so for a pool.
func (c *candidate) takes(pool int) bool { return c.use[pool] == serves && c.endpoint.takes() }

// draining reports whether the endpoint serves while it terminates.
func (c *candidate) draining() bool {
	return !c.endpoint.Ready && c.endpoint.Serving && c.endpoint.Terminating
}

// compare orders candidates by address. Of those with the same one the first is used: the one that
// runs before the one that terminates, whose pod may have given its address to the other's.
func (c *candidate) compare(o *candidate) int {
	return cmp.Or(c.Compare(o.AddrPort), model.FalseFirst(c.endpoint.Terminating, o.endpoint.Terminating),
		model.FalseFirst(!c.endpoint.Ready, !o.endpoint.Ready), model.FalseFirst(!c.endpoint.Serving, !o.endpoint.Serving),
		model.FalseFirst(!c.local, !o.local))
}

// gather appends the endpoints that serve a port of a Service, of one address family. The slices
// are in the order of their names, so that the result depends on nothing else.
func (v *View) gather(all []candidate, p *Port, list []*Slice, v4 bool) []candidate {
	for _, s := range list {
		port, ok := s.port(p)
		if !ok {
			continue
		}
		all = slices.Grow(all, len(s.Endpoints))
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if e.Addr.Is4() != v4 || i == 0 && defect.Is(defect.ServiceEndpoint) {
				continue
			}
			all = append(all, candidate{
				AddrPort: netip.AddrPortFrom(e.Addr, port),
				endpoint: e,
				slice:    s,
				local:    v.Node != "" && e.Node.String() == v.Node,
			})
		}
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return a.compare(&b) })
	return all
}

// port is the number under which the slice's endpoints serve a port of the Service.
func (s *Slice) port(p *Port) (uint16, bool) {
	i, ok := s.find(p.Name)
	if !ok || s.Ports[i].Protocol != p.Protocol {
		return 0, false
	}
	return s.Ports[i].Port, true
}

// find is the place of a port in the slice.
func (s *Slice) find(name string) (int, bool) {
	return slices.BinarySearchFunc(s.Ports, name, func(p SlicePort, n string) int { return cmp.Compare(p.Name, n) })
}

// selection is what became of a Service port's endpoints.
type selection struct {
	candidates []candidate
	serving    [2]int // the weights of those that take connections in each pool
	most       uint16 // the largest weight that any of them has by annotation
	finest     uint64 // the largest weight that any of them may have
	hints      hints
	hns        bool // weights are equal, and an endpoint of an unknown node is on another one
	known      portHealth
	health     Health
	slow       bool // some have less than their share
	crowded    bool // so many do not answer that none of them is ejected
}

// choose decides what each endpoint of a Service's port is in each pool, of which id is one.
func choose(v *View, service *Service, id model.PoolID, candidates []candidate) selection {
	s := selection{
		candidates: candidates, hints: hints{node: v.Node, zone: v.Zone},
		finest: finestWeight(len(service.Ports) * len(candidates)),
	}
	if v.Judge != nil {
		s.known, s.health = v.Judge(service, id)
	}
	for i := range candidates {
		c := &candidates[i]
		s.most = max(s.most, c.endpoint.Weight)
		switch {
		case v.ServiceAddress != nil && v.ServiceAddress(c.Addr()):
			c.use = [2]use{serviceAddress, serviceAddress}
		case v.HNS != nil && has(v.Own, c.Addr()):
			c.use = [2]use{nodeAddress, nodeAddress}
		case i > 0 && candidates[i-1].AddrPort == c.AddrPort:
			c.use = [2]use{duplicate, duplicate}
		}
	}
	s.judge()
	for i := range candidates {
		if c := &candidates[i]; c.use[clusterPool] == serves {
			s.hints.count(c.endpoint, s.answers(c))
		}
	}
	s.hints.spill = s.spills()
	s.fill(clusterPool, s.hints.filter)
	s.fill(localPool, func(c *candidate) use {
		if c.local {
			return serves
		}
		return notLocal
	})
	if v.HNS != nil {
		s.uniform()
	}
	return s
}

// fill decides about one pool: ready endpoints, or if there are none, those that serve while they
// terminate. Endpoints without a weight are none of them. The filter answers serves for an endpoint that
// is meant for this pool.
func (s *selection) fill(pool int, filter func(*candidate) use) {
	ready := false
	for i := range s.candidates {
		c := &s.candidates[i]
		if c.use[pool] != serves {
			continue
		}
		c.use[pool] = filter(c)
		ready = ready || c.takes(pool)
	}
	s.eject(pool)
	for i := range s.candidates {
		c := &s.candidates[i]
		switch {
		case c.use[pool] != serves:
			continue
		case c.draining() && ready && !defect.Is(defect.ServiceTerminating):
			c.use[pool] = drains
		case !c.draining() && !c.endpoint.Ready:
			c.use[pool] = notReady
		case c.endpoint.Weight == 0:
			c.use[pool] = noWeight
		default:
			s.serving[pool] += int(s.weight(c, pool))
		}
	}
}

// backends are the members of a pool.
func (s *selection) backends(pool int) []model.Backend {
	n := 0
	for i := range s.candidates {
		if s.candidates[i].use[pool] <= noWeight {
			n++
		}
	}
	all := make([]model.Backend, 0, n)
	for i := range s.candidates {
		c := &s.candidates[i]
		switch c.use[pool] {
		case serves:
			all = append(all, model.Backend{
				Addr: c.Addr(), Port: c.Port(), Local: s.local(c), Weight: s.weight(c, pool),
			})
		case drains, noWeight:
			all = append(all, model.Backend{Addr: c.Addr(), Port: c.Port(), Local: s.local(c)})
		}
	}
	return all
}

// weight is in proportion to what the annotation says, and at most the finest.
func (s *selection) weight(c *candidate, pool int) uint16 {
	switch {
	case s.hns:
		return oneWeight
	case c.endpoint.Weight == 0:
		return 0
	}
	weight, most := uint64(c.endpoint.Weight), uint64(s.most)
	if s.slow {
		most *= fullLevel
		weight *= fullLevel - uint64(c.lacks)%fullLevel
	}
	if h := &s.hints; pool == clusterPool && h.spill.is() {
		most *= max(h.spill.keep, h.spill.give)
		weight *= h.spill.factor(c, h.zone)
	}
	if most > s.finest {
		weight = max(1, (weight*s.finest+most/2)/most)
	}
	return uint16(weight)
}

func (s *selection) local(c *candidate) bool { return c.local || !s.hns && c.mayBeLocal() }

// mayBeLocal reports whether the endpoint can be a client of this node that reaches itself. Where its node is not
// known, as in manifests written by hand, it can.
func (c *candidate) mayBeLocal() bool { return c.local || c.endpoint.Node == NodeName{} }

// hints decide whether only endpoints meant for this node, or for its zone, are used. It is all or
// nothing: every ready endpoint must have a hint, and one of them for this node or zone (KEP-2433,
// KEP-3015). Endpoints without a weight do not count: a zone that only has such ones would have none.
type hints struct {
	node, zone         string
	ready              int // endpoints that are ready
	forNodes, forZones int // of these: with a hint for some node, for some zone
	here, inZone       int // of these: for this node, for this zone
	spill              spill
}

func (h *hints) count(e *Endpoint, answers bool) {
	if !e.takes() {
		return
	}
	h.ready++
	if e.Hints == nil {
		return
	}
	if len(e.Hints.Nodes) > 0 {
		h.forNodes++
	}
	if answers && slices.Contains(e.Hints.Nodes, h.node) {
		h.here++
	}
	if len(e.Hints.Zones) > 0 {
		h.forZones++
	}
	if answers && slices.Contains(e.Hints.Zones, h.zone) {
		h.inZone++
	}
}

func (h *hints) byNode() bool { return h.here > 0 && h.forNodes == h.ready }
func (h *hints) byZone() bool { return h.inZone > 0 && h.forZones == h.ready && !h.byNode() }

// filter passes endpoints that are meant for this node. One without hints is: the controller takes
// them from endpoints that terminate, and they may still have flows of this node.
func (h *hints) filter(c *candidate) use {
	switch e := c.endpoint.Hints; {
	case e == nil, defect.Is(defect.ServiceHints):
	case h.byNode() && len(e.Nodes) > 0 && !slices.Contains(e.Nodes, h.node):
		return otherNode
	case h.byZone() && !h.spill.is() && len(e.Zones) > 0 && !slices.Contains(e.Zones, h.zone):
		return otherZone
	}
	return serves
}

// String says whether hints are used, and why not; it is empty if there are none.
func (h *hints) String() string {
	switch {
	case h.forNodes+h.forZones == 0:
		return ""
	case h.byNode():
		return fmt.Sprintf("node hints are followed: %d of %d ready endpoints are for node %s", h.here, h.ready, h.node)
	case h.spill.is():
		return "zone hints are followed in part: " + h.spill.text(h.zone)
	case h.byZone():
		return fmt.Sprintf("zone hints are followed: %d of %d ready endpoints are for zone %s", h.inZone, h.ready, h.zone)
	case h.forZones == 0:
		return "node hints are ignored: " + why(h.forNodes, h.ready, "node", h.node)
	case h.zone == "":
		return "zone hints are ignored: the zone of this node is not known (label topology.kubernetes.io/zone)"
	}
	return "zone hints are ignored: " + why(h.forZones, h.ready, "zone", h.zone)
}

func why(hinted, ready int, kind, here string) string {
	if hinted < ready {
		return fmt.Sprintf("%d of %d ready endpoints have none", ready-hinted, ready)
	}
	return "none is for " + kind + " " + here
}
