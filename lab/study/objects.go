package study

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/testbed"
)

const (
	// ServicePort is that of all Services.
	ServicePort = 80
	// MostServices is how many addresses there are for them.
	MostServices = 1_000_000
	// BackendPort is where the server listens; with Cluster.OwnPorts it is the first of its ports.
	BackendPort = 8080
	// firstNodePort is that of the first Service, if they have any.
	firstNodePort = 30000
	// sliceEndpoints is how many endpoints the endpoint slice controller puts into one.
	sliceEndpoints = 100
)

// Service is the address of the i-th one, or where there is no proxy that of its first backend.
func (s *Site) Service(i int) netip.AddrPort {
	if !s.Proxied() {
		return s.Backend(i, 0)
	}
	if target, ok := s.target(i); ok {
		addr, _ := tcpAddr(target)
		return addr
	}
	return netip.AddrPortFrom(s.clusterIP(i), ServicePort)
}

// Targets are where clients of the i-th Service connect to: its address, or where there is no proxy all its backends.
func (s *Site) Targets(i int) []netip.AddrPort {
	if s.Proxied() {
		return []netip.AddrPort{s.Service(i)}
	}
	var all []netip.AddrPort
	for j := range s.Endpoints {
		all = append(all, s.Backend(i, j))
	}
	return all
}

// NodePort is the i-th Service's on the node, or where there is no proxy the address of its first backend. It is for
// clients in testbed.Outside.
func (s *Site) NodePort(i int) netip.AddrPort {
	if !s.Proxied() {
		return s.Backend(i, 0)
	}
	return netip.AddrPortFrom(s.Bed.Addr(testbed.Node, false), uint16(firstNodePort+i))
}

// Backend is an endpoint of the i-th Service. Services share addresses when there are too many.
func (c Cluster) Backend(i, endpoint int) netip.AddrPort {
	most := 1<<(32-backendRange().Bits()) - 2
	if c.OwnPorts {
		return netip.AddrPortFrom(nth(backendRange().Addr(), 1+i%most), uint16(BackendPort+endpoint))
	}
	return netip.AddrPortFrom(nth(backendRange().Addr(), 1+(i*c.Endpoints+endpoint)%most), BackendPort)
}

// backendRange are addresses of pods that none of the testbed's own pods has.
func backendRange() netip.Prefix { return netip.MustParsePrefix("10.244.64.0/18") }

// clientRange are addresses of the client's pod, as if it were many.
func clientRange() netip.Prefix { return netip.MustParsePrefix("10.244.128.0/24") }

// serviceRange is kubeadm's, which has room for a million.
func (c Cluster) serviceRange() netip.Prefix {
	if c.own != nil {
		return c.own.freeRange()
	}
	return netip.MustParsePrefix("10.96.0.0/12")
}

// clusterIP is the address of a generated Service.
func (c Cluster) clusterIP(i int) netip.Addr { return nth(c.serviceRange().Addr(), i+10) }

// nth is the n-th address after an IPv4 address.
func nth(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	n += int(b[0])<<24 | int(b[1])<<16 | int(b[2])<<8 | int(b[3])
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// objects are what the API server has.
func (c Cluster) objects() []runtime.Object {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	n.Spec.PodCIDR = testbed.PodCIDRs(testbed.Node)[0].String()
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddr().String()}}
	all := []runtime.Object{n}
	generated := c.Services
	if c.own == nil {
		ranges := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
		ranges.Spec.CIDRs = []string{c.serviceRange().String(), testbed.ServiceCIDRs()[1].String()}
		all = append(all, ranges)
	} else if all = append(all, c.own.objects(c.theirs)...); c.theirs {
		generated = 0
		for _, i := range c.first() {
			all = append(all, c.sliceObjects(i)...)
		}
	}
	for i := range generated {
		all = append(append(all, c.service(i)), c.sliceObjects(i)...)
	}
	return all
}

func (c Cluster) sliceObjects(i int) (all []runtime.Object) {
	for _, slice := range c.slices(i) {
		all = append(all, slice)
	}
	return all
}

// nodeAddr is that of testbed.Node, see testbed.Bed.Addr.
func nodeAddr() netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, 1}) }

func serviceName(i int) string { return fmt.Sprintf("svc-%d", i) }

// service is as the API server has completed it.
func (c Cluster) service(i int) *corev1.Service {
	if target, ok := c.target(i); ok {
		return target.DeepCopy()
	}
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: serviceName(i)}}
	o.Spec.Type, o.Spec.ClusterIP = corev1.ServiceTypeClusterIP, c.clusterIP(i).String()
	o.Spec.ClusterIPs = []string{o.Spec.ClusterIP}
	o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	o.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	o.Spec.SessionAffinity = corev1.ServiceAffinityNone
	o.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	o.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Port: ServicePort, Protocol: corev1.ProtocolTCP}}
	if c.NodePorts {
		o.Spec.Type, o.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyCluster
		o.Spec.Ports[0].NodePort = int32(firstNodePort + i)
	}
	return o
}

// slices are as the endpoint slice controller makes them.
func (c Cluster) slices(i int) (all []*discoveryv1.EndpointSlice) {
	most := c.sliceEndpoints()
	for first := 0; first == 0 || first < c.Endpoints; first += most {
		slice := c.newSlice(i, first)
		for j := first; j < min(first+most, c.Endpoints); j++ {
			at := c.Backend(i, j)
			for n := range slice.Ports {
				slice.Ports[n].Port = new(int32(at.Port()))
			}
			slice.Endpoints = append(slice.Endpoints, readyEndpoint(at.Addr()))
		}
		all = append(all, slice)
	}
	return all
}

// sliceEndpoints is how many endpoints are in a slice: all of one have the same port.
func (c Cluster) sliceEndpoints() int {
	if c.OwnPorts {
		return 1
	}
	return sliceEndpoints
}

// newSlice is one of a Service's, which begins with an endpoint but has none.
func (c Cluster) newSlice(i, first int) *discoveryv1.EndpointSlice {
	service := serviceName(i)
	name := service
	if first > 0 {
		name = fmt.Sprintf("%s-%d", service, first)
	}
	o := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("tcp"), Port: new(int32(BackendPort)), Protocol: new(corev1.ProtocolTCP)},
		},
	}
	if target, ok := c.target(i); ok {
		service, o.Namespace, o.Ports = target.Name, target.Namespace, nil
		o.Name = fmt.Sprintf("fairlead-%s-%d", service, first)
		for _, p := range target.Spec.Ports {
			if p.Protocol == corev1.ProtocolTCP || p.Protocol == "" {
				o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: new(p.Name), Protocol: new(corev1.ProtocolTCP)})
			}
		}
	}
	o.Labels = map[string]string{
		discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
	}
	return o
}

// slice is the first one of a Service's.
func (c Cluster) slice(i int) *discoveryv1.EndpointSlice { return c.slices(i)[0] }
