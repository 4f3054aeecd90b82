package oracle

import (
	"fmt"
	"math/rand/v2"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// cluster is what both proxies are told.
type cluster struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
}

// generator makes valid objects, as an API server has them: no two Services want the same address and port.
type generator struct {
	*rand.Rand
	dual bool
}

func (g generator) chance(percent int) bool { return g.IntN(100) < percent }

func pick[T any](g generator, from ...T) T { return from[g.IntN(len(from))] }

func (g generator) cluster() (c cluster) {
	for i := range 1 + g.IntN(6) {
		s := g.service(i)
		c.services = append(c.services, s)
		for _, family := range s.Spec.IPFamilies {
			taken := map[string]bool{}
			for j := range g.IntN(3) {
				c.slices = append(c.slices, g.slice(s, family, j, taken))
			}
		}
	}
	return c
}

func (g generator) service(i int) *corev1.Service {
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%d", i)}}
	s := &o.Spec
	s.Type = pick(g, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	v4, v6 := fmt.Sprintf("10.96.0.%d", 10+i), fmt.Sprintf("fd00:96::%x", 10+i)
	s.ClusterIPs, s.IPFamilies = []string{v4}, []corev1.IPFamily{corev1.IPv4Protocol}
	switch {
	case g.dual && g.chance(50):
		s.ClusterIPs, s.IPFamilies = []string{v4, v6}, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	case g.dual && g.chance(50):
		s.ClusterIPs, s.IPFamilies = []string{v6}, []corev1.IPFamily{corev1.IPv6Protocol}
	}
	s.ClusterIP = s.ClusterIPs[0]
	g.policies(o, i)
	if g.chance(20) {
		s.ExternalIPs = append(s.ExternalIPs, fmt.Sprintf("203.0.113.%d", i+1))
		if g.dual {
			s.ExternalIPs = append(s.ExternalIPs, fmt.Sprintf("fd00:113::%x", i+1))
		}
	}
	for j, p := range g.ports() {
		if s.Type != corev1.ServiceTypeClusterIP {
			p.NodePort = int32(30000 + 10*i + j)
		}
		s.Ports = append(s.Ports, p)
	}
	return o
}

func (g generator) policies(o *corev1.Service, i int) {
	s := &o.Spec
	s.SessionAffinity = corev1.ServiceAffinityNone
	if g.chance(25) {
		s.SessionAffinity = corev1.ServiceAffinityClientIP
		s.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(pick[int32](g, 10800, 60))},
		}
	}
	s.InternalTrafficPolicy = new(pick(g, corev1.ServiceInternalTrafficPolicyCluster,
		corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal))
	if s.Type == corev1.ServiceTypeClusterIP {
		return
	}
	s.ExternalTrafficPolicy = pick(g, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	if g.chance(20) {
		o.Annotations = map[string]string{"preserve-destination": "true"}
	}
	if s.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	if s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		s.HealthCheckNodePort = int32(31900 + i)
	}
	if g.chance(20) {
		s.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
	}
	ips := []string{fmt.Sprintf("198.51.100.%d", i+1)}
	if g.dual {
		ips = append(ips, fmt.Sprintf("fd00:100::%x", i+1))
	}
	for _, ip := range ips {
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
			IP: ip, IPMode: pick(g, nil, new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeProxy)),
		})
	}
}

func (g generator) ports() (all []corev1.ServicePort) {
	for _, p := range []corev1.ServicePort{
		{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080)},
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromString("dns")},
		{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(5353)},
		{Name: "sctp", Port: 9999, Protocol: corev1.ProtocolSCTP, TargetPort: intstr.FromInt32(9999)},
	} {
		if g.chance(40) || p.Name == "http" {
			all = append(all, p)
		}
	}
	return all
}

// slice has addresses that no other slice of the Service has.
func (g generator) slice(s *corev1.Service, family corev1.IPFamily, j int, taken map[string]bool) *discoveryv1.EndpointSlice {
	o := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: strings.ToLower(fmt.Sprintf("%s-%s-%d", s.Name, family, j)),
			Labels: map[string]string{discoveryv1.LabelServiceName: s.Name},
		},
		AddressType: discoveryv1.AddressType(family),
	}
	for _, p := range s.Spec.Ports {
		port := map[string]int32{"http": 8080, "dns": 5353, "dns-tcp": 5353, "sctp": 9999}[p.Name]
		if g.chance(15) {
			port++
		}
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
	}
	hinted := g.chance(15)
	for range g.IntN(5) {
		if e := g.endpoint(family, hinted); !taken[e.Addresses[0]] {
			taken[e.Addresses[0]] = true
			o.Endpoints = append(o.Endpoints, e)
		}
	}
	return o
}

// places are the nodes of endpoints. On the first one, which is this one, a pod is not there yet; from the others come
// pods of the host's network, too. Addresses without a node are outside of the cluster.
func (g generator) endpoint(family corev1.IPFamily, hinted bool) discoveryv1.Endpoint {
	last := 11 + g.IntN(5)
	node, ip := here, fmt.Sprintf("10.244.1.%d", last)
	switch g.IntN(10) {
	case 0, 1:
		node, ip = "node-b", fmt.Sprintf("10.244.2.%d", last)
	case 2, 3, 4:
		node, ip = "node-c", fmt.Sprintf("10.244.3.%d", last)
	case 5:
		node, ip = pick(g, "node-b", ""), pick(g, "192.0.2.22", "198.18.0.5")
	}
	if family == corev1.IPv6Protocol {
		ip = "fd00::" + map[string]string{here: "1", "node-b": "2", "node-c": "3", "": "4"}[node] + fmt.Sprintf(":%x", last)
	}
	e := discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node}
	if node == "" {
		e.NodeName = nil
	}
	ready, serving, terminating := true, true, false
	switch n := g.IntN(20); {
	case n < 2:
		ready, serving = false, false
	case n < 4:
		ready, terminating = false, true
	case n < 5:
		ready, serving, terminating = false, false, true
	}
	e.Conditions = discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
	if hinted {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: pick(g, "a", "b")}}}
	}
	return e
}
