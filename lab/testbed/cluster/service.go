package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// service is a Service on its way through the API server.
type service struct {
	object
	corev1.Service
	pods  []*pod                       // that it selects
	given []*discoveryv1.EndpointSlice // by the manifests, if it selects none
}

func (s *service) headless() bool { return s.Spec.ClusterIP == corev1.ClusterIPNone }

// unproxied says why a service proxy has nothing to do for the Service; empty: it has.
func (s *service) unproxied() string {
	switch proxy, named := s.Labels["service.kubernetes.io/service-proxy-name"]; {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return "is a name for " + s.Spec.ExternalName
	case s.headless():
		return "is headless"
	case named:
		return fmt.Sprintf("belongs to the proxy %q", proxy)
	}
	return ""
}

// selects reports whether a pod is an endpoint of the Service.
func (s *service) selects(p *pod) bool {
	return len(s.Spec.Selector) > 0 && p.namespace == s.object.namespace &&
		labels.Set(s.Spec.Selector).AsSelectorPreValidated().Matches(p.labels)
}

// targets are the ports of a pod to which the Service leads.
func (s *service) targets(p *pod) []testbed.PodPort {
	var targets []testbed.PodPort
	for _, port := range s.Spec.Ports {
		if target, ok := p.target(port); ok {
			targets = append(targets, target)
		}
	}
	return targets
}

// complete sets defaults and validates.
func (s *service) complete() error {
	s.setDefaults()
	return s.validate()
}

// setDefaults are the API server's (pkg/apis/core/v1/defaults.go of Kubernetes), families apart.
func (s *service) setDefaults() {
	s.Kind, s.APIVersion = "Service", "v1"
	s.Namespace, s.ManagedFields = s.object.namespace, nil
	s.Spec.Type = cmp.Or(s.Spec.Type, corev1.ServiceTypeClusterIP)
	s.Spec.SessionAffinity = cmp.Or(s.Spec.SessionAffinity, corev1.ServiceAffinityNone)
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		p.Protocol = cmp.Or(p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort.IntVal == 0 && p.TargetPort.StrVal == "" {
			p.TargetPort.IntVal = p.Port
		}
	}
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && s.Spec.SessionAffinityConfig == nil {
		timeout := corev1.ClientIPConfig{TimeoutSeconds: new(corev1.DefaultClientIPServiceAffinitySeconds)}
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &timeout}
	}
	if s.Spec.InternalTrafficPolicy == nil && s.Spec.Type != corev1.ServiceTypeExternalName {
		s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	}
	if s.external() {
		s.Spec.ExternalTrafficPolicy = cmp.Or(s.Spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "" {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
	if len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	}
	s.setFamilies()
	s.setLoadBalancers()
}

// setFamilies completes ipFamilies and ipFamilyPolicy in a cluster whose first family is IPv4.
func (s *service) setFamilies() {
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	for _, ip := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(ip); err == nil && len(s.Spec.IPFamilies) < len(s.Spec.ClusterIPs) {
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, familyOf(a))
		}
	}
	if s.Spec.IPFamilyPolicy == nil {
		policy := corev1.IPFamilyPolicySingleStack
		if len(s.Spec.IPFamilies) > 1 || len(s.Spec.ClusterIPs) > 1 ||
			s.headless() && len(s.Spec.Selector) == 0 && len(s.Spec.IPFamilies) == 0 {
			policy = corev1.IPFamilyPolicyRequireDualStack
		}
		s.Spec.IPFamilyPolicy = &policy
	}
	if len(s.Spec.IPFamilies) == 0 {
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	}
	if *s.Spec.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack && len(s.Spec.IPFamilies) == 1 {
		other := corev1.IPv6Protocol
		if s.Spec.IPFamilies[0] == other {
			other = corev1.IPv4Protocol
		}
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, other)
	}
}

