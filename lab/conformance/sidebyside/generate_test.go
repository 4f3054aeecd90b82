package sidebyside

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// generator draws random objects that the API server admits. They claim no address and port twice: in
// kube-proxy the owner would then depend on the order of a map.
type generator struct{ *rand.Rand }

func newGenerator(seed, stream uint64) generator {
	return generator{rand.New(rand.NewPCG(seed, stream))}
}

func (g generator) chance(percent int) bool { return g.IntN(100) < percent }

func pick[T any](g generator, from ...T) T { return from[g.IntN(len(from))] }

// some keeps each value with a probability of one half.
func some[T any](g generator, from ...T) (out []T) {
	for _, v := range from {
		if g.chance(50) {
			out = append(out, v)
		}
	}
	return out
}

// services is how many there are at most.
const services = 8

// cluster is a random cluster.
func (g generator) cluster() objects {
	o := newObjects()
	o.zone = g.zone()
	for i := range services {
		g.replace(o, i)
	}
	return o
}

func (g generator) zone() string { return pick(g, "zone-a", "zone-a", "zone-b", "") }

// change replaces and removes some objects.
func (g generator) change(o objects) objects {
	o = o.clone()
	for _, i := range g.Perm(services)[:1+g.IntN(services-2)] {
		name := serviceName(i)
		switch s := o.services[name]; {
		case s == nil:
			g.replace(o, i)
		case g.chance(20):
			o.remove(name)
		case g.chance(30): // its endpoints
			o.add(s, g.slices(s)...)
		default: // its spec
			next := g.service(i, s.Spec.ClusterIPs)
			o.add(next, o.of(name)...)
		}
	}
	if g.chance(30) {
		o.zone = g.zone()
	}
	return o
}

// replace makes the i-th Service anew.
func (g generator) replace(o objects, i int) {
	var old []string // a ClusterIP cannot be changed
	if s := o.services[serviceName(i)]; s != nil {
		old = s.Spec.ClusterIPs
	}
	s := g.service(i, old)
	o.add(s, g.slices(s)...)
}

func serviceName(i int) string { return fmt.Sprintf("s%d", i) }

// service draws the i-th Service. All addresses of its own end in 10+i.
func (g generator) service(i int, clusterIPs []string) *corev1.Service {
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}}
	s.Name, s.Namespace = serviceName(i), metav1.NamespaceDefault
	if g.chance(4) {
		s.Labels = map[string]string{otherProxy: "other"}
	}
	s.Spec.Type = pick(g, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	if s.Spec.ClusterIPs = clusterIPs; clusterIPs == nil {
		ip := fmt.Sprintf("10.96.0.%d", 10+i)
		s.Spec.ClusterIPs = pick(g, []string{ip}, []string{in(true, ip)}, []string{ip, in(true, ip)}, []string{in(true, ip), ip})
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	families(&s.Spec)
	own := g.chance(40) // no other Service has its ports, so that it may share addresses
	g.ports(s, i, own)
	g.external(s, i, own)
	g.policies(s, i)
	return s
}

func families(spec *corev1.ServiceSpec) {
	for _, ip := range spec.ClusterIPs {
		family := corev1.IPv4Protocol
		if netip.MustParseAddr(ip).Is6() {
			family = corev1.IPv6Protocol
		}
		spec.IPFamilies = append(spec.IPFamilies, family)
	}
	spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	if len(spec.ClusterIPs) > 1 {
		spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	}
}

func (g generator) ports(s *corev1.Service, i int, own bool) {
	ports := []corev1.ServicePort{
		{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP},
		{Name: "admin", Port: 9000, Protocol: corev1.ProtocolTCP},
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP},
		{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP},
	}
	if hasSCTP {
		ports = append(ports, corev1.ServicePort{Name: "sctp", Port: 7, Protocol: corev1.ProtocolSCTP})
	}
	noNodePorts := s.Spec.Type == corev1.ServiceTypeLoadBalancer && g.chance(25)
	if noNodePorts {
		s.Spec.AllocateLoadBalancerNodePorts = new(bool)
	}
	for j, p := range append(some(g, ports[1:]...), ports[0]) {
		p.TargetPort = intstr.FromString(p.Name)
		if own {
			p.Port += int32(100 * (i + 1))
		}
		if s.Spec.Type != corev1.ServiceTypeClusterIP && !noNodePorts {
			p.NodePort = int32(30100 + 10*i + j)
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
}

func (g generator) external(s *corev1.Service, i int, own bool) {
	pool := both(fmt.Sprintf("198.51.100.%d", 10+i))
	if own {
		pool = append(append(pool, both("198.51.100.1")...), both(nodeAddrs[0])...)
	}
	if g.chance(35) {
		s.Spec.ExternalIPs = texts(some(g, pool...))
	}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	for _, a := range some(g, both(fmt.Sprintf("203.0.113.%d", 10+i))...) {
		ingress := corev1.LoadBalancerIngress{IP: a.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)}
		if g.chance(15) {
			ingress.IPMode = new(corev1.LoadBalancerIPModeProxy)
		}
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
	}
	if g.chance(10) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{Hostname: "lb.example"})
	}
	if g.chance(45) { // the LAN's .0 to .7 are the nodes, .8 to .11 the client outside
		s.Spec.LoadBalancerSourceRanges = some(g, "192.0.2.0/29", "192.0.2.8/30", "10.244.2.0/24", "10.244.1.20/32",
			"0.0.0.0/0", "fd00::c000:200/125", "fd00::c000:208/126", "fd00::af4:0/112")
	}
}

