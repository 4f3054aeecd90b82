package bench

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/addrs"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/testbed"
	"fairlead.dev/fairlead/testbed/kubernetes"
)

// roleVariable makes this program another one: Fairlead with plane ipvs.
const roleVariable = "FAIRLEAD_BENCH_ROLE"

// playRole does not return if there is a role. The parts are put together as the daemon does it.
func playRole() {
	if os.Getenv(roleVariable) == "" {
		return
	}
	err := fmt.Errorf("no kubeconfig among %q", os.Args)
	for _, arg := range os.Args {
		if file, is := strings.CutPrefix(arg, "--kubeconfig="); is {
			err = serveIPVS(file)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func serveIPVS(kubeconfig string) error {
	debug.SetGCPercent(50) // as fairlead run
	client, err := kube.Connect(kube.ClientOptions{Kubeconfig: kubeconfig})
	if err != nil {
		return err
	}
	interfaces, err := addrs.New()
	if err != nil {
		return err
	}
	plane, err := localhost.WrapBoth(conntrack.Wrap(ipvs.New(ipvs.Options{})))(dataplane.Config{})
	if err != nil {
		return err
	}
	options := tableOptions()
	options.NodePortAddresses = []string{"primary"}
	table, err := service.NewTable(options)
	if err != nil {
		return err
	}
	e := engine.New(engine.Options{
		Source: source.Merge(client.Source(string(testbed.Node)), interfaces), Table: table, Plane: plane, MaxRest: time.Second,
	})
	return e.Run(context.Background())
}

// stock is an API server with a number of Services, and more of which it has only the endpoints so far: so that a
// Service is added by a single event.
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
	s := c.slice(i)
	s.Namespace = metav1.NamespaceDefault
	s.Endpoints = s.Endpoints[:ipvsEndpoints]
	for j, e := range endpointsOf(i, ipvsEndpoints) {
		s.Endpoints[j].Addresses = []string{e.AddrPort.Addr().String()}
	}
	return s
}
