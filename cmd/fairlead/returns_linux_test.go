package main

import (
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// A kube-proxy that comes beside Fairlead and goes leaves rules that are asked first, as they are later ones, and that
// no process keeps up to date. They must not last.
func TestKubeProxy_returns(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	w.mount(w.kubeadm())
	p := w.start()
	w.kubectl("", "scale", "deployment/web", "--replicas=4")
	w.knows("fairlead", 4)
	intruder := w.kubeProxy("nftables", "kube-proxy nftables")
	eventually.True(w, "kube-proxy knows a backend", func() bool { // unless its table is already gone
		return strings.Contains(p.Log(), "kube-proxy runs beside") || w.translates("kube-proxy")
	})
	if err := intruder.Kill(); err != nil {
		t.Fatal(err)
	}
	w.kubectl("", "scale", "deployment/web", "--replicas=1")
	w.knows("fairlead", 1)

	lookInterval.True(w, "kube-proxy's rules are gone", func() bool {
		return w.rules() == "fairlead iptables-nft"
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

// Where FORWARD has the policy DROP, as Docker sets it, NodePorts and open connections need what kube-proxy accepts
// there. In mode iptables Fairlead accepts it, too.
func TestKubeProxy_forwardDrops(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ tool, backend string }{{"legacy", "legacy"}, {"nft", "nf_tables"}} {
		t.Run(c.tool, func(t *testing.T) {
			t.Parallel()
			w := newRealCluster(t)
			if out, err := w.bed.Command(t.Context(), testbed.Node, "/usr/sbin/xtables-"+c.tool+"-multi",
				"iptables", "-P", "FORWARD", "DROP").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			files := w.kubeadm()
			files["fairlead.conf"] = fairleadConf + "iptablesBackend: " + c.backend + "\n"
			files["config.conf"] = strings.Replace(files["config.conf"], "\nmode: iptables\n", "\nmode: ipvs\n", 1)
			w.mount(files)
			p := w.start()
			w.logged(p, "level=WARN", "FORWARD drops packets of Services that kube-proxy would accept", "iptables-"+c.tool+" ip")
			w.event("Node node", "ForwardingBlocked", "have the CNI plug-in")
			if w.answers(testbed.Outside, nodePort) {
				t.Error("nothing is dropped")
			}
			w.edit(files, "config.conf", "mode: ipvs", "mode: iptables")
			eventually.True(w, "the NodePort answers", func() bool { return w.answers(testbed.Outside, nodePort) })
		})
	}
}