func texts(addrs []netip.Addr) (out []string) {
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return out
}

func (g generator) policies(s *corev1.Service, i int) {
	if g.chance(25) {
		s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	}
	exposed := s.Spec.Type != corev1.ServiceTypeClusterIP || len(s.Spec.ExternalIPs) > 0
	if exposed && g.chance(40) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			s.Spec.HealthCheckNodePort = int32(32000 + i)
		}
	}
	if g.chance(20) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(pick[int32](g, 600, 10800))},
		}
	}
}

// slices draws the slices of a Service, of both families whatever the Service has.
func (g generator) slices(s *corev1.Service) (list []*discoveryv1.EndpointSlice) {
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		hinted := g.chance(35)
		endpoints := map[string]discoveryv1.Endpoint{} // a pod is the same in all slices
		for _, m := range cast {
			endpoints[m.Name] = g.endpoint(m, family, hinted)
		}
		for j := range pick(g, 0, 1, 1, 2, 2, 3) {
			slice := g.slice(family, endpoints)
			slice.Name = fmt.Sprintf("%s-%s-%d", s.Name, map[bool]string{true: "4", false: "6"}[family == "IPv4"], j)
			slice.Labels = map[string]string{
				discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: "sidebyside.fairlead.dev",
			}
			list = append(list, slice)
		}
	}
	return list
}

// slice takes some of the endpoints, all of the host network or none, because they serve other ports.
func (g generator) slice(family discoveryv1.AddressType, endpoints map[string]discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Namespace: metav1.NamespaceDefault},
		AddressType: family,
	}
	hosts := g.chance(15)
	tcp, udp := pick[int32](g, podTCP, podTCP, podTCP2, podTCP3), int32(podUDP)
	if hosts {
		tcp, udp = hostTCP, hostUDP
	}
	for _, name := range slices.Compact(some(g, "http", "http", "http", "admin", "dns", "dns", "dns-tcp", "sctp")) {
		port := discoveryv1.EndpointPort{Name: &name, Port: &tcp, Protocol: new(corev1.ProtocolTCP)}
		switch name {
		case "dns":
			port.Port, port.Protocol = &udp, new(corev1.ProtocolUDP)
		case "sctp":
			port.Port, port.Protocol = new(int32(podSCTP)), new(corev1.ProtocolSCTP)
		}
		s.Ports = append(s.Ports, port)
	}
	for _, m := range some(g, cast...) {
		if m.HostNetwork != hosts {
			continue
		}
		s.Endpoints = append(s.Endpoints, endpoints[m.Name])
		if g.chance(5) { // another pod that had the address before and has not gone yet
			old := endpoints[m.Name]
			old.Conditions.Ready, old.Conditions.Terminating = new(false), new(true)
			if c := endpoints[m.Name].Conditions; c.Terminating == nil || !*c.Terminating {
				s.Endpoints = append(s.Endpoints, old)
			}
		}
	}
	return s
}

func (g generator) endpoint(m member, family discoveryv1.AddressType, hinted bool) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses: []string{in(family == discoveryv1.AddressTypeIPv6, m.Addr)},
		NodeName:  new(string(m.Node)),
	}
	if g.chance(40) {
		c := &e.Conditions
		c.Ready, c.Serving, c.Terminating = new(g.chance(50)), new(g.chance(70)), new(g.chance(60))
	}
	if hinted && g.chance(95) {
		e.Hints = &discoveryv1.EndpointHints{}
		for _, z := range some(g, "zone-a", "zone-b") {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: z})
		}
		for _, n := range some(g, testbed.Node, testbed.NodeB) {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: string(n)})
		}
	}
	return e
}

// probes are some for each address of each Service, and some for unused addresses. Of a Service with affinity the pod
// of the other node is no client: it may be bound to a backend whose answers do not find back through the node.
func (g generator) probes(o objects) (all []probe) {
	for i := range services {
		s := o.services[serviceName(i)]
		if s == nil {
			continue
		}
		for _, port := range s.Spec.Ports {
			protocol, _ := model.ParseProtocol(string(port.Protocol))
			for _, to := range addresses(s, port) {
				if p := g.probe(to, protocol); g.chance(65) {
					all = append(all, p)
				}
			}
		}
	}
	for range 12 {
		all = append(all, g.probe(g.destination(), pick(g, model.TCP, model.UDP)))
	}
	return slices.DeleteFunc(all, func(p probe) bool {
		s := o.find(p.to, p.protocol).service
		return p.from == farPod && s != nil && sticky(s)
	})
}

func (g generator) probe(to netip.AddrPort, p model.Protocol) probe {
	from := pick(g, clients...)
	if to.Addr().IsLoopback() {
		from = testbed.Node
	}
	return probe{from: from, protocol: p, to: to}
}

// destination is one that may be of no Service.
func (g generator) destination() netip.AddrPort {
	address := pick(g, "10.96.0.10", "10.96.0.11", "10.96.0.12", "10.96.0.200", "192.0.2.1", "203.0.113.10",
		"198.51.100.1", "198.51.100.50")
	return netip.AddrPortFrom(both(address)[g.IntN(2)], pick[uint16](g, 53, 80, 81, 443, 9000, 30100, 30199, 32767))
}
