package server_test

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
)

const transcriptFile = "testdata/kube-proxy.txt"

// paths are asked for with GET.
const paths = `/ /healthz /healthz/ /healthz/ping /healthz?verbose /livez /readyz /proxyMode /proxyMode/
/configz /statusz /flagz /metrics /metrics/ /metrics/slis /version /debug/pprof /debug/pprof/
/debug/pprof/cmdline /debug/pprof/symbol /debug/pprof/heap?debug=1 /debug/pprof/goroutine
/debug/pprof/nothing /debug/flags /debug/flags/ /debug/flags/v`

// formats are what clients ask of /statusz and /flagz.
const formats = `*/*
text/*
text/html
text/plain
text/plain;as=Flagz;v=v1beta1;g=config.k8s.io
application/*
application/json
application/yaml
application/cbor
application/vnd.kubernetes.protobuf
*/*;as=Flagz;v=v1beta1;g=config.k8s.io
application/*;as=Flagz;v=v1beta1;g=config.k8s.io
application/json;as=Flagz;v=v1beta1;g=config.k8s.io
application/json;as=Statusz;v=v1beta1;g=config.k8s.io
application/yaml;as=Statusz;v=v1beta1;g=config.k8s.io
application/json;as=Statusz;v=v1alpha1;g=config.k8s.io
application/json;as=Statusz;v=v2;g=config.k8s.io
application/json;as=Statusz;g=config.k8s.io
application/json;as=Table;v=v1;g=meta.k8s.io
text/html, application/json;as=Statusz;v=v1beta1;g=config.k8s.io;q=0.5, text/plain;q=0.4
text/html, text/plain;q=0.4, application/json;as=Statusz;v=v1beta1;g=config.k8s.io;q=0.3`

// transcript has a line for each request: what the answer is, as far as clients depend on it.
func transcript(t *testing.T, c *http.Client) string {
	t.Helper()
	var b strings.Builder
	for _, path := range strings.Fields(paths) {
		b.WriteString(exchange(t, c, "GET", path, "", ""))
	}
	for _, format := range strings.Split(formats, "\n") {
		for _, path := range []string{"/statusz", "/flagz"} {
			b.WriteString(exchange(t, c, "GET", path, format, ""))
		}
	}
	for _, path := range strings.Fields("/healthz /proxyMode /configz /statusz /flagz /metrics /metrics/slis /debug/flags/v") {
		for _, method := range []string{"HEAD", "POST", "DELETE"} {
			b.WriteString(exchange(t, c, method, path, "", ""))
		}
	}
	for _, value := range []string{"4", "2", "x", "-1"} {
		b.WriteString(exchange(t, c, "PUT", "/debug/flags/v", "", value))
	}
	return b.String()
}

func recorded(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(transcriptFile)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// diff is what differs between two lists of lines.
func diff(want, have string) string {
	lines := func(s string) map[string]bool {
		m := map[string]bool{}
		for line := range strings.Lines(s) {
			m[line] = true
		}
		return m
	}
	var b strings.Builder
	wanted, had := lines(want), lines(have)
	for line := range strings.Lines(want) {
		if !had[line] {
			b.WriteString("want " + line)
		}
	}
	for line := range strings.Lines(have) {
		if !wanted[line] {
			b.WriteString("have " + line)
		}
	}
	return b.String()
}

// TestLikeKubeProxy holds the server against what kube-proxy answered.
func TestLikeKubeProxy(t *testing.T) {
	t.Parallel()
	if d := diff(recorded(t), transcript(t, client(t, newServer(t, options())))); d != "" {
		t.Error(d)
	}
}

// TestKubeProxy holds what kube-proxy is said to have answered, and our metrics, against kube-proxy. With
// FAIRLEAD_RECORD it writes the answers down.
func TestKubeProxy(t *testing.T) {
	parts := kubernetes.NeedParts(t)
	c, client := kubeProxy(t, parts)
	have := transcript(t, c)
	if os.Getenv("FAIRLEAD_RECORD") != "" {
		if err := os.WriteFile(transcriptFile, []byte(have), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if d := diff(recorded(t), have); d != "" {
		t.Error(d)
	}
	compareMetrics(t, client, c)
}

// kubeProxy starts the real one and returns clients of its metrics server and of its cluster.
func kubeProxy(t *testing.T, parts kubernetes.Parts) (*http.Client, clientset.Interface) {
	t.Helper()
	plane, err := kubernetes.Start(t.Context(), kubernetes.Options{Parts: parts, Controllers: []string{}})
	must(t, err)
	t.Cleanup(func() { must(t, plane.Close()) })
	bed := testbed.Need(t, testbed.Spec{})
	relay, err := plane.Serve(bed)
	must(t, err)
	config, err := relay.Kubeconfig(t.TempDir(), kubernetes.KubeProxy())
	must(t, err)
	addr := bed.Addr(testbed.Node, false)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node"},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr.String()}}},
	}
	_, err = plane.Client().CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	proxy := bed.Command(ctx, testbed.Node, parts.Path("kube-proxy"), "--kubeconfig", config,
		"--hostname-override=node", "--proxy-mode=nftables", "--profiling",
		"--feature-gates=KubeProxyNFTablesLocalhostNodePorts=true", "--metrics-bind-address=0.0.0.0:10249",
		"--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	log := &strings.Builder{}
	proxy.Stderr = log
	must(t, proxy.Start())
	t.Cleanup(func() {
		stop()
		_ = proxy.Wait()
		if t.Failed() {
			t.Log(log)
		}
	})
	c := dialing(t, func(ctx context.Context) (net.Conn, error) {
		return bed.Dial(ctx, testbed.Node, model.TCP, netip.AddrPortFrom(addr, 10249))
	})
	answering(t, c)
	return c, plane.Client()
}

// answering waits until a server answers.
func answering(t *testing.T, c *http.Client) {
	t.Helper()
	eventually.Nil(t, "the server answers", func() error {
		r, err := http.NewRequestWithContext(t.Context(), "GET", "http://server/healthz", nil)
		must(t, err)
		response, err := c.Do(r)
		if err == nil {
			err = response.Body.Close()
		}
		return err
	})
}
