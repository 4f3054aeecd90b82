package sidebyside

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

// These functions tell from the objects alone which endpoints can answer a probe, for differences and choices to be no
// wider than that.

// endpoints are those of the port that is probed, in the probe's family. Of two with one address the one that is
// not terminating counts.
func (c contrast) endpoints() (all []discoveryv1.Endpoint) {
	if c.service == nil {
		return nil
	}
	for _, s := range c.objects.of(c.service.Name) {
		if (s.AddressType == discoveryv1.AddressTypeIPv4) != c.to.Addr().Is4() || !servesPort(s, c.port) {
			continue
		}
		for _, e := range s.Endpoints {
			i := slices.IndexFunc(all, func(o discoveryv1.Endpoint) bool { return o.Addresses[0] == e.Addresses[0] })
			switch {
			case i < 0:
				all = append(all, e)
			case terminating(all[i]):
				all[i] = e
			}
		}
	}
	return all
}

func servesPort(s *discoveryv1.EndpointSlice, port corev1.ServicePort) bool {
	return slices.ContainsFunc(s.Ports, func(p discoveryv1.EndpointPort) bool {
		return *p.Name == port.Name && *p.Protocol == port.Protocol
	})
}

func terminating(e discoveryv1.Endpoint) bool { return isTrue(e.Conditions.Terminating, false) }

func isTrue(is *bool, otherwise bool) bool {
	if is == nil {
		return otherwise
	}
	return *is
}

// usable are the endpoints that are ready or, if there are none, those that serve although they are terminating.
func usable(all []discoveryv1.Endpoint) []discoveryv1.Endpoint {
	ready := filter(all, func(e discoveryv1.Endpoint) bool { return isTrue(e.Conditions.Ready, true) })
	if len(ready) > 0 {
		return ready
	}
	return filter(all, func(e discoveryv1.Endpoint) bool { return terminating(e) && isTrue(e.Conditions.Serving, true) })
}

// here are the endpoints on the node.
func here(all []discoveryv1.Endpoint) []discoveryv1.Endpoint {
	return filter(all, func(e discoveryv1.Endpoint) bool { return e.NodeName != nil && *e.NodeName == string(testbed.Node) })
}

func filter[T any](all []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return !keep(v) })
}

// choices are the members of the cast among which a proxy may choose, hints apart, which would leave fewer.
func (c contrast) choices() (names []string) {
	all := c.endpoints()
	if c.local() {
		all = here(all)
	}
	for _, e := range usable(all) {
		a := netip.MustParseAddr(e.Addresses[0])
		for _, m := range cast {
			if slices.Contains(both(m.Addr), a) {
				names = append(names, m.Name)
			}
		}
	}
	return names
}

// local reports whether a traffic policy keeps the probe on the node. It does not keep probes from the node and its
// pods to an external address.
func (c contrast) local() bool {
	if c.kind == clusterIP {
		p := c.service.Spec.InternalTrafficPolicy
		return p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal
	}
	return externalLocal(c.service) && (c.from == testbed.Outside || c.from == testbed.NodeB)
}

// isService reports whether an endpoint has the address of a Service that the proxies serve.
func (c contrast) isService(e discoveryv1.Endpoint) bool {
	for _, s := range c.objects.services {
		if slices.Contains(s.Spec.ClusterIPs, e.Addresses[0]) && s.Labels[otherProxy] == "" {
			return true
		}
	}
	return false
}

// keptOut reports whether loadBalancerSourceRanges keep the client out.
func (c contrast) keptOut() bool {
	client := c.pair.theirs.bed.Addr(c.from, c.to.Addr().Is6())
	ranges := filter(c.service.Spec.LoadBalancerSourceRanges, func(text string) bool {
		return netip.MustParsePrefix(text).Addr().Is4() == client.Is4()
	})
	return len(ranges) > 0 && !slices.ContainsFunc(ranges, func(text string) bool {
		return netip.MustParsePrefix(text).Contains(client)
	})
}
