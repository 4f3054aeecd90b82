package service

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

// HNS asks for rows that the Host Networking Service of Windows can have. It has one load balancer for an address, port
// and protocol. That has one set of backends, and one port at which all of them serve. An object that asks
// for more has a Problem of cause Unsupported, and the rows say what happens instead.
type HNS struct {
	// HealthVIPs has this node answer at a load balancer's own addresses where that asks for health
	// (forwardHealthCheckVIP). A load balancer does so that leaves the destination of packets as it is.
	HealthVIPs bool
	// Healthz is where it asks about Services without a healthCheckNodePort: the port of /healthz. 0: nowhere.
	Healthz uint16
}

func (h *HNS) equal(o *HNS) bool { return h == o || h != nil && o != nil && *h == *o }

// preserveAnnotation is kube-proxy's: the load balancer of a Service leaves the destination of packets as it is.
const preserveAnnotation = "preserve-destination"

// variantOfHNS is what all clients of an address get. Without direct server return HNS replaces their addresses.
func (s *Service) variantOfHNS(v *View, e address) variant {
	kept := s.Preserve && (e.kind == model.LoadBalancerIP || e.kind == model.NodePort)
	one := variant{scope: model.Any, pool: clusterPool, snat: model.Always}
	switch {
	case e.kind == model.ClusterIP:
		one.snat = v.clusterSNAT(e.Addr())
		if s.InternalLocal {
			one.pool = localPool
		}
	case s.ExternalLocal || kept:
		one.pool = localPool
		if s.ExternalLocal || e.kind == model.LoadBalancerIP {
			one.snat = model.Never
		}
	}
	return one
}

// uniform leaves in each pool the endpoints of one target port: that with the greatest weight, or else the lowest.
func (s *selection) uniform() {
	s.hns = true
	for pool := range s.serving {
		weights := map[uint16]int{}
		s.serving[pool] = 0
		for i := range s.candidates {
			if c := &s.candidates[i]; c.use[pool] == serves {
				weights[c.Port()] += int(c.endpoint.Weight)
			}
		}
		if len(weights) == 0 { // an endpoint without a weight is still not at another port
			continue
		}
		var best uint16
		for port, w := range weights {
			if w > weights[best] || w == weights[best] && port < best {
				best = port
			}
		}
		for i := range s.candidates {
			switch c := &s.candidates[i]; {
			case c.use[pool] <= noWeight && c.Port() != best:
				c.use[pool] = otherPort
			case c.use[pool] == serves:
				s.serving[pool]++
			}
		}
	}
}

// unsupported reports what the Service asks of one port and HNS does not have.
func (c *compiler) unsupported(p *Port, s *selection) {
	service := c.service
	lacks := func(field, format string, args ...any) {
		c.problem("Service "+service.Name.String(), field, Unsupported, fmt.Sprintf(format, args...))
	}
	port := fmt.Sprintf("port %d/%s", p.Port, p.Protocol)
	for pool := range s.serving {
		if i := slices.IndexFunc(s.candidates, func(c candidate) bool { return c.use[pool] == otherPort }); i >= 0 {
			lacks("spec.ports", "%s: HNS serves one target port; endpoints at others, such as %s, are left out",
				port, s.candidates[i].AddrPort)
			break
		}
	}
	weighted := func(c candidate) bool { return c.use[clusterPool] == serves && c.endpoint.Weight > oneWeight }
	if slices.ContainsFunc(s.candidates, weighted) {
		lacks(annotation(weightsAnnotation), "%s: HNS has no weights; its endpoints get equal shares", port)
	}
	differs := func(c candidate) bool { return (c.use[clusterPool] == serves) != (c.use[localPool] == serves) }
	switch {
	case s.serving[clusterPool] == 0:
		lacks("spec.ports", "%s has no endpoints; HNS cannot refuse connections, so clients get no answer", port)
	case service.ExternalLocal && slices.ContainsFunc(s.candidates, differs):
		lacks("spec.externalTrafficPolicy", "%s: HNS gives clients of this node, too, only its own endpoints there", port)
	}
}

// unsupportedOfAll reports what a whole Service asks and HNS does not have.
func (c *compiler) unsupportedOfAll() {
	lacks := func(field, reason string) {
		c.problem("Service "+c.service.Name.String(), field, Unsupported, reason)
	}
	if c.service.SourceRanges != nil && len(c.service.LoadBalancerIPs) > 0 {
		lacks("spec.loadBalancerSourceRanges", "HNS lets in clients from everywhere")
	}
	if c.service.Rebalance != 0 {
		lacks(annotation(rebalanceAnnotation), "HNS does not tell which connections are idle; they stay where they are")
	}
	if c.service.Affinity != 0 && c.service.Affinity != defaultAffinity {
		lacks("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "HNS has no such time; clients keep their endpoints")
	}
}

// healthVIPs adds a row for each load balancer's address where this node answers about the Service's health.
func (c *compiler) healthVIPs(ip netip.Addr) {
	port := c.view.HNS.Healthz
	if c.service.HealthCheckNodePort != 0 {
		port = c.service.HealthCheckNodePort
	}
	node := slices.IndexFunc(c.view.IPs, func(a netip.Addr) bool { return a.Is4() == ip.Is4() })
	if !c.view.HNS.HealthVIPs || port == 0 || node < 0 {
		return
	}
	pool := model.PoolID{Service: portName(c.service.Name, healthName), Local: true, V6: ip.Is6()}
	for _, a := range c.service.LoadBalancerIPs {
		e := address{AddrPort: netip.AddrPortFrom(a, port), kind: model.HealthCheckNodePort}
		if a.Is4() != ip.Is4() || !c.takes(e, model.TCP) {
			continue
		}
		c.rows.claims = append(c.rows.claims, claimed{a, port, model.TCP, e.kind})
		c.rows.Frontends = append(c.rows.Frontends, model.Row[model.Key, model.Frontend]{
			Key: model.Key{Addr: a, Port: port, Protocol: model.TCP},
			Value: model.Frontend{Service: pool.Service, Verdict: model.Forward, Pool: pool, SNAT: model.Always,
				Kind: e.kind, Kept: c.service.Preserve},
		})
		if n := len(c.rows.Pools); n == 0 || c.rows.Pools[n-1].Key != pool {
			self := model.Backend{Addr: c.view.IPs[node], Port: port, Weight: oneWeight, Local: true}
			c.rows.Pools = append(c.rows.Pools, model.Row[model.PoolID, model.Pool]{
				Key: pool, Value: model.Pool{Backends: []model.Backend{self}},
			})
		}
	}
}

// defaultAffinity is what Kubernetes writes where the object says nothing.
const defaultAffinity = time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second

// healthName is in place of a port's name, which has no capitals.
const healthName = "healthCheckNodePort"
