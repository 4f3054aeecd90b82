package file

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"
)

// BenchmarkSource reads what kubectl prints for 10,000 Services of ten endpoints each, and then one
// edit of that file. Beside the times it reports the resident memory of the whole process: the most
// while it reads, and what remains. Run it with -benchtime 1x for numbers of a fresh process.
func BenchmarkSource(b *testing.B) {
	path := filepath.Join(b.TempDir(), "cluster.yaml")
	size := writeCluster(b, path, 10_000, 10)
	b.SetBytes(size)
	for b.Loop() {
		b.StopTimer()
		write(b, "/proc/self/clear_refs", "5") // the peak begins anew
		b.StartTimer()
		s, err := New(Options{Paths: []string{path}})
		if err != nil {
			b.Fatal(err)
		}
		batch, err := s.Next(b.Context())
		if err != nil || len(batch.Services) != 10_000 || len(batch.Slices) != 10_000 {
			b.Fatal(len(batch.Services), len(batch.Slices), batch.Problems, err)
		}
		b.StopTimer()
		b.ReportMetric(resident(b, "VmHWM"), "peak-MB")
		b.ReportMetric(resident(b, "VmRSS"), "settled-MB")
		b.ReportMetric(float64(edit(b, s, path, size).Milliseconds()), "edit-ms")
		s.Close()
		b.StartTimer()
	}
}

// edit is how long one changed address in the file takes to arrive.
func edit(b *testing.B, s *Source, path string, size int64) time.Duration {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	end := make([]byte, 8<<10)
	if _, err := f.ReadAt(end, size-int64(len(end))); err != nil {
		b.Fatal(err)
	}
	at := bytes.LastIndex(end, []byte("- addresses:\n    - 10.")) + len("- addresses:\n    - 10.")
	start := time.Now()
	if _, err := f.WriteAt([]byte{end[at] ^ 1}, size-int64(len(end))+int64(at)); err != nil {
		b.Fatal(err)
	}
	if batch, err := s.Next(b.Context()); err != nil || len(batch.Slices) != 1 {
		b.Fatal(len(batch.Slices), err)
	}
	return time.Since(start)
}

func write(b *testing.B, path, text string) {
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
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

// writeCluster writes what kubectl get services,endpointslices -A -o yaml prints, and returns its size.
func writeCluster(b *testing.B, path string, services, endpoints int) int64 {
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	text := bufio.NewWriter(f)
	fmt.Fprint(text, "apiVersion: v1\nitems:\n")
	for i := range services {
		fmt.Fprintf(text, serviceItem, i, i, i%50, i, i>>8, i&255, i>>8, i&255, i)
	}
	for i := range services {
		fmt.Fprint(text, "- addressType: IPv4\n  apiVersion: discovery.k8s.io/v1\n  endpoints:\n")
		for j := range endpoints {
			n := i*endpoints + j
			fmt.Fprintf(text, endpointItem, 100+n>>16, n>>8&255, n&255, j, i, j, i%50, n)
		}
		fmt.Fprintf(text, sliceItem, i, i, i, i, i%50, i, i, i)
	}
	fmt.Fprint(text, "kind: List\nmetadata:\n  resourceVersion: \"\"\n")
	if err := text.Flush(); err != nil {
		b.Fatal(err)
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		b.Fatal(err)
	}
	return size
}

const (
	serviceItem = `- apiVersion: v1
  kind: Service
  metadata:
    creationTimestamp: "2026-01-02T03:04:05Z"
    labels:
      app: app-%d
    name: svc-%d
    namespace: ns-%d
    resourceVersion: "1234567"
    uid: 3f0d8e8f-8a55-4b0b-9d5c-%012d
  spec:
    clusterIP: 10.96.%d.%d
    clusterIPs:
    - 10.96.%d.%d
    internalTrafficPolicy: Cluster
    ipFamilies:
    - IPv4
    ipFamilyPolicy: SingleStack
    ports:
    - name: http
      port: 80
      protocol: TCP
      targetPort: 8080
    selector:
      app: app-%d
    sessionAffinity: None
    type: ClusterIP
  status:
    loadBalancer: {}
`
	endpointItem = `  - addresses:
    - 10.%d.%d.%d
    conditions:
      ready: true
      serving: true
      terminating: false
    nodeName: node-%d
    targetRef:
      kind: Pod
      name: app-%d-6d5c8f7b9c-%05d
      namespace: ns-%d
      uid: 8c6f8e8f-8a55-4b0b-9d5c-%012d
    zone: zone-a
`
	sliceItem = `  kind: EndpointSlice
  metadata:
    creationTimestamp: "2026-01-02T03:04:05Z"
    generateName: svc-%d-
    generation: 3
    labels:
      app: app-%d
      endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io
      kubernetes.io/service-name: svc-%d
    name: svc-%d-abcde
    namespace: ns-%d
    ownerReferences:
    - apiVersion: v1
      blockOwnerDeletion: true
      controller: true
      kind: Service
      name: svc-%d
      uid: 3f0d8e8f-8a55-4b0b-9d5c-%012d
    resourceVersion: "7654321"
    uid: 9f0d8e8f-8a55-4b0b-9d5c-%012d
  ports:
  - name: http
    port: 8080
    protocol: TCP
`
)
