package oracle

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
)

// A deviation is what kube-proxy does otherwise than Fairlead.
type deviation string

// The deviations. Each has its reason in differences.txt.
const (
	targetPorts    deviation = "target ports"
	hints          deviation = "hints"
	terminating    deviation = "terminating"
	notServing     deviation = "not serving"
	healthProtocol deviation = "health protocol"
	healthAbsent   deviation = "health absent"
	healthIPv6     deviation = "health IPv6"
	source         deviation = "source VIP"
	unused         deviation = "unused endpoints"
	clusterVIP     deviation = "endpoint of a ClusterIP"
	remains        deviation = "remains" // not in the specification: it depends on chance
)

func deviations() []deviation {
	return []deviation{
		targetPorts, hints, terminating, notServing, healthProtocol, healthAbsent, healthIPv6, source, unused, clusterVIP,
	}
}

func reasons() map[deviation]string {
	return map[deviation]string{
		targetPorts: "If endpoints have several target ports, kube-proxy sends to all of them at the port of the last one: connections\n" +
			"fail. Fairlead serves the port that most of them have.",
		hints: "kube-proxy does not know hints (kubernetes/kubernetes#137953). Fairlead follows them.",
		terminating: "While all endpoints of a Service terminate, they should serve on. kube-proxy does this only if the Service has an\n" +
			"ingress IP, then without NodePort and external IPs, and with them at the ClusterIP although others are ready.",
		notServing:     "If no endpoint of a Service with an ingress IP serves, kube-proxy sends connections to all of them.",
		healthProtocol: "A load balancer asks for health by HTTP. kube-proxy makes health VIPs of UDP and SCTP, too.",
		healthAbsent: "Without usable endpoints kube-proxy takes away the VIP at which a load balancer asks for them: it gets no answer\n" +
			"instead of a failure.",
		healthIPv6: "The load balancer of kube-proxy's health VIP lacks the flag of IPv6.",
		source: "kube-proxy takes the source address for all addresses of a port by all endpoints of it, Fairlead by those that\n" +
			"are behind the address.",
		unused:     "kube-proxy makes remote endpoints that no load balancer needs.",
		clusterVIP: "kube-proxy makes an endpoint for a ClusterIP that has no load balancer.",
		remains:    "kube-proxy leaves a remote endpoint that nothing needs any more, depending on the order of its maps.",
	}
}

// spec says which objects there should be, with some deviations.
type spec struct {
	setup setup
	node  node
	has   map[deviation]bool

	objects map[string]bool // lines, as hnssim has them
}

// endpoint is one of a port of a Service.
type endpoint struct {
	ip                                string
	port                              int32
	local, ready, serving, terminates bool
	zones                             []string // nil: no hint
}

// lines are those of all objects.
func (s *spec) lines(c cluster) []string {
	s.objects = map[string]bool{"endpoint 10.244.1.1 local mac ": true}
	for last := 11; last < 15; last++ {
		s.objects[fmt.Sprintf("endpoint %s local mac ", s.name(fmt.Sprintf("10.244.1.%d", last)))] = true
	}
	if s.overlay() {
		s.objects[fmt.Sprintf("endpoint %s local mac %s", sourceVIP, s.node.mac)] = true
	}
	for _, o := range c.services {
		for _, family := range o.Spec.IPFamilies {
			if family == corev1.IPv6Protocol && !s.setup.dual {
				continue
			}
			s.service(c, o, family)
		}
	}
	all := make([]string, 0, len(s.objects))
	for line := range s.objects {
		all = append(all, line)
	}
	slices.Sort(all)
	return all
}

func (s *spec) overlay() bool { return s.setup.kind == hns.Overlay }

// served is one family of a Service.
type served struct {
	*corev1.Service
	v6                       bool
	clusterIP                string
	external, ingress        []string
	eLocal, iLocal, preserve bool
}

func (s *spec) service(c cluster, o *corev1.Service, family corev1.IPFamily) {
	v := served{Service: o, v6: family == corev1.IPv6Protocol, preserve: o.Annotations["preserve-destination"] == "true"}
	of := func(ip string) bool { return strings.Contains(ip, ":") == v.v6 }
	v.clusterIP = o.Spec.ClusterIPs[slices.IndexFunc(o.Spec.ClusterIPs, of)]
	for _, ip := range o.Spec.ExternalIPs {
		if of(ip) {
			v.external = append(v.external, ip)
		}
	}
	for _, i := range o.Status.LoadBalancer.Ingress {
		if of(i.IP) && (i.IPMode == nil || *i.IPMode == corev1.LoadBalancerIPModeVIP) {
			v.ingress = append(v.ingress, i.IP)
		}
	}
	v.eLocal = o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	v.iLocal = *o.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	if s.has[clusterVIP] && s.overlay() {
		s.clusterVIP(v.clusterIP)
	}
	for _, p := range o.Spec.Ports {
		s.port(v, p, endpoints(c, o, family, p.Name))
	}
	if !s.has[healthAbsent] {
		s.health(v, corev1.ProtocolTCP, s.source(nil))
	}
}

