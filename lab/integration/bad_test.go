package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// Objects that no API server accepts come from it all the same: it never looks again at what etcd holds.
// They cost the others nothing, and an Event names each with its field.
func TestBadObjects(t *testing.T) {
	t.Parallel()
	w := newWorld(t, kubernetes.Options{})
	w.deployWeb(5 * time.Second)
	w.step("one by one", func(w *world) {
		w.unbroken(func() { w.store(badObjects()...) })
		w.awaitEvents(`
EndpointSlice default/bad-1 InvalidEndpointSlice endpoints[0].addresses[0]
EndpointSlice default/bad-1 InvalidEndpointSlice ports[0].port
EndpointSlice default/web-bad InvalidEndpointSlice endpoints[0].addresses[0]
Service default/bad-cluster-ip InvalidService spec.clusterIPs[0]
Service default/bad-port InvalidService spec.ports[0].port
Service default/bad-port InvalidService spec.ports[1].protocol
Service default/bad-ranges InvalidService spec.loadBalancerSourceRanges[0]
ServiceCIDR bad InvalidServiceCIDR spec.cidrs[0]
`)
	})
	w.step("at random", func(w *world) {
		w.unbroken(func() {
			w.store(randomObjects(t, 500)...)
			w.kubectl("set", "env", "deployment/web", "VERSION=2")
			w.rolledOut()
		})
	})
	w.step("and gone", func(w *world) {
		w.unbroken(func() {
			w.kubectl("delete", "namespace", fuzzed, "--wait=false")
			for _, o := range badObjects() {
				w.unstore(o)
			}
			w.kubectl("set", "env", "deployment/web", "VERSION=3")
			w.rolledOut()
		})
	})
	select {
	case <-w.proxy.Ended():
		t.Error("the proxy has ended")
	default:
	}
}

func (w *world) store(objects ...kubernetes.Object) {
	w.Helper()
	if err := w.plane.Store(w.Context(), objects...); err != nil {
		w.Fatal(err)
	}
}

func (w *world) unstore(o kubernetes.Object) {
	w.Helper()
	key, err := kubernetes.StorageKey(o)
	if err == nil {
		err = w.plane.Unstore(w.Context(), key)
	}
	if err != nil {
		w.Fatal(err)
	}
}

// badObjects have one mistake each, or two in separate parts.
func badObjects() []kubernetes.Object {
	meta := func(name string, labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: "default", Labels: labels}
	}
	of := func(service string) map[string]string {
		return map[string]string{discoveryv1.LabelServiceName: service}
	}
	service := func(name string, change func(*corev1.ServiceSpec)) *corev1.Service {
		s := &corev1.Service{ObjectMeta: meta(name, nil), Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.9.9", ClusterIPs: []string{"10.96.9.9"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080)}},
		}}
		change(&s.Spec)
		return s
	}
	port, tooHigh := int32(8080), int32(70000)
	return []kubernetes.Object{
		service("bad-cluster-ip", func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "10.96.0.300", []string{"10.96.0.300"} }),
		service("bad-port", func(s *corev1.ServiceSpec) {
			s.ClusterIP, s.ClusterIPs = "10.96.9.8", []string{"10.96.9.8"}
			s.Ports = append(s.Ports, s.Ports[0])
			s.Ports[0].Port, s.Ports[1].Protocol = 70000, "DCCP"
		}),
		service("bad-ranges", func(s *corev1.ServiceSpec) {
			s.Type, s.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{"10.0.0.0/33"}
		}),
		&discoveryv1.EndpointSlice{
			ObjectMeta: meta("bad-1", of("bad-port")), AddressType: discoveryv1.AddressTypeIPv4,
			Ports:     []discoveryv1.EndpointPort{{Port: &tooHigh}, {Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"ten"}}},
		},
		&discoveryv1.EndpointSlice{
			ObjectMeta: meta("web-bad", of("web")), AddressType: discoveryv1.AddressTypeIPv4,
			Ports:     []discoveryv1.EndpointPort{{Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.300"}}},
		},
		&networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: "bad"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.98.0.0/33"}},
		},
	}
}

