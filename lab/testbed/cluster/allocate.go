package cluster

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

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

// pool hands out values. An object that had a value gets it again.
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

// take gives away a value that an object asks for.
func (p *pool[T]) take(v T, who string) error {
	if owner := p.owner[v]; owner != "" {
		return fmt.Errorf("%v is that of %s", v, owner)
	}
	p.owner[v] = who
	return nil
}

// get allocates what who (a user) had before, or else the first free candidate.
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

// release takes back all values of an object.
func (p *pool[T]) release(whose func(who string) bool) {
	maps.DeleteFunc(p.owner, func(_ T, who string) bool { return whose(who) })
}

// allocate does for Services what the API server and a cloud do. Values that Services ask for come first. A Service
// that the API server would refuse is left out.
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

// claim takes the addresses and ports that a Service asks for, all or none. Those of load balancers
// may be shared.
func (a *allocations) claim(s *service) error {
	if s.Spec.Type == corev1.ServiceTypeExternalName || s.headless() {
		return nil
	}
	var errs []error
	for _, addr := range s.clusterIPs() {
		errs = append(errs, a.addrs.take(addr, s.user("cluster IP", familyOf(addr))))
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 && s.external() {
			errs = append(errs, a.nodePorts.take(nodePort{p.Protocol, p.NodePort}, s.user("node port", p.Port, p.Protocol)))
		}
	}
	if port := s.Spec.HealthCheckNodePort; port != 0 && s.wantsHealthCheck() {
		errs = append(errs, a.nodePorts.take(nodePort{corev1.ProtocolTCP, port}, s.user("health check node port")))
	}
	err := errors.Join(errs...)
	if err != nil {
		own := func(who string) bool { return strings.HasPrefix(who, s.user()) }
		a.addrs.release(own)
		a.nodePorts.release(own)
		return err
	}
	for _, addr := range s.loadBalancers() {
		_ = a.addrs.take(addr, s.user("load balancer", familyOf(addr))) // or share it
	}
	return nil
}

// user is the owner of an address or port: a use that a Service makes of it.
func (s *service) user(use ...any) string {
	return s.key() + ": " + strings.TrimSuffix(fmt.Sprintln(use...), "\n")
}

// fill allocates what is still missing.
func (a *allocations) fill(s *service) error {
	if s.Spec.Type == corev1.ServiceTypeExternalName || s.headless() {
		return nil
	}
	addrs, err := a.fillAddrs(s, s.clusterIPs(), "cluster IP", testbed.ServiceCIDRs())
	if err != nil {
		return err
	}
	s.setClusterIPs(addrs)
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

// balance is the cloud: a load balancer gets an address of each of the Service's families.
func (a *allocations) balance(s *service) error {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	have := s.loadBalancers()
	addrs, err := a.fillAddrs(s, have, "load balancer", testbed.LoadBalancerCIDRs())
	for _, addr := range addrs[len(have):] {
		s.addIngress(addr)
	}
	return err
}

// fillAddrs adds an address of each of the Service's families that those it has are not of.
func (a *allocations) fillAddrs(s *service, have []netip.Addr, use string, from []netip.Prefix) ([]netip.Addr, error) {
	addrs := slices.Clone(have)
	for _, family := range s.Spec.IPFamilies {
		if addrOf(addrs, family).IsValid() {
			continue
		}
		addr, err := a.addrs.get(s.user(use, family), func(yield func(netip.Addr) bool) {
			twin := addrOf(addrs, corev1.IPv4Protocol)
			if family != corev1.IPv6Protocol || !twin.IsValid() || yield(testbed.EmbedV6(twin)) {
				candidates(from, family)(yield)
			}
		})
		if err != nil {
			return addrs, err
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// candidates are the addresses of a range in their order. The first hundred are left to Services
// that ask for one.
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
// its beginning to Services that ask for one.
func (a *allocations) fillNodePort(protocol corev1.Protocol, user string) (int32, error) {
	p, err := a.nodePorts.get(user, func(yield func(nodePort) bool) {
		for port := int32(30100); port <= 32767 && yield(nodePort{protocol, port}); port++ {
		}
	})
	return p.port, err
}