// endpoints are sorted as kube-proxy sorts them.
func endpoints(c cluster, o *corev1.Service, family corev1.IPFamily, port string) (all []endpoint) {
	for _, slice := range c.slices {
		if slice.Labels["kubernetes.io/service-name"] != o.Name || string(slice.AddressType) != string(family) {
			continue
		}
		for _, p := range slice.Ports {
			if *p.Name != port {
				continue
			}
			for _, e := range slice.Endpoints {
				one := endpoint{
					ip: e.Addresses[0], port: *p.Port, local: e.NodeName != nil && *e.NodeName == here,
					ready: *e.Conditions.Ready, serving: *e.Conditions.Serving, terminates: *e.Conditions.Terminating,
				}
				if e.Hints != nil {
					for _, z := range e.Hints.ForZones {
						one.zones = append(one.zones, z.Name)
					}
				}
				all = append(all, one)
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint) int {
		address := func(e endpoint) string { return net.JoinHostPort(e.ip, fmt.Sprint(e.port)) }
		return cmp.Compare(address(a), address(b))
	})
	return all
}

// port makes the load balancers of one port.
func (s *spec) port(v served, p corev1.ServicePort, all []endpoint) {
	cluster, local, available := serving(all), serving(locals(all)), true
	if !s.has[hints] {
		cluster = nearby(all, cluster)
	}
	if s.has[terminating] {
		cluster, available = s.asKubeProxy(v, all)
		local = locals(cluster)
		if !s.has[hints] && available {
			cluster = nearby(all, cluster)
		}
	}
	if s.has[unused] {
		for _, e := range cluster {
			if !(v.eLocal && v.iLocal) || e.local {
				s.remote(e)
			}
		}
	}
	from := s.source(cluster)
	balance := func(vip string, port int32, flags, mapping uint32, dsr, only bool) {
		to := cluster
		if only {
			to = local
		}
		if dsr {
			flags |= 1
		}
		src := from
		if !s.has[source] {
			src = s.source(s.atOnePort(to))
		}
		last := to
		if s.has[targetPorts] {
			last = cluster
		}
		s.balancer(vip, port, p.Protocol, flags, mapping, v, to, last, src)
	}
	if s.has[healthAbsent] && available && len(s.known(cluster)) > 0 {
		s.health(v, p.Protocol, from)
	}
	family := uint32(0)
	if v.v6 {
		family = 2
	}
	balance(v.clusterIP, p.Port, family, 0, s.setup.dsr, v.iLocal)
	for _, ip := range v.ingress {
		mapping := uint32(16)
		if v.preserve {
			mapping |= 12
		}
		balance(ip, p.Port, family, mapping, v.eLocal || v.preserve, v.eLocal || v.preserve)
	}
	if !available {
		return
	}
	if p.NodePort != 0 {
		balance("node", p.NodePort, family, 18, v.eLocal, v.eLocal || v.preserve)
	}
	for _, ip := range v.external {
		balance(ip, p.Port, family, 16, v.eLocal, v.eLocal)
	}
}

// serving are the endpoints that are ready, or else those that serve while they terminate.
func serving(all []endpoint) []endpoint {
	if ready := keep(all, func(e endpoint) bool { return e.ready }); len(ready) > 0 {
		return ready
	}
	return keep(all, func(e endpoint) bool { return e.serving && e.terminates })
}

func locals(all []endpoint) []endpoint { return keep(all, func(e endpoint) bool { return e.local }) }

func keep(all []endpoint, f func(endpoint) bool) (some []endpoint) {
	for _, e := range all {
		if f(e) {
			some = append(some, e)
		}
	}
	return some
}

// nearby are those meant for this node's zone, if all have a hint, and one of them is for this zone.
func nearby(all, chosen []endpoint) []endpoint {
	ready := keep(all, func(e endpoint) bool { return e.ready })
	for _, e := range ready {
		if e.zones == nil {
			return chosen
		}
	}
	here := func(e endpoint) bool { return slices.Contains(e.zones, zone) }
	if !slices.ContainsFunc(ready, here) {
		return chosen
	}
	return keep(chosen, here)
}

// asKubeProxy is how syncProxyRules chooses: terminating endpoints count only if the Service has a load balancer.
func (s *spec) asKubeProxy(v served, all []endpoint) (chosen []endpoint, available bool) {
	asked := all
	if v.eLocal {
		asked = locals(all)
	}
	allTerminate, noneServes := false, false
	if len(v.ingress) > 0 {
		allTerminate = !slices.ContainsFunc(asked, func(e endpoint) bool { return (e.ready || e.terminates) && !e.terminates })
		noneServes = !slices.ContainsFunc(asked, func(e endpoint) bool { return e.serving })
	}
	chosen = keep(all, func(e endpoint) bool {
		if v.iLocal && v.eLocal && !e.local {
			return false
		}
		if noneServes && s.has[notServing] {
			return true
		}
		return (allTerminate || e.ready) && e.serving
	})
	return chosen, !allTerminate && !noneServes
}

// known are those that have an endpoint, or can get one.
func (s *spec) known(all []endpoint) []endpoint {
	return keep(all, func(e endpoint) bool { return !e.local || s.name(e.ip) != e.ip })
}

// atOnePort are those of the target port that most have, or else the lowest.
func (s *spec) atOnePort(all []endpoint) []endpoint {
	if s.has[targetPorts] {
		return all
	}
	count := map[int32]int{}
	var best int32
	for _, e := range all {
		count[e.port]++
	}
	for port, n := range count {
		if n > count[best] || n == count[best] && port < best {
			best = port
		}
	}
	return keep(all, func(e endpoint) bool { return e.port == best })
}

func (s *spec) balancer(vip string, port int32, protocol corev1.Protocol, flags, mapping uint32, v served,
	to, last []endpoint, from string) {
	to = s.atOnePort(to)
	if len(to) == 0 {
		return
	}
	target := to[0].port
	if s.has[targetPorts] && len(last) > 0 { // none has a hint for this zone
		target = last[len(last)-1].port
	}
	if vip == v.clusterIP && s.overlay() {
		s.clusterVIP(vip)
	}
	if to = s.known(to); len(to) == 0 {
		return
	}
	var names []string
	for _, e := range to {
		s.remote(e)
		names = append(names, s.name(e.ip))
	}
	distribution := 0
	if v.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		distribution = 2
	}
	s.line(vip, port, number(protocol), target, flags, mapping, distribution, from, names)
}