// setLoadBalancers leaves the addresses that another cloud gave, but not its host names; those of
// the Service's own wish come instead if there are none.
func (s *service) setLoadBalancers() {
	given := s.Status.LoadBalancer.Ingress
	s.Status = corev1.ServiceStatus{}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	s.Status.LoadBalancer.Ingress = slices.DeleteFunc(given, func(ingress corev1.LoadBalancerIngress) bool {
		return parseAddrs(ingress.IP) == nil
	})
	if addr, err := netip.ParseAddr(s.Spec.LoadBalancerIP); err == nil && len(s.loadBalancers()) == 0 {
		s.addIngress(addr)
	}
}

func (s *service) addIngress(addr netip.Addr) {
	s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
		corev1.LoadBalancerIngress{IP: addr.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)})
}

// loadBalancers are the addresses that the Service's load balancer has.
func (s *service) loadBalancers() []netip.Addr {
	var addrs []netip.Addr
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, parseAddrs(ingress.IP)...)
	}
	return addrs
}

func (s *service) clusterIPs() []netip.Addr { return parseAddrs(s.Spec.ClusterIPs...) }

func (s *service) setClusterIPs(addrs []netip.Addr) {
	s.Spec.ClusterIPs = nil
	for _, addr := range addrs {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, addr.String())
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
}

// parseAddrs leaves out what is not an address.
func parseAddrs(texts ...string) []netip.Addr {
	var addrs []netip.Addr
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is6() {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// external: the Service can be reached from outside by a port of the nodes or a load balancer.
func (s *service) external() bool {
	return s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer
}

// validate finds what the API server refuses and nothing could be made of here.
func (s *service) validate() error {
	var errs []error
	bad := func(field string, value any, reason string) {
		errs = append(errs, fmt.Errorf("%s: %v %s", field, value, reason))
	}
	if len(s.Spec.Ports) == 0 && !s.headless() && s.Spec.Type != corev1.ServiceTypeExternalName {
		bad("spec.ports", "[]", "is empty")
	}
	switch s.Spec.Type {
	case corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeExternalName:
	default:
		bad("spec.type", s.Spec.Type, "is not a type of Service")
	}
	for i, family := range s.Spec.IPFamilies {
		if family != corev1.IPv4Protocol && family != corev1.IPv6Protocol {
			bad(fmt.Sprintf("spec.ipFamilies[%d]", i), family, "is not IPv4 or IPv6")
		}
	}
	names, ports := map[string]bool{}, map[nodePort]bool{}
	for i, p := range s.Spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		key := nodePort{p.Protocol, p.Port}
		switch _, err := model.ParseProtocol(string(p.Protocol)); {
		case p.Port < 1 || p.Port > 65535:
			bad(field+".port", p.Port, "is not a port")
		case p.TargetPort.StrVal == "" && (p.TargetPort.IntVal < 1 || p.TargetPort.IntVal > 65535):
			bad(field+".targetPort", p.TargetPort.IntVal, "is not a port")
		case p.NodePort < 0 || p.NodePort > 65535:
			bad(field+".nodePort", p.NodePort, "is not a port")
		case err != nil:
			bad(field+".protocol", p.Protocol, "is not TCP, UDP or SCTP")
		case p.Name == "" && len(s.Spec.Ports) > 1:
			bad(field+".name", `""`, "is no name, which each of several ports must have")
		case names[p.Name]:
			bad(field+".name", fmt.Sprintf("%q", p.Name), "is another port's")
		case ports[key]:
			bad(field+".port", p.Port, "is another port's")
		}
		names[p.Name], ports[key] = true, true
	}
	for i, ip := range s.Spec.ClusterIPs {
		field := fmt.Sprintf("spec.clusterIPs[%d]", i)
		switch a, err := netip.ParseAddr(ip); {
		case s.headless():
		case err != nil:
			bad(field, fmt.Sprintf("%q", ip), "is not an address")
		case i >= len(s.Spec.IPFamilies) || familyOf(a) != s.Spec.IPFamilies[i]:
			bad(field, ip, "does not fit spec.ipFamilies")
		}
	}
	return errors.Join(errs...)
}

func (s *service) wantsNodePorts() bool {
	return s.Spec.Type == corev1.ServiceTypeNodePort ||
		s.Spec.Type == corev1.ServiceTypeLoadBalancer && ptr.Deref(s.Spec.AllocateLoadBalancerNodePorts, true)
}

func (s *service) wantsHealthCheck() bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}
