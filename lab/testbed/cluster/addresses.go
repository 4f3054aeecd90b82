package cluster

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Address is one address and port under which a port of a Service is to be reached.
type Address struct {
	Service  string // namespace/name
	Port     string // name of the Service's port, or else its number
	Kind     Kind
	To       netip.AddrPort
	Protocol model.Protocol
	// Backends are the Service's ready endpoints in the address's family, sorted by address. Which of
	// them a client reaches is the proxy's business: policies and hints may say less than all.
	Backends []Backend
}

// Kind is the way in which a Service is exposed.
type Kind string

// These are the kinds of Address.
const (
	ClusterIP    Kind = "ClusterIP"
	ExternalIP   Kind = "ExternalIP"
	LoadBalancer Kind = "LoadBalancer"
	NodePort     Kind = "NodePort" // at an address of the node under test
)

// Backend is an endpoint and the pod that answers there.
type Backend struct {
	Place string // empty: no place does
	Addr  netip.AddrPort
}

// exposedAddr is an address of a Service.
type exposedAddr struct {
	kind Kind
	addr netip.Addr
}

// addresses are a Service's own addresses, whatever its ports.
func (s *service) addresses() []exposedAddr {
	var all []exposedAddr
	add := func(kind Kind, texts ...string) {
		for _, addr := range parseAddrs(texts...) {
			if slices.Contains(s.Spec.IPFamilies, familyOf(addr)) {
				all = append(all, exposedAddr{kind, addr})
			}
		}
	}
	add(ClusterIP, s.Spec.ClusterIPs...)
	add(ExternalIP, s.Spec.ExternalIPs...)
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		if ptr.Deref(ingress.IPMode, corev1.LoadBalancerIPModeVIP) == corev1.LoadBalancerIPModeVIP {
			add(LoadBalancer, ingress.IP) // else packets never come with that address
		}
	}
	return all
}

// addresses are all there are of a Service.
func (c *Cluster) addresses(s *service, made []*discoveryv1.EndpointSlice) []Address {
	var all []Address
	for _, p := range s.Spec.Ports {
		name := cmp.Or(p.Name, strconv.Itoa(int(p.Port)))
		e := Address{Service: s.key(), Port: name, Protocol: protocolOf(p.Protocol)}
		add := func(kind Kind, addr netip.Addr, port int32) {
			e.Kind, e.To = kind, netip.AddrPortFrom(addr, uint16(port))
			e.Backends = c.backends(made, p.Name, addr)
			all = append(all, e)
		}
		for _, a := range s.addresses() {
			add(a.kind, a.addr, p.Port)
		}
		for _, v6 := range []bool{false, true} {
			addr := c.bed.Addr(testbed.Node, v6)
			if p.NodePort != 0 && slices.Contains(s.Spec.IPFamilies, familyOf(addr)) {
				add(NodePort, addr, p.NodePort)
			}
		}
	}
	return all
}

// backends are the ready endpoints of a Service's port in the family of an address.
func (c *Cluster) backends(made []*discoveryv1.EndpointSlice, name string, like netip.Addr) []Backend {
	var all []Backend
	for _, slice := range made {
		for _, p := range slice.Ports {
			port, ok := slicePort(p)
			if !ok || ptr.Deref(p.Name, "") != name {
				continue
			}
			for _, addr := range readyAddrs(slice, like) {
				to := server{netip.AddrPortFrom(addr, port.Port), port.Protocol}
				all = append(all, Backend{c.servers[to], to.AddrPort})
			}
		}
	}
	slices.SortFunc(all, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
	return slices.Compact(all)
}

// readyAddrs are the addresses of a slice's ready endpoints, if they are of the family of like.
func readyAddrs(slice *discoveryv1.EndpointSlice, like netip.Addr) []netip.Addr {
	var all []netip.Addr
	for _, e := range slice.Endpoints {
		for _, addr := range parseAddrs(e.Addresses...) {
			if addr.Is4() == like.Is4() && ptr.Deref(e.Conditions.Ready, true) {
				all = append(all, addr)
			}
		}
	}
	return all
}

// server is where a pod answers.
type server struct {
	netip.AddrPort
	protocol model.Protocol
}

// index notes which pod answers where.
func (c *Cluster) index() {
	c.servers = map[server]string{}
	for place, p := range c.pods {
		for _, addr := range p.addrs {
			for _, port := range p.listens() {
				c.servers[server{netip.AddrPortFrom(addr, port.Port), port.Protocol}] = place
			}
		}
	}
}
