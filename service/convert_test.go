package service_test

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/service"
)

// FuzzFrom reads arbitrary objects. Whatever they say, the State keeps its promises.
func FuzzFrom(f *testing.F) {
	for seed := range uint64(20) {
		d := seeded(seed)
		f.Add(marshal(f, d.service()), marshal(f, d.slice()), []byte(`{"metadata":{"name":"a","namespace":"ns1"},
			"subsets":[{"addresses":[{"ip":"10.244.1.2"}],"ports":[{"name":"http","port":8080}]}]}`),
			[]byte(`{"metadata":{"name":"node"},"spec":{"podCIDR":"10.244.1.0/24","cidrs":["10.96.0.0/16"]}}`))
	}
	f.Fuzz(func(t *testing.T, service1, slice, endpoints, node []byte) {
		var (
			o1 corev1.Service
			o2 discoveryv1.EndpointSlice
			o3 corev1.Endpoints
			o4 corev1.Node
			o5 networkingv1.ServiceCIDR
		)
		// What cannot be decoded is half decoded, which is as good.
		for data, o := range map[*[]byte][]any{&service1: {&o1}, &slice: {&o2}, &endpoints: {&o3}, &node: {&o4, &o5}} {
			for _, o := range o {
				_ = json.Unmarshal(*data, o)
			}
		}
		b := service.Batch{Services: map[service.Name]*service.Service{}, Slices: map[service.Name]*service.Slice{}}
		s, _ := service.FromService(&o1)
		b.Services[s.Name] = s
		all, _ := service.FromEndpoints(&o3)
		if one, _ := service.FromSlice(&o2); one != nil {
			all = append(all, one)
		}
		for _, s := range all {
			b.Slices[s.Name] = s
		}
		b.Node, _ = service.FromNode(&o4)
		b.Node.Name = "node"
		b.ServiceCIDRs, _ = service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{&o5})
		state, _, _ := newTable(t, defaultOptions()).Update(b)
		checkState(t, state)
	})
}

func marshal(t testing.TB, o any) []byte {
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
