package cluster

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"fairlead.dev/fairlead/lab/testbed"
)

// planHosts gives life to the addresses of EndpointSlices that the manifests have themselves. In the range of a node's
// pods they are pods there. A machine's are served by its own processes. All others belong to hosts on the LAN.
func (pods plan) planHosts(c *Cluster, s *service, report reporter) {
	for _, slice := range s.given {
		for i, e := range slice.Endpoints {
			for _, text := range e.Addresses {
				addr, err := netip.ParseAddr(text)
				if err != nil {
					err = fmt.Errorf("EndpointSlice %s: endpoints[%d].addresses: %q is not an address", slice.Name, i, text)
					report(s.object, err)
					continue
				}
				p := pods.host(c, s, e.TargetRef, addr)
				p.targets = append(p.targets, slicePorts(slice)...)
			}
		}
	}
}

// host finds or plans the pod that has an address.
func (pods plan) host(c *Cluster, s *service, ref *corev1.ObjectReference, addr netip.Addr) *pod {
	for _, p := range pods {
		if slices.Contains(p.wanted, addr) {
			return p
		}
	}
	name := "host-" + addr.String()
	if ref != nil && ref.Name != "" {
		old := pods[placeOf(s.Namespace, ref.Name)]
		if old == nil {
			name = ref.Name
		} else if len(old.wanted) == 1 && old.wanted[0].Is4() != addr.Is4() {
			old.wanted = append(old.wanted, addr) // its other family
			return old
		}
	}
	p := &pod{object: s.object, name: name, node: c.homeOf(addr), wanted: []netip.Addr{addr}, spec: &corev1.PodSpec{}}
	p.spec.HostNetwork = c.bed.Owner(addr) == p.node
	pods[placeOf(p.namespace, name)] = p
	return p
}

// homeOf is the node or machine to which an address belongs.
func (c *Cluster) homeOf(addr netip.Addr) testbed.Place {
	machines := []testbed.Place{testbed.Node, testbed.NodeB, testbed.Outside}
	for _, place := range machines {
		inRange := func(p netip.Prefix) bool { return p.Contains(addr) }
		if c.bed.Owner(addr) == place || slices.ContainsFunc(testbed.PodCIDRs(place), inRange) {
			return place
		}
	}
	return testbed.LAN
}

func slicePorts(slice *discoveryv1.EndpointSlice) []testbed.PodPort {
	var ports []testbed.PodPort
	for _, p := range slice.Ports {
		if port, ok := slicePort(p); ok {
			ports = append(ports, port)
		}
	}
	return ports
}

// slicePort is a port of a slice; false if it is not one that a server can have.
func slicePort(p discoveryv1.EndpointPort) (testbed.PodPort, bool) {
	if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
		return testbed.PodPort{}, false
	}
	return testbed.PodPort{Protocol: protocolOf(ptr.Deref(p.Protocol, "")), Port: uint16(*p.Port)}, true
}
