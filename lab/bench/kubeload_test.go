package bench

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	clientset "k8s.io/client-go/kubernetes"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// cluster is a real API server with a number of Services. Some of them, evenly spread, are probed: they have one
// endpoint, which accepts connections or refuses them. The others have endpoints of their own at unused addresses.
type cluster struct {
	plane    *kubernetes.ControlPlane
	client   *clientset.Clientset
	services int
	open     map[int]bool // the probed Services
	others   int          // which of the others is changed next
	cgroup   bool         // nodes have one
}

const (
	probedServices = 300
	perService     = 10

	clientPod, openPod, shutPod = "client", "open", "shut"
)

// newCluster fills an API server with Services, some of them probed.
func newCluster(b *testing.B, n int) *cluster {
	b.Helper()
	open := map[int]bool{}
	probed := max(2, min(probedServices, n/2))
	for j := range probed {
		open[j*(n-1)/(probed-1)] = true
	}
	return newClusterOf(b, n, open)
}

func newClusterOf(b *testing.B, n int, open map[int]bool) *cluster {
	b.Helper()
	ctx := b.Context()
	plane, err := kubernetes.Start(ctx, kubernetes.Options{
		Parts: kubernetes.NeedParts(b), Controllers: []string{},
		APIServerArgs: []string{"--service-cluster-ip-range=10.96.0.0/12,fd00::a60:0/108"}, // in place of the testbed's, which are small
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := plane.Close(); err != nil {
			b.Error(err)
		}
	})
	config := plane.Config()
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := clientset.NewForConfig(config)
	if err != nil {
		b.Fatal(err)
	}
	c := &cluster{plane: plane, client: client, services: n, open: open}
	begin := time.Now()
	if err := c.fill(ctx); err != nil {
		b.Fatal(err)
	}
	progress("%d Services × %d endpoints were created in %v", n, perService, time.Since(begin).Round(time.Second))
	return c
}

func (c *cluster) fill(ctx context.Context) error {
	if err := c.register(ctx); err != nil {
		return err
	}
	if c.services > apiServices {
		return c.store(ctx)
	}
	const workers = 24
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range c.services {
		group.Go(func() error {
			return c.create(ctx, i, c.addrs(i))
		})
	}
	return group.Wait()
}

// create makes a Service and its slice.
func (c *cluster) create(ctx context.Context, i int, endpoints []netip.Addr) error {
	_, err := c.client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, c.service(i), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = c.slices().Create(ctx, c.slice(i, endpoints), metav1.CreateOptions{})
	return err
}

// apiServices is how many Services the API server creates in reasonable time.
const apiServices = 20_000

// store has etcd get what the API server and the controller would have written.
func (c *cluster) store(ctx context.Context) error {
	managed := []metav1.ManagedFieldsEntry{{
		Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, FieldsType: "FieldsV1",
		FieldsV1: metav1.NewFieldsV1(`{"f:addressType":{},"f:endpoints":{},"f:metadata":{"f:labels":{".":{},` +
			`"f:app":{},"f:kubernetes.io/service-name":{}},"f:ownerReferences":{}},"f:ports":{}}`),
	}}
	var all []kubernetes.Object
	for i := range c.services {
		s, slice := c.service(i), c.slice(i, c.addrs(i))
		s.Namespace, slice.Namespace = metav1.NamespaceDefault, metav1.NamespaceDefault
		s.ManagedFields, slice.ManagedFields = managed, managed
		s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeClusterIP, corev1.ServiceAffinityNone
		s.Spec.ClusterIPs, s.Spec.IPFamilies = []string{s.Spec.ClusterIP}, []corev1.IPFamily{corev1.IPv4Protocol}
		s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
		all = append(all, s, slice)
	}
	return c.plane.Store(ctx, all...)
}

// register makes the Node object.
func (c *cluster) register(ctx context.Context) error {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	n.Spec.PodCIDR = testbed.PodCIDRs(testbed.Node)[0].String()
	n, err := c.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
	_, err = c.client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
	return err
}

func (c *cluster) service(i int) *corev1.Service {
	name := serviceName(i).Name
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}}
	s.Spec.ClusterIP = serviceAddr(i).String()
	s.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Port: servicePort, Protocol: corev1.ProtocolTCP}}
	return s
}

