package bench

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// stock is an API server with a number of Services, and with the endpoints only of further ones. So a single event adds
// a Service.
type stock struct {
	*kubernetes.Catalog
	next int
}

func newStock(services, more int) (*stock, error) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	node.Spec.PodCIDR = testbed.PodCIDRs(testbed.Node)[0].String()
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
	ranges := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
	for _, p := range testbed.ServiceCIDRs() {
		ranges.Spec.CIDRs = append(ranges.Spec.CIDRs, p.String())
	}
	objects := []runtime.Object{node, ranges}
	var c cluster // of objects as others have them
	for i := range services + more {
		objects = append(objects, stockSlice(&c, i))
		if i < services {
			objects = append(objects, stockService(&c, i))
		}
	}
	catalog, err := kubernetes.NewCatalog(objects...)
	return &stock{Catalog: catalog, next: services}, err
}

// another is a Service that was not there yet.
func (s *stock) another() (i int, o *corev1.Service) {
	i = s.next
	s.next++
	return i, stockService(nil, i)
}

// stockService is as the API server has completed it.
func stockService(c *cluster, i int) *corev1.Service {
	s := c.service(i)
	s.Namespace = metav1.NamespaceDefault
	s.Spec.Type, s.Spec.ClusterIPs = corev1.ServiceTypeClusterIP, []string{s.Spec.ClusterIP}
	s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = []corev1.IPFamily{corev1.IPv4Protocol}, new(corev1.IPFamilyPolicySingleStack)
	s.Spec.SessionAffinity, s.Spec.InternalTrafficPolicy = corev1.ServiceAffinityNone, new(corev1.ServiceInternalTrafficPolicyCluster)
	return s
}

// stockSlice leads to addresses of the arena's server.
func stockSlice(c *cluster, i int) *discoveryv1.EndpointSlice {
	s := c.slice(i, c.addrs(i))
	s.Namespace = metav1.NamespaceDefault
	s.Endpoints = s.Endpoints[:ipvsEndpoints]
	for j, e := range endpointsOf(i, ipvsEndpoints) {
		s.Endpoints[j].Addresses = []string{e.Addr.String()}
	}
	return s
}
