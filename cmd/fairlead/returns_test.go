package main

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/testbed"
)

// backends waits until a table of the node knows so many of the pods.
func (w *realCluster) backends(table string, n int) {
	w.Helper()
	w.until("the pods are in table "+table, func(ctx context.Context) bool {
		pods, err := w.plane.Client().DiscoveryV1().EndpointSlices("default").List(ctx,
			metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
		if err != nil {
			return false
		}
		out, err := w.bed.Command(ctx, testbed.Node, "nft", "list", "table", "ip", table).CombinedOutput()
		ready, known := 0, 0
		for _, slice := range pods.Items {
			for _, e := range slice.Endpoints {
				if ready++; strings.Contains(string(out), e.Addresses[0]) {
					known++
				}
			}
		}
		return err == nil && ready == n && known == n
	})
}

// A kube-proxy that comes beside Fairlead and goes leaves rules that are asked first, as they are later
// ones, and that nobody keeps up to date. They must not last.
func TestKubeProxy_returns(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	files := w.kubeadm()
	w.mount(files)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(files["kubeconfig.conf"]), 0o600); err != nil {
		t.Fatal(err)
	}
	p := w.start()
	w.kubectl("", "scale", "deployment/web", "--replicas=4")
	w.backends("fairlead", 4)
	intruder := w.kubeProxy(kubeconfig, "nftables", "table ip kube-proxy")
	w.until("kube-proxy knows a backend", func(context.Context) bool { // unless its table is already gone
		return strings.Contains(p.Log(), "kube-proxy runs beside") || w.translates("kube-proxy")
	})
	if err := intruder.Kill(); err != nil {
		t.Fatal(err)
	}
	w.kubectl("", "scale", "deployment/web", "--replicas=1")
	w.backends("fairlead", 1)

	w.until("kube-proxy's rules are gone", func(context.Context) bool {
		return w.rules() == "table ip fairlead, table ip6 fairlead"
	})
	for range 50 {
		for from, to := range map[testbed.Place]netip.AddrPort{testbed.Outside: nodePort, testbed.Node: webIP} {
			if !w.answers(from, to) {
				t.Fatalf("from %s: no answer from %s", from, to)
			}
		}
	}
	w.event("Node node", "KubeProxyReturned", "nftables ip kube-proxy")
	if n := strings.Count(p.Log(), "kube-proxy runs beside Fairlead, or has run"); n != 1 {
		t.Errorf("the log says %d times that kube-proxy is back", n)
	}
	if got := w.page(p, metricsAt, "/metrics"); !strings.Contains(got, "fairlead_kube_proxy_returns_total ") ||
		strings.Contains(got, "fairlead_kube_proxy_returns_total 0") {
		t.Error("fairlead_kube_proxy_returns_total is 0")
	}
}

// translates reports whether a table has rules that translate to pods.
func (w *realCluster) translates(table string) bool {
	out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "table", "ip", table).CombinedOutput()
	return err == nil && strings.Contains(string(out), "dnat ")
}

// Where FORWARD has the policy DROP, as Docker sets it, NodePorts and open connections need what
// kube-proxy accepts there.
func TestKubeProxy_forwardDrops(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"legacy", "nft"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			w := newRealCluster(t)
			if out, err := w.bed.Command(t.Context(), testbed.Node, "/usr/sbin/xtables-"+backend+"-multi",
				"iptables", "-P", "FORWARD", "DROP").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			files := w.kubeadm()
			w.mount(files)
			p := w.start()
			w.logged(p, "level=WARN", "FORWARD lets nothing pass that no rule accepts", "iptables-"+backend+" ip")
			w.event("Node node", "ForwardingBlocked", "have the CNI plug-in")
		})
	}
}