// slice is as the endpoint slice controller makes it.
func (c *cluster) slice(i int, endpoints []netip.Addr) *discoveryv1.EndpointSlice {
	name := serviceName(i).Name
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("tcp"), Port: new(int32(podPort)), Protocol: new(corev1.ProtocolTCP)}},
	}
	s.Labels = map[string]string{
		"app": name, discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
	}
	for j, a := range endpoints {
		n := (i + j) % 1000
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, NodeName: new(fmt.Sprintf("node-%d", n)), Zone: new(fmt.Sprintf("zone-%d", n%3)),
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("%s-6d4cf56db6-%05d", name, n),
				UID: uuid.NewUUID(),
			},
		})
	}
	return s
}

// addrs are a Service's endpoints.
func (c *cluster) addrs(i int) []netip.Addr {
	switch open, probed := c.open[i]; {
	case probed && open:
		return []netip.Addr{podAddrs[openPod]}
	case probed:
		return []netip.Addr{podAddrs[shutPod]}
	}
	return apart(perService)(i)
}

func (c *cluster) slices() discoveryclient.EndpointSliceInterface {
	return c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
}

var podAddrs = map[string]netip.Addr{
	clientPod: netip.MustParseAddr("10.244.1.20"),
	openPod:   netip.MustParseAddr("10.244.1.11"),
	shutPod:   netip.MustParseAddr("10.244.1.12"),
}

// newNode is a network for a proxy, with the pods that the probed Services lead to.
func (c *cluster) newNode(ctx context.Context) (*testbed.Bed, error) {
	spec := testbed.Spec{Cgroup: c.cgroup}
	for name, a := range podAddrs {
		p := testbed.PodSpec{Name: name, Addrs: []netip.Addr{a, testbed.EmbedV6(a)}}
		if name == openPod {
			p.Ports = []testbed.PodPort{{Protocol: tcp, Port: podPort}}
		}
		spec.Pods = append(spec.Pods, p)
	}
	return testbed.New(ctx, spec)
}

// toggle makes a probed Service's endpoint another one.
func (c *cluster) toggle(ctx context.Context, i int) error { return c.patch(ctx, i, 0, c.flip(i)) }

// flip notes that a probed Service's endpoint is to become another one, and says which.
func (c *cluster) flip(i int) netip.Addr {
	c.open[i] = !c.open[i]
	return c.addrs(i)[0]
}

// turn chooses another address for an endpoint of a Service that is not probed.
func (c *cluster) turn() (i, endpoint int, a netip.Addr) {
	for {
		c.others++
		i := c.others % c.services
		if _, probed := c.open[i]; !probed {
			return i, c.others % perService, nth(netip.MustParseAddr("10.200.0.0"), c.others)
		}
	}
}

func (c *cluster) patch(ctx context.Context, i, endpoint int, a netip.Addr) error {
	patch := fmt.Sprintf(`[{"op":"replace","path":"/endpoints/%d/addresses/0","value":%q},`+
		`{"op":"add","path":"/metadata/annotations","value":{%q:%q}}]`, endpoint, a,
		corev1.EndpointsLastChangeTriggerTime, time.Now().UTC().Format(time.RFC3339Nano))
	_, err := c.slices().Patch(ctx, serviceName(i).Name, types.JSONPatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// bystander is a bare watch: it tells when the API server announces a change, to anybody.
type bystander struct {
	seen map[int]chan time.Time // by probed Service
	stop func()
}

// watch makes a bystander of the probed Services.
func (c *cluster) watch(ctx context.Context) (*bystander, error) {
	list, err := c.slices().List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, err
	}
	// The server ends watches when it is very busy.
	w, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.slices().Watch(ctx, o)
		},
	})
	if err != nil {
		return nil, err
	}
	by := &bystander{seen: map[int]chan time.Time{}, stop: w.Stop}
	for i := range c.open {
		by.seen[i] = make(chan time.Time, most+probedServices)
	}
	go func() {
		for e := range w.ResultChan() {
			s, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			var i int
			if _, err := fmt.Sscanf(s.Name, "svc-%d", &i); err == nil && by.seen[i] != nil {
				by.seen[i] <- time.Now()
			}
		}
	}()
	return by, nil
}

// saw is when the bystander saw a probed Service's next change.
func (b *bystander) saw(i int) (time.Time, error) {
	select {
	case t := <-b.seen[i]:
		return t, nil
	case <-time.After(changeLimit): //nolint:forbidigo // the limit is part of the experiment
		return time.Time{}, fmt.Errorf("the API server did not announce a change of %s", serviceName(i))
	}
}
