package conformance

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// generator makes random objects. They take their addresses from small ranges, so that they often
// conflict, and one in ten has a field that is wrong.
type generator struct{ *rand.Rand }

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

// options are those of a proxy, in the words of a case.
func (g generator) options() map[string]string {
	o := map[string]string{"nodeport-addresses": pick(g, "primary", "all", "192.0.2.96/28", "primary,localhost")}
	if g.chance(20) {
		o["masquerade-all"] = "true"
	}
	switch g.IntN(5) {
	case 0:
		o["detect-local-mode"] = "NodeCIDR"
	case 1:
		o["detect-local-mode"], o["pod-interface-name-prefix"] = "InterfaceNamePrefix", "cali"
	case 2:
		o["cluster-cidr"] = "none"
	}
	return o
}

// services is how many names there are.
const services = 6

// mutation is some new or changed objects, and the id of one that goes.
func (g generator) mutation() (objects []object, deleted string) {
	name := fmt.Sprintf("s%d", g.IntN(services))
	slice := fmt.Sprintf("%s-%d", name, g.IntN(3))
	switch g.IntN(10) {
	case 0:
		return nil, "Service default/" + name
	case 1:
		return nil, "EndpointSlice default/" + slice
	case 2:
		return []object{g.node()}, ""
	case 3, 4:
		return []object{g.service(name)}, ""
	case 5:
		return []object{g.service(name), g.slice(name, slice)}, ""
	}
	return []object{g.slice(name, slice)}, ""
}

// cluster is a Service of each name, with slices.
func (g generator) cluster() (objects []object) {
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		objects = append(objects, g.service(name))
		for j := range g.IntN(3) {
			objects = append(objects, g.slice(name, fmt.Sprintf("%s-%d", name, j)))
		}
	}
	return objects
}

// predictable are the schedulers that serve all clients. ovf refuses a client if the backends have more connections
// than their weights, and connections of other probes count, too.
func predictable() []string {
	return slices.DeleteFunc(model.Schedulers(), func(s string) bool { return s == "ovf" })
}

