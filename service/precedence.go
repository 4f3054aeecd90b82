package service

import (
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Several may want an address and port. The order of arrival alone does not decide, or a tenant could take an address
// before the cluster allocates it:
//
//	1  the node: its own addresses, and where this process listens
//	2  what the control plane gives out: ClusterIPs, NodePorts, health check ports
//	3  what a tenant writes: external IPs, load balancer addresses in a Service's status
//
// Of two Services with the same right the older one has it, then the one whose name comes first.

// right is the right by which a Service claims an address and port; the smaller one wins.
type right uint8

const (
	givenOut right = iota
	written
)

func rightOf(k model.Kind) right {
	if k == model.LoadBalancerIP || k == model.ExternalIP {
		return written
	}
	return givenOut
}

// refuse returns why no row of a Service can be at an address; empty: it can.
func (v *View) refuse(e address, p model.Protocol) string {
	a := e.Addr()
	switch {
	case p == model.TCP && v.listens(e.AddrPort):
		return "is where the node's proxy itself listens"
	case e.kind == model.ClusterIP && v.barred(a):
		return "is an address of this node or of its pods, and cannot be a ClusterIP"
	case rightOf(e.kind) == written && contains(v.PodNetworks, a) && !contains(v.ServiceCIDRs, a):
		return "is an address of pods"
	}
	return ""
}

// barred reports whether an address cannot be a ClusterIP.
func (v *View) barred(a netip.Addr) bool {
	return !contains(v.ServiceCIDRs, a) && (has(v.Own, a) || v.Manifests && contains(v.PodNetworks, a))
}

// listens reports whether the process has a listener there.
func (v *View) listens(to netip.AddrPort) bool {
	return slices.ContainsFunc(v.Listeners, func(l netip.AddrPort) bool {
		return l.Port() == to.Port() && (l.Addr() == to.Addr() ||
			l.Addr().IsUnspecified() && (to.Addr().IsLoopback() || has(v.Own, to.Addr()) || has(v.NodePorts, to.Addr())))
	})
}

// ownAddrs are the addresses of the node that no ClusterIP can be. An API server gives out ClusterIPs. So one that is
// on an interface was put there on purpose, as node-local caches of DNS do. In manifests it is a mistake.
func (o *Options) ownAddrs(n Node, interfaces []netip.Addr) []netip.Addr {
	own := slices.Concat(o.NodeIPs, n.IPs)
	if o.Manifests {
		own = append(own, interfaces...)
	}
	return different(own)
}

// podNetworks are where addresses are known to be those of pods.
func (o *Options) podNetworks(n Node) []netip.Prefix {
	all := slices.Clone(n.PodCIDRs)
	if o.Manifests { // elsewhere clusterCIDR may, by mistake, have the Service CIDR in it, which not all API servers tell
		all = append(all, o.DetectLocal.ClusterCIDRs...)
	}
	return model.Disjoint(all)
}

// order is that of Services by their right to the claim.
func (x *contest) order(a, b *entry) int {
	if c := int(rightOf(x.members[a])) - int(rightOf(x.members[b])); c != 0 {
		return c
	}
	return a.compare(b)
}

// loss is what a Service is told that wants what another one has. It is the same for all of the node's addresses.
func (x *contest) loss(c claim, loser, winner *entry) Problem {
	at := x.members[loser]
	what := fmt.Sprintf("%s %s", at, c)
	if at == model.NodePort || at == model.HealthCheckNodePort {
		what = fmt.Sprintf("%s %d/%s", at, c.port, c.protocol)
	}
	why := "which came first"
	if rightOf(x.members[winner]) < rightOf(at) {
		why = fmt.Sprintf("as its %s, which comes before an address that a Service itself names", x.members[winner])
	}
	return Problem{Object: "Service " + loser.service.Name.String(), Field: what, Cause: Precedence,
		Reason: fmt.Sprintf("belongs to Service %s, %s; this one is not reached there", winner.service.Name, why)}
}
