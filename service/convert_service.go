package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

// proxyNameLabel on a Service says that another proxy handles it.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// NoClusterIP is why a Service is ignored to which no API server has given an address.
const NoClusterIP = "it has no usable clusterIP (yet)"

// FromService validates a Service and keeps what matters. Whatever is wrong in it is left out and
// named; the rest lives on. A Service that is none of our business comes back with Ignored set.
func FromService(o *corev1.Service) (*Service, []Problem) {
	c := serviceReader{report: report{kind: "Service"}, from: o, to: &Service{Created: o.CreationTimestamp.UnixMicro()}}
	c.to.Name = c.name(&o.ObjectMeta)
	c.clusterIPs()
	c.ports()
	c.loadBalancerIPs()
	c.externalIPs()
	c.sourceRanges()
	c.policies()
	c.affinity()
	c.scheduler()
	c.health()
	c.to.Barrier = c.word(barrierAnnotation, "false is assumed", "false", "true") == "true"
	c.to.Hooked = c.word(flowtableAnnotation, "the setting flowtable holds", "off") == "off"
	c.rebalance()
	c.to.Preserve = o.Annotations[preserveAnnotation] == "true"
	if c.to.Ignored = notOurs(o); c.to.Ignored != "" {
		return c.to, nil
	}
	if len(c.to.ClusterIPs) == 0 {
		c.to.Ignored = NoClusterIP
	}
	if !label(c.to.Name.Namespace) || !label(c.to.Name.Name) {
		c.to.Ignored = "its name is invalid"
		c.add("metadata.name", "is not a DNS label; the Service is ignored")
	}
	return c.to, c.done()
}

// notOurs says why a Service is no concern of this proxy, whatever else it says.
func notOurs(o *corev1.Service) string {
	proxy, labelled := o.Labels[proxyNameLabel]
	switch {
	case labelled:
		return fmt.Sprintf("it is handled by another proxy: label %s=%.63q", proxyNameLabel, proxy)
	case o.Spec.Type == corev1.ServiceTypeExternalName:
		return "its type is ExternalName, which concerns DNS only"
	case o.Spec.ClusterIP == corev1.ClusterIPNone || slices.Contains(o.Spec.ClusterIPs, corev1.ClusterIPNone):
		return "it is headless (clusterIP: None), clients talk to its endpoints themselves"
	}
	return ""
}

// serviceReader takes a Service apart.
type serviceReader struct {
	report
	from *corev1.Service
	to   *Service

	names   map[string]struct{}   // of its ports so far, if it has several
	numbers map[portNumber]string // and whose they are
}

// portNumber is a number that one port of a Service has.
type portNumber struct {
	number   uint16
	protocol model.Protocol
	node     bool // it is a NodePort
}

// clusterIPs takes one address for each family. Old objects have only the first, in a field of its own.
func (c *serviceReader) clusterIPs() {
	for i, text := range c.from.Spec.ClusterIPs {
		c.clusterIP(index("spec.clusterIPs", i), text, i)
	}
	if len(c.from.Spec.ClusterIPs) == 0 && c.from.Spec.ClusterIP != "" {
		c.clusterIP("spec.clusterIP", c.from.Spec.ClusterIP, 0)
	}
}

// clusterIP adds the i-th address, whose family must be the i-th of ipFamilies.
func (c *serviceReader) clusterIP(field, text string, i int) {
	families := c.from.Spec.IPFamilies
	switch a, ok := c.addr(field, text); {
	case !ok:
	case hasFamily(c.to.ClusterIPs, a):
		c.add(field, "%s is a second address of its family; it is left out", a)
	case i < len(families) && families[i] != family(a):
		c.add(field, "%s is not of the family %s that spec.ipFamilies names; it is left out", a, families[i])
	default:
		c.to.ClusterIPs = append(c.to.ClusterIPs, a)
	}
}