// awaitEvents waits until the warnings about objects are these, but for those about others.
func (w *world) awaitEvents(want string) {
	w.Helper()
	got := ""
	defer func() {
		if w.Failed() {
			w.Log("the Events are\n", got)
		}
	}()
	eventually.Nil(w, "the Events are there", func() error {
		list, err := w.plane.Client().EventsV1().Events("").List(w.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var lines []string
		for _, e := range list.Items {
			if strings.HasPrefix(e.Reason, "Invalid") {
				_, rest, _ := strings.Cut(e.Note, ": ")
				field, _, _ := strings.Cut(rest, ":")
				name := strings.TrimPrefix(e.Regarding.Namespace+"/"+e.Regarding.Name, "/")
				lines = append(lines, fmt.Sprintf("%s %s %s %s", e.Regarding.Kind, name, e.Reason, field))
			}
		}
		slices.Sort(lines)
		if got = strings.Join(lines, "\n"); got != strings.TrimSpace(want) {
			return fmt.Errorf("they are\n%s", got)
		}
		return nil
	})
}

// fuzzed is where random objects are.
const fuzzed = "fuzzed"

// randomObjects are as wrong as their types allow. They claim what the Service web has, which is older.
func randomObjects(t *testing.T, n int) []kubernetes.Object {
	f := newFiller(sample.Seed(t))
	objects := []kubernetes.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fuzzed}}}
	for i := range n {
		service, slice := &corev1.Service{}, &discoveryv1.EndpointSlice{}
		f.Fill(&service.Spec)
		f.Fill(&service.Status.LoadBalancer)
		f.Fill(slice)
		service.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("service-%d", i), Namespace: fuzzed}
		slice.ObjectMeta = metav1.ObjectMeta{
			Name: fmt.Sprintf("slice-%d", i), Namespace: fuzzed,
			Labels: map[string]string{discoveryv1.LabelServiceName: service.Name},
		}
		objects = append(objects, service, slice)
	}
	return objects
}

// newFiller fills fields with what is wrong in most of them and right in some.
func newFiller(seed uint64) *randfill.Filler {
	return randfill.NewWithSeed(int64(seed)).NilChance(0.2).NumElements(0, 4).Funcs(
		fillWord[string], fillWord[corev1.Protocol], fillWord[corev1.IPFamily], fillWord[corev1.ServiceType],
		fillWord[corev1.ServiceAffinity], fillWord[corev1.ServiceExternalTrafficPolicy],
		fillWord[corev1.ServiceInternalTrafficPolicy], fillWord[corev1.LoadBalancerIPMode], fillWord[discoveryv1.AddressType],
		fillNumber,
		func(o *intstr.IntOrString, c randfill.Continue) {
			if o.Type = intstr.Int; c.Bool() {
				o.Type = intstr.String
			}
			c.Fill(&o.IntVal)
			c.Fill(&o.StrVal)
		},
	)
}

func fillWord[T ~string](s *T, c randfill.Continue) {
	words := []T{
		"", "None", "10.96.0.10", "fd00::a60:a", "203.0.113.7", "10.96.0.300", "::ffff:10.96.0.1", "fe80::1%eth0",
		"127.0.0.1", "0.0.0.0", "224.0.0.1", "10.0.0.0/8", "10.0.0.0/33", "IPv4", "IPv6", "FQDN", "TCP", "UDP", "SCTP", "QUIC",
		"ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Local", "Cluster", "ClientIP", "VIP", "Proxy", "PreferSameZone",
		"node", "web", "no such thing", "\x00", "Σ", T(strings.Repeat("long", 500)),
	}
	*s = words[c.Intn(len(words))]
}

func fillNumber(n *int32, c randfill.Continue) {
	numbers := []int32{-2147483648, -1, 0, 1, 80, 8080, 30080, 65535, 65536, 86401, 2147483647}
	*n = numbers[c.Intn(len(numbers))]
}