func number(p corev1.Protocol) int {
	return map[corev1.Protocol]int{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}[p]
}

func (s *spec) line(vip string, port int32, protocol int, target int32, flags, mapping uint32, distribution int,
	from string, names []string) {
	slices.Sort(names)
	s.objects[fmt.Sprintf("balancer %s port %d/%d to %d flags %d.%d distribution %d source %s endpoints %s", vip, port,
		protocol, target, flags, mapping, distribution, cmp.Or(from, "none"), strings.Join(names, ","))] = true
}

// health makes the load balancers at which a load balancer asks for the Service's health.
func (s *spec) health(v served, protocol corev1.Protocol, from string) {
	port := cmp.Or(v.Spec.HealthCheckNodePort, healthPort)
	if !s.has[healthProtocol] && protocol != corev1.ProtocolTCP {
		return
	}
	flags, mapping := uint32(0), uint32(0)
	if v.v6 && !s.has[healthIPv6] {
		flags = 2
	}
	if v.preserve {
		mapping = 12
	}
	for _, ip := range v.ingress {
		s.line(ip, port, number(protocol), port, flags, mapping, 0, from, []string{"10.244.1.1"})
	}
}

// source is the source of packets of a load balancer.
func (s *spec) source(all []endpoint) string {
	if !s.overlay() {
		return ""
	}
	for _, e := range all {
		if provider := provider(e.ip); !e.local && (provider == "" || provider == e.ip) {
			return s.node.ip.String()
		}
	}
	return sourceVIP
}

// provider is the node that has an address, by the routes of the network.
func provider(ip string) string {
	for prefix, node := range map[string]string{"10.244.2.": "192.0.2.22", "10.244.3.": "192.0.2.23"} {
		if strings.HasPrefix(ip, prefix) || ip == node {
			return node
		}
	}
	return ""
}

func (s *spec) remote(e endpoint) {
	if e.local {
		return
	}
	b := netip.MustParseAddr(e.ip).AsSlice()
	if len(b) == 16 {
		b = []byte{b[15], b[14], b[13], b[12]}
	}
	line := fmt.Sprintf("endpoint %s remote mac 02-11-%02x-%02x-%02x-%02x", e.ip, b[0], b[1], b[2], b[3])
	if s.overlay() {
		line += provided(cmp.Or(provider(e.ip), s.node.ip.String()))
	}
	s.objects[line] = true
}

func (s *spec) clusterVIP(ip string) {
	s.objects[fmt.Sprintf("endpoint %s remote mac %s", ip, s.node.mac)+provided(s.node.ip.String())] = true
}

func provided(node string) string {
	return fmt.Sprintf(" ProviderAddress {\"ProviderAddress\":%q}", node)
}

// name is that of an endpoint in hnssim's lines: pods on this node have two addresses.
func (s *spec) name(ip string) string {
	for last := 11; last < 15; last++ {
		v4, v6 := fmt.Sprintf("10.244.1.%d", last), fmt.Sprintf("fd00::1:%x", last)
		if ip == v4 || ip == v6 {
			return v4 + "," + v6
		}
	}
	return ip
}