func family(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func (c *serviceReader) ports() {
	if n := len(c.from.Spec.Ports); n > 1 {
		c.names, c.numbers = make(map[string]struct{}, n), make(map[portNumber]string, 2*n)
		c.to.Ports = make([]Port, 0, n)
	}
	for i := range c.from.Spec.Ports {
		if p, ok := c.port(index("spec.ports", i), &c.from.Spec.Ports[i]); ok {
			c.to.Ports = append(c.to.Ports, p)
		}
	}
}

func (c *serviceReader) port(field string, o *corev1.ServicePort) (Port, bool) {
	protocol, ok := c.protocol(field+".protocol", string(o.Protocol))
	number, ok2 := c.report.port(field+".port", o.Port)
	if !ok || !ok2 {
		return Port{}, false
	}
	p := Port{Name: intern(o.Name), Protocol: protocol, Port: number}
	switch {
	case p.Name == "" && len(c.from.Spec.Ports) > 1:
		c.add(field+".name", "is empty, but there are several ports; the port is left out")
		return p, false
	case p.Name != "" && !label(p.Name):
		c.add(field+".name", "%.40q is not a DNS label; the port is left out", p.Name)
		return p, false
	}
	if _, ok := c.names[p.Name]; ok {
		c.add(field+".name", "%q is the name of an earlier port too; the port is left out", p.Name)
		return p, false
	}
	if name, ok := c.numbers[portNumber{p.Port, protocol, false}]; ok {
		c.add(field, "%d/%s is port %q already; the port is left out", p.Port, p.Protocol, name)
		return p, false
	}
	p.NodePort = c.nodePort(field+".nodePort", o.NodePort, protocol)
	if len(c.from.Spec.Ports) > 1 {
		c.names[p.Name] = struct{}{}
		c.numbers[portNumber{p.Port, protocol, false}] = p.Name
		c.numbers[portNumber{p.NodePort, protocol, true}] = p.Name
	}
	return p, true
}

// nodePort is 0 if there is none, or none that can be used.
func (c *serviceReader) nodePort(field string, number int32, protocol model.Protocol) uint16 {
	if number == 0 {
		return 0
	}
	port, ok := c.report.port(field, number)
	if name, taken := c.numbers[portNumber{port, protocol, true}]; ok && taken {
		c.add(field, "%d/%s is the NodePort of port %q already; it is left out", port, protocol, name)
		return 0
	}
	return port
}

// loadBalancerIPs takes the addresses whose packets reach the node unchanged. Those of ipMode Proxy
// (KEP-1860) are left to the load balancer.
func (c *serviceReader) loadBalancerIPs() {
	for i, in := range c.from.Status.LoadBalancer.Ingress {
		if in.IP == "" || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
			continue
		}
		if a, ok := c.external(index("status.loadBalancer.ingress", i)+".ip", in.IP); ok {
			c.to.LoadBalancerIPs = append(c.to.LoadBalancerIPs, a)
		}
	}
	c.to.LoadBalancerIPs = different(c.to.LoadBalancerIPs)
}

// externalIPs leaves out what is a load balancer's address too: the source ranges hold there.
func (c *serviceReader) externalIPs() {
	for i, text := range c.from.Spec.ExternalIPs {
		field := index("spec.externalIPs", i)
		if _, plain := c.plainAddr(field, text); !plain {
			continue
		}
		if a, ok := c.external(field, text); ok && !has(c.to.LoadBalancerIPs, a) {
			c.to.ExternalIPs = append(c.to.ExternalIPs, a)
		}
	}
	c.to.ExternalIPs = different(c.to.ExternalIPs)
}

// external reads an address. Endpoints serve addresses of their own family only, and a Service without a ClusterIP of a
// family has no endpoints of that family.
func (c *serviceReader) external(field, text string) (netip.Addr, bool) {
	a, ok := c.addr(field, text)
	switch {
	case !ok:
	case slices.Contains(c.to.ClusterIPs, a):
		c.add(field, "%s is the Service's ClusterIP; it is left out here", a)
		return a, false
	case len(c.to.ClusterIPs) > 0 && !hasFamily(c.to.ClusterIPs, a):
		c.add(field, "the Service has no ClusterIP of the family %s; %s is left out", family(a), a)
		return a, false
	}
	return a, ok
}

// different sorts addresses, and leaves one of each.
func different(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// has reports whether an address is among sorted ones.
func has(sorted []netip.Addr, a netip.Addr) bool {
	_, ok := slices.BinarySearchFunc(sorted, a, netip.Addr.Compare)
	return ok
}

// sourceRanges makes explicit that a family which no range names is open, as it is with kube-proxy.
// Where kube-proxy would also open a family whose ranges it cannot read, it stays closed here.
func (c *serviceReader) sourceRanges() {
	texts := c.from.Spec.LoadBalancerSourceRanges
	if len(texts) == 0 {
		return
	}
	ranges := c.prefixes("spec.loadBalancerSourceRanges", texts)
	if len(ranges) == len(texts) {
		ranges = withOpenFamilies(ranges)
	}
	c.to.SourceRanges = model.Disjoint(ranges)
}

// everyone is the whole of each family.
func everyone() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// withOpenFamilies adds the whole of each family that no prefix is of.
func withOpenFamilies(prefixes []netip.Prefix) []netip.Prefix {
	for _, all := range everyone() {
		if !slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr().Is4() == all.Addr().Is4() }) {
			prefixes = append(prefixes, all)
		}
	}
	return prefixes
}