func (g generator) service(name string) object {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}}
	s.CreationTimestamp.Time = time.Unix(int64(g.IntN(3)), 0)
	if g.chance(5) {
		s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
	}
	if g.chance(20) {
		s.Annotations = map[string]string{"fairlead.dev/scheduler": pick(g, append(predictable(), "best")...)}
	}
	g.addresses(&s.Spec, &s.Status)
	g.policies(&s.Spec)
	if g.chance(30) && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, "fairlead.dev/external-failover-policy", "Passthrough")
	}
	ports := []corev1.ServicePort{
		{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP},
		{Name: "admin", Port: 9000, Protocol: corev1.ProtocolTCP},
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP},
		{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP},
	}
	for _, p := range append(some(g, ports[1:]...), ports[0]) {
		p.TargetPort = intstr.FromString(p.Name)
		if s.Spec.Type != corev1.ServiceTypeClusterIP {
			p.NodePort = 30080 + int32(g.IntN(8))
		}
		if g.chance(2) {
			p.Port = 70000
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	return object{id: "Service default/" + name, batch: serviceBatch(s)}
}

func (g generator) addresses(spec *corev1.ServiceSpec, status *corev1.ServiceStatus) {
	spec.Type = pick(g, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	ip := fmt.Sprintf("10.96.0.%d", 10+g.IntN(8))
	switch g.IntN(4) {
	case 0:
		spec.ClusterIPs = []string{ip}
	case 1:
		spec.ClusterIPs = []string{embedWord(ip)}
	case 2:
		spec.ClusterIPs = []string{ip, embedWord(ip)}
	case 3:
		spec.ClusterIPs = []string{embedWord(ip), ip}
	}
	spec.ClusterIP = spec.ClusterIPs[0]
	external := []string{"198.51.100.1", "198.51.100.2", "192.0.2.1", "fd00::c633:6401", "198.51.100.999"}
	if g.chance(30) {
		spec.ExternalIPs = some(g, external...)
	}
	if spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	for _, ip := range some(g, "203.0.113.1", "203.0.113.2", "fd00::cb00:7101", "198.51.100.1") {
		in := corev1.LoadBalancerIngress{IP: ip}
		if g.chance(10) {
			in.IPMode = new(corev1.LoadBalancerIPModeProxy)
		}
		status.LoadBalancer.Ingress = append(status.LoadBalancer.Ingress, in)
	}
	if g.chance(40) {
		spec.LoadBalancerSourceRanges = some(g, "192.0.2.0/29", " 192.0.2.8/30", "10.244.2.0/24", "0.0.0.0/0",
			"fd00::c000:208/125", "fd00::af4:0/112", "bad")
	}
}

func (g generator) policies(spec *corev1.ServiceSpec) {
	if g.chance(20) {
		spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if g.chance(40) && spec.Type != corev1.ServiceTypeClusterIP {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		spec.HealthCheckNodePort = 32000 + int32(g.IntN(2))
	}
	if g.chance(25) {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(pick[int32](g, 1, 600, 10800))},
		}
	}
}

// slice gives each endpoint ports that its pod serves: those of the host network serve others.
func (g generator) slice(service, name string) object {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Namespace: "default"},
		AddressType: pick(g, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6),
	}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: service}
	if g.chance(30) {
		s.Annotations = map[string]string{"fairlead.dev/weights": g.weights()}
	}
	hosts := g.chance(15)
	tcp, udp := pick[int32](g, 8080, 8081), int32(5353)
	if hosts {
		tcp, udp = 6443, 6053
	}
	for _, p := range some(g, "http", "http", "admin", "dns", "dns-tcp") {
		port := discoveryv1.EndpointPort{Name: &p, Port: &tcp, Protocol: new(corev1.ProtocolTCP)}
		if p == "dns" {
			port.Port, port.Protocol = &udp, new(corev1.ProtocolUDP)
		}
		s.Ports = append(s.Ports, port)
	}
	hinted := g.chance(30)
	for _, m := range some(g, Cast()...) {
		if m.HostNetwork == hosts {
			s.Endpoints = append(s.Endpoints, g.endpoint(m, s.AddressType, hinted))
		}
	}
	if g.chance(5) {
		bad := pick(g, "10.96.0.11", "fe80::1", "", "10.244.0.999")
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{bad}})
	}
	return object{id: "EndpointSlice default/" + name, batch: sliceBatch(s)}
}

// weights are those of a slice, and of some members of the cast in both families.
func (g generator) weights() string {
	words := some(g, pick(g, "0", "3", "256", "257"))
	for _, m := range some(g, Cast()...) {
		weight := fmt.Sprintf("=%d", pick(g, 0, 0, 1, 7))
		words = append(words, m.Addr+weight, embedWord(m.Addr)+weight)
	}
	return strings.Join(words, ",")
}

func (g generator) endpoint(m Member, family discoveryv1.AddressType, hinted bool) discoveryv1.Endpoint {
	addr := m.Addr
	if family == discoveryv1.AddressTypeIPv6 {
		addr = embedWord(addr)
	}
	e := discoveryv1.Endpoint{Addresses: []string{addr}, NodeName: new(string(m.Node))}
	if g.chance(40) {
		c := &e.Conditions
		c.Ready, c.Serving, c.Terminating = new(g.chance(50)), new(g.chance(70)), new(g.chance(70))
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

// node is the node under test in another zone, or in none.
func (g generator) node() object {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	if zone := pick(g, "zone-a", "zone-b", ""); zone != "" {
		n.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	for _, a := range []string{nodeAddrs()[0], embedWord(nodeAddrs()[0])} {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	for _, p := range testbed.PodCIDRs(testbed.Node) {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	return object{id: "Node /" + n.Name, batch: nodeBatch(n)}
}

// destination is one that no row may be for.
func (g generator) destination() netip.AddrPort {
	addr := pick(g, "10.96.0.10", "10.96.0.11", "10.96.0.17", "10.96.0.200", "192.0.2.1",
		"203.0.113.1", "198.51.100.1", "198.51.100.50")
	if g.chance(50) {
		addr = embedWord(addr)
	}
	port := pick[uint16](g, 53, 80, 81, 443, 9000, 30080, 30087, 30099)
	return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
}
