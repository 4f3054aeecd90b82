package sidebyside

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// objects are what the API server has of a cluster, by name. All are in the namespace default.
type objects struct {
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	zone     string // of the node; may be empty
}

func newObjects() objects {
	return objects{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}}
}

// clone copies the maps: what is in them is replaced and never changed.
func (o objects) clone() objects {
	return objects{maps.Clone(o.services), maps.Clone(o.slices), o.zone}
}

// add puts a Service in, in place of the one of that name and its slices.
func (o objects) add(s *corev1.Service, list ...*discoveryv1.EndpointSlice) {
	o.remove(s.Name)
	o.services[s.Name] = s
	for _, slice := range list {
		o.slices[slice.Name] = slice
	}
}

func (o objects) remove(service string) {
	delete(o.services, service)
	for _, s := range o.of(service) {
		delete(o.slices, s.Name)
	}
}

// of are the slices of a Service.
func (o objects) of(service string) (list []*discoveryv1.EndpointSlice) {
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		if o.slices[name].Labels[discoveryv1.LabelServiceName] == service {
			list = append(list, o.slices[name])
		}
	}
	return list
}

// only is one Service with its slices.
func (o objects) only(service string) objects {
	one := newObjects()
	one.zone = o.zone
	if s := o.services[service]; s != nil {
		one.add(s, o.of(service)...)
	}
	return one
}

// String is what kubectl apply takes, and what the status is besides.
func (o objects) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# the node's zone: %q\n", o.zone)
	show := func(object any) {
		text, err := yaml.Marshal(object)
		if err != nil {
			text = []byte(err.Error())
		}
		fmt.Fprintf(&b, "---\n%s", text)
	}
	for _, name := range slices.Sorted(maps.Keys(o.services)) {
		show(o.services[name])
		for _, s := range o.of(name) {
			show(s)
		}
	}
	return b.String()
}

// kind says what an address and port are to a cluster.
type kind string

const (
	clusterIP     kind = "ClusterIP"
	loadBalancer  kind = "load balancer's address"
	proxyIP       kind = "load balancer's address of ipMode Proxy"
	externalIP    kind = "external IP"
	nodePort      kind = "node port"
	unusedPort    kind = "unused port of a ClusterIP"
	unallocated   kind = "unallocated address of a Service CIDR"
	nobodys       kind = "address of no Service"
	localNodePort kind = "node port on localhost"
	otherProxys   kind = "ClusterIP of another proxy's Service"
)

// target is whom a packet is for.
type target struct {
	kind    kind
	service *corev1.Service // nil: of no Service
	port    corev1.ServicePort
}

// otherProxy is the label of Services that are none of our proxies' business.
const otherProxy = "service.kubernetes.io/service-proxy-name"

// find returns the target of a packet. External addresses come before NodePorts, which can be on the same address.
func (o objects) find(to netip.AddrPort, p model.Protocol) target {
	nobody := target{kind: nobodys}
	for _, name := range slices.Sorted(maps.Keys(o.services)) {
		s := o.services[name]
		if slices.Contains(s.Spec.ClusterIPs, to.Addr().String()) {
			nobody.kind = unusedPort
			if s.Labels[otherProxy] != "" {
				nobody.kind = otherProxys
			}
		}
		for _, port := range s.Spec.Ports {
			if !strings.EqualFold(string(port.Protocol), p.String()) {
				continue
			}
			if kind := kindOf(s, port, to); kind != "" && nobody.kind != otherProxys {
				return target{kind, s, port}
			}
		}
	}
	if nobody.kind == nobodys && slices.ContainsFunc(testbed.ServiceCIDRs(), func(c netip.Prefix) bool {
		return c.Contains(to.Addr())
	}) {
		nobody.kind = unallocated
	}
	return nobody
}

// kindOf is empty if it is not the Service's.
func kindOf(s *corev1.Service, port corev1.ServicePort, to netip.AddrPort) kind {
	is := func(address string) bool { return address == to.Addr().String() && int(port.Port) == int(to.Port()) }
	for _, ip := range s.Spec.ClusterIPs {
		if is(ip) {
			return clusterIP
		}
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		switch {
		case is(in.IP) && in.IPMode != nil && *in.IPMode == corev1.LoadBalancerIPModeProxy:
			return proxyIP
		case is(in.IP):
			return loadBalancer
		}
	}
	if slices.ContainsFunc(s.Spec.ExternalIPs, is) {
		return externalIP
	}
	switch {
	case port.NodePort == 0 || int(port.NodePort) != int(to.Port()) || !hasFamily(s, to.Addr()):
		return ""
	case to.Addr().IsLoopback():
		return localNodePort
	case slices.ContainsFunc(nodeAddrs, func(a string) bool { return slices.Contains(both(a), to.Addr()) }):
		return nodePort
	}
	return ""
}

func hasFamily(s *corev1.Service, a netip.Addr) bool {
	return slices.ContainsFunc(s.Spec.ClusterIPs, func(ip string) bool {
		return netip.MustParseAddr(ip).Is4() == a.Is4()
	})
}

// addresses are where clients may reach a port of a Service, from any place.
func addresses(s *corev1.Service, port corev1.ServicePort) (all []netip.AddrPort) {
	add := func(address string, port int32) {
		all = append(all, netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)))
	}
	for _, ip := range slices.Concat(s.Spec.ClusterIPs, s.Spec.ExternalIPs) {
		add(ip, port.Port)
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			add(in.IP, port.Port)
		}
	}
	if port.NodePort != 0 {
		for _, a := range append([]string{"127.0.0.1"}, nodeAddrs...) {
			add(a, port.NodePort)
			add(loopbackOr(both(a)[1]), port.NodePort)
		}
	}
	return all
}

// loopbackOr is the IPv6 loopback address for the twin of the IPv4 one.
func loopbackOr(twin netip.Addr) string {
	if twin == both("127.0.0.1")[1] {
		return "::1"
	}
	return twin.String()
}
