package server_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	names "github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/model"
)

// following is an engine whose State has no rows.
type following struct{}

func (following) Status() engine.Status { return engine.Status{} }
func (following) Healthy() bool         { return true }

func (following) Do(ctx context.Context, f func(context.Context, engine.View) error) error {
	plane, err := (&memory.Kernel{}).New(dataplane.Config{})
	if err != nil {
		return err
	}
	return f(ctx, engine.View{State: model.NewState(), Plane: plane})
}

// shapes has, for each of kube-proxy's metrics in a scrape, its type, labels and buckets.
func shapes(t *testing.T, scrape string) map[string]string {
	t.Helper()
	parser := expfmt.NewTextParser(names.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(scrape))
	must(t, err)
	all := map[string]string{}
	for name, f := range families {
		if strings.HasPrefix(name, "kubeproxy_") {
			all[name] = shape(f)
		}
	}
	return all
}

func shape(f *dto.MetricFamily) string {
	m := f.GetMetric()[0]
	var labels, buckets []string
	for _, l := range m.GetLabel() {
		labels = append(labels, l.GetName())
	}
	for _, b := range m.GetHistogram().GetBucket() {
		buckets = append(buckets, fmt.Sprint(b.GetUpperBound()))
	}
	slices.Sort(labels)
	return fmt.Sprint(f.GetType(), labels, buckets)
}

// compareMetrics holds ours against what kube-proxy exports once something has happened to it.
func compareMetrics(t *testing.T, client clientset.Interface, c *http.Client) {
	makeService(t, client, "one")
	awaitShapes(t, c, "kubeproxy_network_programming_duration_seconds")
	makeService(t, client, "two") // which is not part of the first sync
	theirs := awaitShapes(t, c, "kubeproxy_sync_partial_proxy_rules_duration_seconds",
		"kubeproxy_conntrack_reconciler_sync_duration_seconds")
	m := metrics.New(metrics.Options{})
	m.Follow(following{})
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	ours := shapes(t, w.Body.String())
	for _, name := range slices.Sorted(maps.Keys(theirs)) {
		if name == "kubeproxy_nftables_localhost_nodeport_rejected_packets_total" {
			continue // no rule of ours counts packets; it is behind a feature gate
		}
		if ours[name] != theirs[name] {
			t.Errorf("%s: is %q, kube-proxy's is %q", name, ours[name], theirs[name])
		}
	}
	t.Log("compared:", strings.Join(slices.Sorted(maps.Keys(theirs)), " "))
}

// makeService makes a Service for UDP, which has conntrack looked through, and an endpoint that is dated.
func makeService(t *testing.T, client clientset.Interface, of string) {
	t.Helper()
	port, name, ready, udp := int32(80), "", true, corev1.ProtocolUDP
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: of, Namespace: "default"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: port, Protocol: udp}}},
	}
	_, err := client.CoreV1().Services("default").Create(t.Context(), service, metav1.CreateOptions{})
	must(t, err)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: of, Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: of},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &udp}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
	_, err = client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{})
	must(t, err)
}

// awaitShapes scrapes until all of some metrics are there.
func awaitShapes(t *testing.T, c *http.Client, wanted ...string) map[string]string {
	t.Helper()
	var have map[string]string
	eventually.Nil(t, "kube-proxy has the metrics", func() error {
		have = shapes(t, get(t, c, "/metrics", ""))
		missing := slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return have[name] != "" })
		if len(missing) > 0 {
			return fmt.Errorf("it lacks %v", missing)
		}
		return nil
	})
	return have
}
