package service_test

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// FuzzFrom reads arbitrary objects. Whatever they say, the State keeps its promises, and memory is bounded.
func FuzzFrom(f *testing.F) {
	for seed := range uint64(20) {
		d := seeded(seed)
		f.Add(marshal(f, d.service()), marshal(f, d.slice()), []byte(`{"metadata":{"name":"a","namespace":"ns1"},
			"subsets":[{"addresses":[{"ip":"10.244.1.2"}],"ports":[{"name":"http","port":8080}]}]}`),
			[]byte(`{"metadata":{"name":"node"},"spec":{"podCIDR":"10.244.1.0/24","cidrs":["10.96.0.0/16"]}}`))
	}
	f.Fuzz(func(t *testing.T, service, slice, endpoints, node []byte) {
		allocs.Bound(t, len(service)+len(slice)+len(endpoints)+len(node), func() {
			checkState(t, read(t, service, slice, endpoints, node))
		})
	})
}

// read is the State of some objects.
func read(t *testing.T, service1, slice, endpoints, node []byte) *model.State {
	var (
		o1 corev1.Service
		o2 discoveryv1.EndpointSlice
		o3 corev1.Endpoints
		o4 corev1.Node
		o5 networkingv1.ServiceCIDR
	)
	// Input that cannot be decoded is decoded in part, which is as good.
	for data, o := range map[*[]byte][]any{&service1: {&o1}, &slice: {&o2}, &endpoints: {&o3}, &node: {&o4, &o5}} {
		for _, o := range o {
			_ = json.Unmarshal(*data, o)
		}
	}
	b := service.Batch{}
	s, _ := service.FromService(&o1)
	b.Services.Set(s.Name, s)
	all, _ := service.FromEndpoints(&o3)
	if one, _ := service.FromSlice(&o2); one != nil {
		all = append(all, one)
	}
	for _, s := range all {
		b.Slices.Set(s.Name, s)
	}
	b.Node, _ = service.FromNode(&o4)
	b.Node.Name = "node"
	b.ServiceCIDRs, _ = service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{&o5})
	state, _, _ := newTable(t, defaultOptions()).Update(b)
	return state
}

// FuzzAnnotations reads arbitrary annotations: each is taken as it is meant, or is a problem of the object and changes
// nothing. Memory is bounded.
func FuzzAnnotations(f *testing.F) {
	for _, text := range []string{
		"3", "10.244.1.2=5,10.244.2.2=0", "0, fd00::af4:102 = 256", "257", "1,2", "fe80::1%eth0=1", "",
	} {
		f.Add(text, "mh")
	}
	f.Add("::ffff:10.244.1.2=2,10.244.1.2=3", "")
	f.Fuzz(func(t *testing.T, weights, scheduler string) {
		o := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
		o.Namespace, o.Name, o.Labels = "ns", "s", map[string]string{discoveryv1.LabelServiceName: "a"}
		o.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.2"}}, {Addresses: []string{"10.244.2.2"}}}
		o.Ports = []discoveryv1.EndpointPort{{Port: new(int32(80))}}
		o.Annotations = map[string]string{"fairlead.dev/weights": weights}
		s := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1"}}
		s.Namespace, s.Name = "ns", "a"
		s.Annotations = map[string]string{"fairlead.dev/scheduler": scheduler}
		allocs.Bound(t, len(weights)+len(scheduler), func() {
			service.FromSlice(o)
			service.FromService(s)
		})
		slice, problems := service.FromSlice(o)
		for _, e := range slice.Endpoints {
			if e.Weight > 256 || len(problems) > 0 && e.Weight != 1 {
				t.Errorf("%q makes %s weigh %d: %v", weights, e.Addr, e.Weight, problems)
			}
		}
		is, problems := service.FromService(s)
		if (is.Scheduler == 0) == (len(problems) == 0) {
			t.Errorf("%q is scheduler %d: %v", scheduler, is.Scheduler, problems)
		}
	})
}

func marshal(t testing.TB, o any) []byte {
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestFromService_label compares which names are accepted with those that Kubernetes accepts.
func TestFromService_label(t *testing.T) {
	names := []string{"a", "0", "-", "", "web", "a-b", "-a", "a-", "a--b", "A", "aB", "a.b", "a_b", "ä", "a/b", "a:b", "a\n",
		strings.Repeat("a", 63), strings.Repeat("a", 64)}
	for b := range 256 {
		c := string([]byte{byte(b)})
		names = append(names, c, c+"a", "a"+c, "a"+c+"a")
	}
	for _, name := range names {
		o := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1"}}
		o.Namespace, o.Name = "default", name
		s, _ := service.FromService(o)
		if got, want := s.Ignored == "", len(validation.IsDNS1123Label(name)) == 0; got != want {
			t.Errorf("a Service of the name %q is accepted: %t, want %t", name, got, want)
		}
	}
}
