package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

const fairleadConf = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\n"

// TestKubeProxy_planes changes the data plane, and the back end of iptables, while connections are made all the time:
// in a process that runs, and by one that starts after another.
func TestKubeProxy_planes(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	files := w.kubeadm()
	files["config.conf"] = strings.Replace(files["config.conf"], "nodePortAddresses: null", "nodePortAddresses: [all, localhost]", 1)
	files["fairlead.conf"] = fairleadConf
	w.mount(files)
	p := w.start()
	eventually.True(w, "the Service answers", func() bool { return w.answers(testbed.Node, localPort) })
	visits := traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside}, []netip.AddrPort{webIP, nodePort})
	visits = append(visits, traffic.Path{From: testbed.Node, To: localPort})
	load := watch(t, w.bed, 4*time.Millisecond, visits...)
	steps := []struct{ mode, backend, rules, proxyMode string }{
		{"nftables", "", "fairlead nftables", "nftables"},
		{"iptables", "", "fairlead iptables-nft", "iptables"},
		{"iptables", "legacy", "fairlead iptables-legacy", "iptables"},
		{"nftables", "", "fairlead nftables", "nftables"},
		{"iptables", "legacy", "fairlead iptables-legacy", "iptables"},
		{"iptables", "nf_tables", "fairlead iptables-nft", "iptables"},
	}
	for _, restart := range []bool{false, true} {
		mode := "iptables"
		for _, s := range steps {
			files["config.conf"] = strings.Replace(files["config.conf"], "\nmode: "+mode+"\n", "\nmode: "+s.mode+"\n", 1)
			files["fairlead.conf"] = fairleadConf + "iptablesBackend: \"" + s.backend + "\"\n"
			mode = s.mode
			if restart {
				w.kill(p)
			}
			w.mount(files)
			if restart {
				p = w.start()
			}
			eventually.True(w, "what there is, is "+s.rules, func() bool { return w.rules() == s.rules })
			eventually.True(w, "/proxyMode is "+s.proxyMode, func() bool {
				return w.page(p, metricsAt, "/proxyMode") == s.proxyMode
			})
			w.knows("fairlead", 2)
		}
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Errorf("while the data plane changed: %s", r)
	}
	if strings.Contains(p.Log(), "kube-proxy") {
		t.Error("what other planes had left was taken for kube-proxy's")
	}
	if err := p.Terminate(); err != nil {
		t.Error(err)
	}
	w.clean()
	if out, err := w.bed.Command(t.Context(), testbed.Node, "cat", "/proc/sys/net/ipv4/conf/all/route_localnet").Output(); err != nil ||
		strings.TrimSpace(string(out)) != "0" {
		t.Errorf("route_localnet is %s, %v", out, err)
	}
}

// A kube-proxy of the same mode writes the same chains as Fairlead. That is noticed all the same.
func TestKubeProxy_returnsInPlace(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	w.mount(w.kubeadm())
	p := w.start()
	w.knows("fairlead", 2)
	load := watch(t, w.bed, 4*time.Millisecond, traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside}, []netip.AddrPort{webIP})...)
	intruder := w.kubeProxy("iptables", "")
	w.event("Node node", "KubeProxyReturned", "(iptables-nft ip mangle)")
	w.kill(intruder)
	lookInterval.True(w, "kube-proxy's rules are gone", func() bool { return w.rules() == "fairlead iptables-nft" })
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Errorf("while both were there: %s", r)
	}
	if n := strings.Count(p.Log(), "kube-proxy runs beside Fairlead, or has run"); n != 1 {
		t.Errorf("the log says %d times that kube-proxy is back", n)
	}
}