func (c *serviceReader) policies() {
	spec := &c.from.Spec
	switch spec.Type {
	case "", corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeExternalName:
	default:
		c.add("spec.type", "%.40q is none of ClusterIP, NodePort, LoadBalancer and ExternalName; ClusterIP is assumed",
			spec.Type)
	}
	if spec.InternalTrafficPolicy != nil {
		c.to.InternalLocal = c.local("spec.internalTrafficPolicy", string(*spec.InternalTrafficPolicy))
	}
	external := spec.Type == corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeNodePort ||
		len(spec.ExternalIPs) > 0
	c.to.ExternalLocal = external && c.local("spec.externalTrafficPolicy", string(spec.ExternalTrafficPolicy))
	c.externalFailover()
	if c.to.ExternalLocal && spec.Type == corev1.ServiceTypeLoadBalancer && spec.HealthCheckNodePort != 0 {
		c.to.HealthCheckNodePort = c.healthCheckNodePort("spec.healthCheckNodePort")
	}
}

// failoverAnnotation stands for spec.externalFailoverPolicy (KEP-6272), which the API does not have yet.
const failoverAnnotation = "fairlead.dev/external-failover-policy" // None or Passthrough

func (c *serviceReader) externalFailover() {
	passes := c.word(failoverAnnotation, "None is assumed", "None", "Passthrough") == "Passthrough"
	if c.to.Passthrough = passes && c.to.ExternalLocal; passes && !c.to.ExternalLocal {
		c.add(annotation(failoverAnnotation), "needs externalTrafficPolicy Local; it has no effect")
	}
}

// flowtableAnnotation has each packet of a Service's connections pass the hooks, where policies look at it.
const flowtableAnnotation = "fairlead.dev/flowtable" // off, or what is configured

// rebalanceAnnotation has connections closed that are idle for so long, where endpoints that came later have too few.
const rebalanceAnnotation = "fairlead.dev/rebalance"

const minRebalance, maxRebalance = 2 * time.Second, time.Hour

// rebalance reads the annotation. Of connections that go past the hooks it is not known how long they are idle.
func (c *serviceReader) rebalance() {
	text, ok := c.from.Annotations[rebalanceAnnotation]
	d, err := time.ParseDuration(strings.TrimSpace(text))
	switch {
	case !ok:
	case err != nil || d < minRebalance || d > maxRebalance:
		c.add(annotation(rebalanceAnnotation), "%.40q is no time from %s to %s; connections stay where they are", text,
			minRebalance, maxRebalance)
	case c.to.Affinity > 0:
		c.add(annotation(rebalanceAnnotation), "has no effect: with sessionAffinity clients come back to their endpoints")
	default:
		c.to.Rebalance, c.to.Hooked = d, true
	}
}

// word is that of an annotation, if it is one of some; empty: it is not.
func (c *serviceReader) word(name, otherwise string, words ...string) string {
	text, ok := c.from.Annotations[name]
	if i := slices.Index(words, text); i >= 0 {
		return words[i]
	}
	if ok {
		c.add(annotation(name), "%.40q is not %s; %s", text, strings.Join(words, " or "), otherwise)
	}
	return ""
}

func (c *serviceReader) healthCheckNodePort(field string) uint16 {
	port, ok := c.report.port(field, c.from.Spec.HealthCheckNodePort)
	if ok && slices.ContainsFunc(c.to.Ports, func(p Port) bool { return p.NodePort == port && p.Protocol == model.TCP }) {
		c.add(field, "%d is a NodePort of the Service too; there is no health check", port)
		return 0
	}
	return port
}

// local reads a traffic policy; the default is Cluster.
func (c *serviceReader) local(field, policy string) bool {
	if policy != "" && policy != "Cluster" && policy != "Local" {
		c.add(field, "%.40q is neither Cluster nor Local; Cluster is assumed", policy)
	}
	return policy == "Local"
}

func (c *serviceReader) affinity() {
	switch kind := c.from.Spec.SessionAffinity; kind {
	case "", corev1.ServiceAffinityNone:
	case corev1.ServiceAffinityClientIP:
		c.to.Affinity = time.Duration(c.affinityTimeout()) * time.Second
	default:
		c.add("spec.sessionAffinity", "%.40q is neither None nor ClientIP; None is assumed", kind)
	}
}

// affinityTimeout is in seconds: one day at most, three hours if nothing sensible is said.
func (c *serviceReader) affinityTimeout() int32 {
	config := c.from.Spec.SessionAffinityConfig
	if config == nil || config.ClientIP == nil || config.ClientIP.TimeoutSeconds == nil {
		return corev1.DefaultClientIPServiceAffinitySeconds
	}
	if seconds := *config.ClientIP.TimeoutSeconds; seconds >= 1 && seconds <= 86400 {
		return gridded(seconds)
	}
	c.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not in 1-86400; %d is assumed",
		*config.ClientIP.TimeoutSeconds, corev1.DefaultClientIPServiceAffinitySeconds)
	return corev1.DefaultClientIPServiceAffinitySeconds
}

// gridded rounds a timeout up, by less than 2 %, so that there are no more than 1,920 different ones. Planes need an
// object in the kernel for each, and tenants decide how many there are.
func gridded(seconds int32) int32 {
	step := int32(1)
	switch {
	case seconds > 7200:
		step = 120
	case seconds > 600:
		step = 10
	}
	return (seconds + step - 1) / step * step
}
