package kube

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// BenchmarkSource is the time until the first Batch of 10,000 Services with ten endpoints each comes from a real API
// server, by a streaming list and by an ordinary one. Beside it reports what the objects take on the heap: the Batch,
// which the daemon's Table keeps, and the mirror. It also reports the resident memory of the whole process, at most and
// afterwards; that includes the test's own clients. And it reports how long it takes until one changed slice comes out
// of Next, the API server's part included. Run it with -benchtime 1x.
func BenchmarkSource(b *testing.B) {
	for _, streaming := range []bool{true, false} {
		b.Run(fmt.Sprint("streaming=", streaming), func(b *testing.B) {
			plane := newPlane(b, kubernetes.Options{APIServerArgs: []string{
				"--service-cluster-ip-range=10.96.0.0/12", fmt.Sprint("--feature-gates=WatchList=", streaming),
			}})
			fill(b, plane, 10_000, 10)
			c := connectReal(b, plane, nil)
			for v := newView(b, c); len(v.all.Services) < 10_001 || len(v.all.Slices) < 10_000; {
				v.next() // its cache runs behind etcd
			}
			for b.Loop() {
				b.StopTimer()
				before := heap()
				if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // the peak begins anew
					b.Fatal(err)
				}
				start := resident(b, "VmRSS")
				b.StartTimer()
				s := c.Source("n1")
				batch, err := s.Next(b.Context())
				if err != nil || len(batch.Services) != 10_001 || len(batch.Slices) != 10_000 {
					b.Fatal(len(batch.Services), len(batch.Slices), batch.Problems, err)
				}
				b.StopTimer()
				b.ReportMetric(resident(b, "VmHWM")-start, "peak-MB")
				b.ReportMetric(heap()-before, "heap-MB")
				b.ReportMetric(resident(b, "VmRSS")-start, "settled-MB")
				b.ReportMetric(float64(edit(b, plane, s).Microseconds())/1000, "edit-ms")
				runtime.KeepAlive(batch)
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// edit is how long one changed endpoint takes from the request to Next.
func edit(b *testing.B, plane *kubernetes.ControlPlane, s *Source) time.Duration {
	api := plane.Client().DiscoveryV1().EndpointSlices("ns-0")
	slice, err := api.Get(b.Context(), "svc-0-abcde", metav1.GetOptions{})
	if err != nil {
		b.Fatal(err)
	}
	slice.Endpoints[0].Conditions.Ready = new(!*slice.Endpoints[0].Conditions.Ready)
	start := time.Now()
	if _, err := api.Update(b.Context(), slice, metav1.UpdateOptions{}); err != nil {
		b.Fatal(err)
	}
	if batch, err := s.Next(b.Context()); err != nil || len(batch.Slices) != 1 {
		b.Fatal(rows(batch), err)
	}
	return time.Since(start)
}

// heap is what lives, in MB.
func heap() float64 {
	runtime.GC()
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / 1e6
}

// resident is a line of /proc/self/status, in MB.
func resident(b *testing.B, line string) float64 {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	kb, err := strconv.Atoi(string(regexp.MustCompile(line + `:\s*(\d+)`).FindSubmatch(text)[1]))
	if err != nil {
		b.Fatal(err)
	}
	return float64(kb) / 1000
}

// fill stores Services as large as those of a cluster.
func fill(b *testing.B, plane *kubernetes.ControlPlane, services, endpoints int) {
	const at = 500
	for i := 0; i < services; i += at {
		var objects []kubernetes.Object
		for j := i; j < min(i+at, services); j++ {
			objects = append(objects, largeService(j), largeSlice(j, endpoints))
		}
		if err := plane.Store(b.Context(), objects...); err != nil {
			b.Fatal(err)
		}
	}
}

func largeMeta(i int, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: fmt.Sprint("ns-", i%50), Name: name, CreationTimestamp: metav1.Now(),
		Labels: map[string]string{"app": fmt.Sprint("app-", i), discoveryv1.LabelServiceName: fmt.Sprint("svc-", i)},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1",
			Time: new(metav1.Now()), FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(managed),
		}},
	}
}

const managed = `{"f:addressType":{},"f:endpoints":{},"f:metadata":{"f:annotations":{".":{},"f:endpoints.kubernetes.io/last-change-trigger-time":{}},"f:generateName":{},"f:labels":{".":{},"f:endpointslice.kubernetes.io/managed-by":{},"f:kubernetes.io/service-name":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"3f0d8e8f-8a55-4b0b-9d5c-000000000000\"}":{}}},"f:ports":{}}`

func largeService(i int) *corev1.Service {
	s := aService("", netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}).String())
	s.ObjectMeta = largeMeta(i, fmt.Sprint("svc-", i))
	return s
}

func largeSlice(i, endpoints int) *discoveryv1.EndpointSlice {
	s := aSlice("", "")
	s.ObjectMeta = largeMeta(i, fmt.Sprintf("svc-%d-abcde", i))
	for j := range endpoints {
		n := i*endpoints + j
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{netip.AddrFrom4([4]byte{10, 100 + byte(n>>16), byte(n >> 8), byte(n)}).String()},
			NodeName:   new(fmt.Sprint("node-", j)),
			Zone:       new("zone-a"),
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: s.Namespace, Name: fmt.Sprintf("app-%d-6d5c8f7b9c-%05d", i, j), UID: "8c6f8e8f-8a55-4b0b-9d5c-000000000000",
			},
		})
	}
	return s
}
