package service_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// cluster is n Services with a ClusterIP and k endpoints each, in one slice.
func cluster(n, k int) service.Batch {
	b := service.Batch{}
	for i := range n {
		name := service.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", i)}
		b.Services.Set(name, &service.Service{
			Name:       name,
			ClusterIPs: []netip.Addr{numbered(10<<24|96<<16, i)},
			Ports:      []service.Port{{Name: "http", Protocol: model.TCP, Port: 80}},
		})
		b.Slices.Set(name, slice(name, i*k, k))
	}
	b.ServiceCIDRs = []netip.Prefix{prefix("10.96.0.0/12")}
	b.Node = testNode()
	return b
}

func slice(name service.Name, first, k int) *service.Slice {
	s := &service.Slice{Name: name, Service: name.Name, Endpoints: make([]service.Endpoint, k)}
	s.Ports = []service.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}}
	for i := range s.Endpoints {
		s.Endpoints[i] = service.Endpoint{Addr: numbered(10<<24|128<<16, first+i), Node: service.NodeNamed("node-b"), Ready: true, Serving: true, Weight: 1}
	}
	return s
}

func numbered(base, i int) netip.Addr {
	n := uint32(base + i + 1)
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

func sizes(b *testing.B, f func(b *testing.B, services, endpoints int)) {
	for _, n := range [][2]int{{1000, 10}, {10_000, 10}, {44_000, 1}, {50_000, 10}, {5000, 50}} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n[0], n[1]), func(b *testing.B) { f(b, n[0], n[1]) })
	}
}

// BenchmarkUpdate_all is the first Update after a start. heap-MB is what the Table holds thereafter,
// the objects included.
func BenchmarkUpdate_all(b *testing.B) {
	sizes(b, func(b *testing.B, services, endpoints int) {
		b.ReportAllocs()
		before := heap()
		objects := cluster(services, endpoints)
		var table *service.Table
		for b.Loop() {
			table = newTable(b, defaultOptions())
			table.Update(objects)
		}
		objects = service.Batch{Node: testNode()}
		b.ReportMetric(float64(heap()-before)/1e6, "heap-MB")
		table.Update(objects)
	})
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkUpdate_endpoint replaces the slice of one Service.
func BenchmarkUpdate_endpoint(b *testing.B) {
	sizes(b, func(b *testing.B, services, endpoints int) {
		table := newTable(b, defaultOptions())
		table.Update(cluster(services, endpoints))
		name := service.Name{Namespace: "default", Name: "service-7"}
		other := []*service.Slice{slice(name, 1<<22, endpoints), slice(name, 1<<22+1, endpoints)}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			_, change, _ := table.Update(service.Batch{Slices: service.One(name, other[i%2])})
			if len(change.Pools.Set) != 1 {
				b.Fatal("the change is not that of one pool")
			}
		}
	})
}

// BenchmarkUpdate_service adds and removes a Service.
func BenchmarkUpdate_service(b *testing.B) {
	sizes(b, func(b *testing.B, services, endpoints int) {
		table := newTable(b, defaultOptions())
		objects := cluster(services+1, endpoints)
		name := service.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", services)}
		s := objects.Services[services].Is
		objects.Services = objects.Services[:services]
		table.Update(objects)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			table.Update(service.Batch{Services: service.One(name, [2]*service.Service{s, nil}[i%2])})
		}
	})
}

// BenchmarkFromSlice reads a slice of 100 endpoints, of which an annotation weighs all, each, or none.
func BenchmarkFromSlice(b *testing.B) {
	d := seeded(1)
	o := d.slice()
	o.AddressType, o.Endpoints = discoveryv1.AddressTypeIPv4, nil
	each := make([]string, 100)
	for i := range each {
		e := d.endpoint(o.AddressType)
		e.Addresses[0] = numbered(10<<24|128<<16, i).String()
		o.Endpoints = append(o.Endpoints, e)
		each[i] = e.Addresses[0] + "=3"
	}
	for name, weights := range map[string]string{"none": "", "all": "3", "each": strings.Join(each, ",")} {
		b.Run("weights="+name, func(b *testing.B) {
			o.Annotations = nil
			if weights != "" {
				o.Annotations = map[string]string{"fairlead.dev/weights": weights}
			}
			b.ReportAllocs()
			for b.Loop() {
				service.FromSlice(o)
			}
		})
	}
}
