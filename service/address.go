package service

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// address is one address and port at which clients reach a port of a Service.
type address struct {
	netip.AddrPort
	kind model.Kind
	port *Port
}

// addresses appends where a port of a Service is reached in the family of one of its ClusterIPs.
func (s *Service) addresses(all []address, v *View, p *Port, clusterIP netip.Addr) []address {
	all = append(all, address{netip.AddrPortFrom(clusterIP, p.Port), model.ClusterIP, p})
	add := func(at model.Kind, port uint16, addrs []netip.Addr) {
		for _, a := range addrs {
			if a.Is4() == clusterIP.Is4() {
				all = append(all, address{netip.AddrPortFrom(a, port), at, p})
			}
		}
	}
	add(model.LoadBalancerIP, p.Port, s.LoadBalancerIPs)
	if v.ExternalIPs {
		add(model.ExternalIP, p.Port, s.ExternalIPs)
	}
	if p.NodePort != 0 {
		add(model.NodePort, p.NodePort, v.NodePorts)
	}
	return slices.DeleteFunc(all, func(e address) bool {
		return e.kind == model.NodePort && (s.hidesNodePort(v, e) || v.HNS != nil && e.Addr().IsLoopback())
	})
}

// hidesNodePort reports whether a NodePort's address and port are those of an external address of
// the same Service, which a node's address can be.
func (s *Service) hidesNodePort(v *View, e address) bool {
	external := has(s.LoadBalancerIPs, e.Addr()) || v.ExternalIPs && has(s.ExternalIPs, e.Addr())
	return external && slices.ContainsFunc(s.Ports, func(p Port) bool {
		return p.Port == e.Port() && p.Protocol == e.port.Protocol
	})
}

// claim is what the address takes for the Service. An external address that is the node's may have the number of a
// NodePort, which hidesNodePort leaves out: the right to that one holds.
func (e *address) claim(v *View, s *Service) claimed {
	c := claimed{e.Addr(), e.Port(), e.port.Protocol, e.kind}
	if rightOf(c.at) == written && has(v.NodePorts, e.Addr()) &&
		slices.ContainsFunc(s.Ports, func(p Port) bool { return p.NodePort == c.port && p.Protocol == c.protocol }) {
		c.at = model.NodePort
	}
	return c
}

// allow are the sources that may reach the address: nil means all. Only a load balancer's address has source ranges. If
// they admit the node, they admit the address itself too. It is the source of the node's own packets to it wherever it
// is on an interface of the node.
func (s *Service) allow(v *View, e address) []netip.Prefix {
	if e.kind != model.LoadBalancerIP || s.SourceRanges == nil || v.HNS != nil || defect.Is(defect.ServiceSourceRanges) {
		return nil
	}
	ranges := []netip.Prefix{}
	for _, p := range s.SourceRanges {
		if p.Addr().Is4() != e.Addr().Is4() {
			continue
		}
		if p.Bits() == 0 {
			return nil
		}
		ranges = append(ranges, p)
	}
	if slices.ContainsFunc(v.IPs, func(a netip.Addr) bool { return contains(ranges, a) }) {
		ranges = model.Disjoint(append(ranges, hostPrefix(e.Addr())))
	}
	return ranges
}

// variant is one group of an address's clients, and what it gets.
type variant struct {
	scope model.Scope
	pool  int
	snat  model.SNAT
}

// variants appends which clients of an address go to which pool.
func (s *Service) variants(all []variant, v *View, e address) []variant {
	switch {
	case v.HNS != nil:
		return append(all, s.variantOfHNS(v, e))
	case e.kind == model.ClusterIP && s.InternalLocal:
		return append(all, variant{model.Any, localPool, v.clusterSNAT(e.Addr())})
	case e.kind == model.ClusterIP:
		return append(all, variant{model.Any, clusterPool, v.clusterSNAT(e.Addr())})
	case e.Addr().IsLoopback():
		// Only this node itself can send there. Its answers must find back to an address that
		// means something to the backend.
		return append(all, variant{model.Internal, clusterPool, model.Always})
	case !s.ExternalLocal:
		// The backend may be on another node, and answers must come back through this one.
		return append(all, variant{model.Any, clusterPool, model.Always})
	}
	// The node and its pods are served as if they had gone out to the load balancer and back in
	// through any node. The node's own source address can be the very address it talks to.
	internal := variant{model.Internal, clusterPool, model.Always}
	if v.detects(e.Addr()) {
		internal.snat = model.OffCluster
	}
	return append(all, internal, variant{model.Any, localPool, model.Never})
}

// passes reports whether packets that no endpoint can serve are left to routing. A NodePort's address is the node's:
// routing has no other way for it.
func (s *Service) passes(e address) bool {
	return s.Passthrough && (e.kind == model.LoadBalancerIP || e.kind == model.ExternalIP)
}

// clusterSNAT is for ClusterIPs. A client outside of the cluster whose packets are routed here may be sent to another
// node. If pods are not known, no address is replaced.
func (v *View) clusterSNAT(family netip.Addr) model.SNAT {
	switch {
	case v.MasqueradeAll:
		return model.Always
	case v.detects(family):
		return model.OffCluster
	}
	return model.Never
}

// find says what an address, port and protocol are for a Service that claims them.
func (v *View) find(s *Service, c claim) address {
	for _, ip := range s.ClusterIPs {
		for i := range s.Ports {
			if s.Ports[i].Protocol != c.protocol {
				continue
			}
			for _, e := range s.addresses(nil, v, &s.Ports[i], ip) {
				if e.AddrPort == c.addrPort() {
					return e
				}
			}
		}
	}
	return address{AddrPort: c.addrPort(), kind: model.HealthCheckNodePort}
}
