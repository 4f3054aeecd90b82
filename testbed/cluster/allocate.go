package cluster

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// service is a Service on its way through the API server.
type service struct {
	object
	corev1.Service
	pods  []*pod                       // that it selects
	given []*discoveryv1.EndpointSlice // by the manifests, if it selects none
}

func (s *service) headless() bool { return s.Spec.ClusterIP == corev1.ClusterIPNone }

// selects reports whether a pod is an endpoint of the Service.
func (s *service) selects(p *pod) bool {
	if len(s.Spec.Selector) == 0 || p.namespace != s.object.namespace {
		return false
	}
	for k, v := range s.Spec.Selector {
		if value, ok := p.labels[k]; !ok || value != v {
			return false
		}
	}
	return true
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

// allocations are the addresses and ports that Services have, and had in the Apply before.
type allocations struct {
	addrs     pool[netip.Addr]
	nodePorts pool[nodePort]
}

// nodePort is a port of all nodes. A health check's protocol is TCP.
type nodePort struct {
	protocol corev1.Protocol
	port     int32
}

func (p nodePort) String() string { return fmt.Sprintf("node port %d/%s", p.port, p.protocol) }

// pool hands out values. Whoever had one gets it again.
type pool[T comparable] struct {
	owner map[T]string
	had   map[string]T
	kept  map[T]bool // the values of had: not for others
}

// next is the pool of the next Apply.
func (p pool[T]) next() pool[T] {
	n := pool[T]{map[T]string{}, map[string]T{}, map[T]bool{}}
	for v, who := range p.owner {
		n.had[who], n.kept[v] = v, true
	}
	return n
}

// take gives away a value that somebody asks for by name.
func (p *pool[T]) take(v T, who string) error {
	if owner := p.owner[v]; owner != "" {
		return fmt.Errorf("%v is that of %s", v, owner)
	}
	p.owner[v] = who
	return nil
}

// get gives away what who had, or else the first free candidate.
func (p *pool[T]) get(who string, candidates iter.Seq[T]) (T, error) {
	if v, ok := p.had[who]; ok && p.owner[v] == "" {
		p.owner[v] = who
		return v, nil
	}
	for v := range candidates {
		if p.owner[v] == "" && !p.kept[v] {
			p.owner[v] = who
			return v, nil
		}
	}
	var none T
	return none, fmt.Errorf("nothing is left for %s", who)
}

// allocate does for Services what the API server and a cloud do. What Services ask for comes first.
// A Service that the API server would refuse is left out.
func (a *allocations) allocate(in []*service, report reporter) []*service {
	a.addrs, a.nodePorts = a.addrs.next(), a.nodePorts.next()
	pass := func(in []*service, f func(*service) error) []*service {
		return slices.DeleteFunc(slices.Clone(in), func(s *service) bool {
			err := f(s)
			if err != nil {
				report(s.object, err)
			}
			return err != nil
		})
	}
	return pass(pass(pass(in, (*service).complete), a.claim), a.fill)
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
	setDefault(&s.Spec.Type, corev1.ServiceTypeClusterIP)
	setDefault(&s.Spec.SessionAffinity, corev1.ServiceAffinityNone)
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		setDefault(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort.IntVal == 0 && p.TargetPort.StrVal == "" {
			p.TargetPort.IntVal = p.Port
		}
	}
	if s.external() {
		setDefault(&s.Spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "" {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
	if len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	}
	s.setFamilies()
}

func setDefault[T ~string](value *T, fallback T) {
	if *value == "" {
		*value = fallback
	}
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

// claim takes the addresses and ports that a Service asks for. Load balancers' may be shared.
func (a *allocations) claim(s *service) error {
	if s.Spec.Type == corev1.ServiceTypeExternalName || s.headless() {
		return nil
	}
	var errs []error
	for i, ip := range s.Spec.ClusterIPs {
		errs = append(errs, a.addrs.take(netip.MustParseAddr(ip), s.user("cluster IP", s.Spec.IPFamilies[i])))
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 && s.external() {
			errs = append(errs, a.nodePorts.take(nodePort{p.Protocol, p.NodePort}, s.user("node port", p.Port, p.Protocol)))
		}
	}
	if port := s.Spec.HealthCheckNodePort; port != 0 && s.wantsHealthCheck() {
		errs = append(errs, a.nodePorts.take(nodePort{corev1.ProtocolTCP, port}, s.user("health check node port")))
	}
	return errors.Join(errs...)
}

// user is who has an address or port: a use that a Service makes of it.
func (s *service) user(use ...any) string {
	return s.key() + ": " + strings.TrimSpace(fmt.Sprintln(use...))
}

// fill allocates what is still missing.
func (a *allocations) fill(s *service) error {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		s.Status = corev1.ServiceStatus{}
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName || s.headless() {
		return nil
	}
	var err error
	s.Spec.ClusterIPs, err = a.fillAddrs(s, s.Spec.ClusterIPs, "cluster IP", testbed.ServiceCIDRs())
	if err != nil {
		return err
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	for i := range s.Spec.Ports {
		if p := &s.Spec.Ports[i]; p.NodePort == 0 && s.wantsNodePorts() {
			if p.NodePort, err = a.fillNodePort(p.Protocol, s.user("node port", p.Port, p.Protocol)); err != nil {
				return err
			}
		}
	}
	if s.wantsHealthCheck() && s.Spec.HealthCheckNodePort == 0 {
		s.Spec.HealthCheckNodePort, err = a.fillNodePort(corev1.ProtocolTCP, s.user("health check node port"))
		if err != nil {
			return err
		}
	}
	return a.balance(s)
}

// balance is the cloud: a load balancer gets an address of each of the Service's families. Addresses
// that the manifest names stay; host names, which another cloud gave, go.
func (a *allocations) balance(s *service) error {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(s.loadBalancers()) > 0 {
		return nil
	}
	var have []string
	if addr, err := netip.ParseAddr(s.Spec.LoadBalancerIP); err == nil && familyOf(addr) == s.Spec.IPFamilies[0] {
		have = []string{addr.String()}
	}
	addrs, err := a.fillAddrs(s, have, "load balancer", testbed.LoadBalancerCIDRs())
	if err != nil {
		return err
	}
	vip := corev1.LoadBalancerIPModeVIP
	s.Status.LoadBalancer.Ingress = nil
	for _, addr := range addrs {
		ingress := corev1.LoadBalancerIngress{IP: addr, IPMode: &vip}
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
	}
	return nil
}

// fillAddrs completes the addresses for a use to one for each of the Service's families.
func (a *allocations) fillAddrs(s *service, have []string, use string, from []netip.Prefix) ([]string, error) {
	addrs := slices.Clone(have)
	for i := len(have); i < len(s.Spec.IPFamilies); i++ {
		family := s.Spec.IPFamilies[i]
		addr, err := a.addrs.get(s.user(use, family), func(yield func(netip.Addr) bool) {
			if i > 0 && family == corev1.IPv6Protocol && !yield(testbed.EmbedV6(netip.MustParseAddr(addrs[0]))) {
				return
			}
			candidates(from, family)(yield)
		})
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, addr.String())
	}
	return addrs, nil
}

// candidates are the addresses of a range in their order. The first hundred are left to those who
// ask by name.
func candidates(from []netip.Prefix, family corev1.IPFamily) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		first := from[0].Addr().As4()
		first[3] = 100
		for addr := netip.AddrFrom4(first); from[0].Contains(addr.Next()); addr = addr.Next() {
			next := addr
			if family == corev1.IPv6Protocol {
				next = testbed.EmbedV6(addr)
			}
			if !yield(next) {
				return
			}
		}
	}
}

// fillNodePort allocates a port from the range that an API server has by default; it, too, leaves
// its beginning to those who ask by name.
func (a *allocations) fillNodePort(protocol corev1.Protocol, user string) (int32, error) {
	p, err := a.nodePorts.get(user, func(yield func(nodePort) bool) {
		for port := int32(30100); port <= 32767 && yield(nodePort{protocol, port}); port++ {
		}
	})
	return p.port, err
}

func (s *service) wantsNodePorts() bool {
	allocate := s.Spec.AllocateLoadBalancerNodePorts
	return s.Spec.Type == corev1.ServiceTypeNodePort ||
		s.Spec.Type == corev1.ServiceTypeLoadBalancer && (allocate == nil || *allocate)
}

func (s *service) wantsHealthCheck() bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// loadBalancers are the addresses that the Service's load balancer has.
func (s *service) loadBalancers() []netip.Addr {
	var addrs []netip.Addr
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(ingress.IP); err == nil {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}
