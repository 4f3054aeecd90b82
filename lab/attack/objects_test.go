package attack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/testbed"
)

// both are an IPv4 address and its twin.
func both(v4 string) []netip.Addr {
	a := netip.MustParseAddr(v4)
	return []netip.Addr{a, testbed.EmbedV6(a)}
}

// nth counts addresses from one on.
func nth(first string, n int) netip.Addr {
	a := netip.MustParseAddr(first)
	if a.Is6() {
		b := a.As16()
		binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+uint64(n))
		return netip.AddrFrom16(b)
	}
	b := a.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}

func texts(addrs ...netip.Addr) (all []string) {
	for _, a := range addrs {
		all = append(all, a.String())
	}
	return all
}

// Namespaces.
const victim, tenant = "victim", "evil"

// service is a Service of one namespace, at ClusterIPs, with a port for each target.
func service(namespace, name string, ips []netip.Addr, targets ...uint16) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	month := time.January
	if namespace == tenant {
		month = time.February // whoever came first has a right to what it has
	}
	s.CreationTimestamp = metav1.NewTime(time.Date(2026, month, 1, 0, 0, 0, 0, time.UTC))
	s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeClusterIP, ips[0].String(), texts(ips...)
	for _, a := range ips {
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, map[bool]corev1.IPFamily{
			true: corev1.IPv6Protocol, false: corev1.IPv4Protocol}[a.Is6()])
	}
	for i, target := range targets {
		for _, p := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
				Name: fmt.Sprintf("%s-%d", strings.ToLower(string(p)), i), Port: int32(80 + i), Protocol: p,
				TargetPort: intstr.FromInt32(int32(target)),
			})
		}
	}
	return s
}

// exposed is the same with a load balancer's addresses and NodePorts, beginning with the first.
func exposed(s *corev1.Service, nodePort int32, balancer ...netip.Addr) *corev1.Service {
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = nodePort + int32(i/2)
	}
	for _, a := range balancer {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a.String()})
	}
	return s
}

// slice has the endpoints of a Service, all of one family.
func slice(s *corev1.Service, endpoints ...netip.Addr) *discoveryv1.EndpointSlice {
	v6 := endpoints[0].Is6()
	e := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: s.Namespace, Name: s.Name + map[bool]string{true: "-6", false: "-4"}[v6],
		Labels: map[string]string{discoveryv1.LabelServiceName: s.Name},
	}}
	e.AddressType = map[bool]discoveryv1.AddressType{true: discoveryv1.AddressTypeIPv6, false: discoveryv1.AddressTypeIPv4}[v6]
	for _, p := range s.Spec.Ports {
		target := p.TargetPort.IntVal
		e.Ports = append(e.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &target})
	}
	for _, a := range endpoints {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
	}
	return e
}

// of are the endpoints of pods, in each family.
func (s *stage) of(svc *corev1.Service, pods ...testbed.Place) (all []runtime.Object) {
	for i := range svc.Spec.ClusterIPs {
		var addrs []netip.Addr
		for _, pod := range pods {
			addrs = append(addrs, s.bed.Addr(pod, i == 1))
		}
		all = append(all, slice(svc, addrs...))
	}
	return all
}

// clusterObjects are what the control plane has given out: ranges, and the Service of DNS.
func clusterObjects(s *stage) []runtime.Object {
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
	for _, p := range testbed.ServiceCIDRs() {
		cidr.Spec.CIDRs = append(cidr.Spec.CIDRs, p.String())
	}
	dns := service("kube-system", "kube-dns", both(dnsIP), dnsPort)
	return append([]runtime.Object{cidr, dns}, s.of(dns, "web-1", "web-2")...)
}

// baseObjects are those that an attacker has from the beginning: a Service of its own.
func baseObjects(s *stage) []runtime.Object {
	base := exposed(service(tenant, "base", both(baseIP), evilPort), baseNodePort, both(baseBalancer)...)
	base.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	return append([]runtime.Object{base}, s.of(base, evil, lurker)...)
}

// The addresses of other tenants.
const (
	dnsIP, dnsPort       = "10.96.0.10", 7053
	baseIP, baseBalancer = "10.96.6.6", "203.0.113.66"
	baseNodePort         = 31666
	evilPort             = 8080
	hostPort             = 7900
)
