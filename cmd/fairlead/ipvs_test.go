package main

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
	"fairlead.dev/fairlead/testbed/kubernetes"
	"fairlead.dev/fairlead/testbed/vm"
)

// needIPVS plays a test in the test kernel if this one has no IPVS, and reports whether it did.
func needIPVS(t *testing.T) (played bool) {
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return false
	}
	t.Parallel()
	vm.Replay(t, "IPVS")
	return true
}

// configure writes the configuration files, of which the process has been told.
func (w *world) configure(mode, rest string) {
	w.Helper()
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" +
		"clusterCIDR: 10.244.0.0/16\nmode: " + mode + "\n" + rest
	path := w.config()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) config() string { return filepath.Join(filepath.Dir(w.socket), "config.yaml") }

// servers are the virtual servers as ipvsadm -Ln lists them, without numbers of connections.
func (w *world) servers() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "ipvsadm", "-Ln").CombinedOutput()
	if err != nil {
		w.Fatalf("ipvsadm: %v %s", err, out)
	}
	var servers []string
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 3 && strings.Contains(f[1], ":"):
			servers = append(servers, strings.Join(f, " ")+"\n")
		case len(f) == 6 && len(servers) > 0:
			servers[len(servers)-1] += "  " + strings.Join(f[1:4], " ") + "\n"
		}
	}
	slices.Sort(servers)
	return strings.Join(servers, "")
}

// becomes waits until something is so.
func (w *world) becomes(what, want string, is func() string) {
	w.Helper()
	const timeWait = 2 * time.Minute                                                         // for which IPVS remembers a connection that both sides have closed
	for end := time.Now().Add(timeWait + time.Minute); ; time.Sleep(10 * time.Millisecond) { // nobody announces it
		got := is()
		if got == want {
			return
		}
		if time.Now().After(end) {
			w.Fatalf("%s: there is\n%s\nwant\n%s", what, got, want)
		}
	}
}

// tables are the tables of nf_tables.
func (w *world) tables() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "tables").CombinedOutput()
	if err != nil {
		w.Fatalf("nft: %v %s", err, out)
	}
	return string(out)
}

// localRoutes are those of the data plane ipvs.
func (w *world) localRoutes() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "ip", "route", "show", "table", "local", "proto", "250").CombinedOutput()
	if err != nil {
		w.Fatalf("ip: %v %s", err, out)
	}
	return string(out)
}

// TestRun_ipvs changes between IPVS and other data planes while connections are made all the time. An open one stays with
// IPVS, which goes when that has ended.
func TestRun_ipvs(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	const section = "ipvs: {scheduler: wlc, tcpTimeout: 30m, tcpFinTimeout: 1s}\n"
	w.configure("ipvs", section)
	p := w.start("--config", w.config())
	a, b := w.bed.Addr("pod-a", false), w.bed.Addr("pod-b", false)
	reals := "  " + netip.AddrPortFrom(a, 8080).String() + " Masq 1\n  " + netip.AddrPortFrom(b, 8080).String() + " Masq 1\n"
	want := "TCP 10.96.0.10:80 wlc\n" + reals + "TCP 192.0.2.1:30080 wlc\n" + reals
	w.becomes("ipvsadm -Ln", want, w.servers)
	_, out := w.execute("dump", "--control-socket", w.socket)
	if !strings.Contains(out, "\n# virtual server TCP 10.96.0.10:80 wlc: default/web cluster\n") {
		t.Errorf("dump says\n%s", out)
	}
	load := kubernetes.StartLoad(t.Context(), w.bed, kubernetes.LoadSpec{
		From: []testbed.Place{testbed.Node, testbed.Outside, "pod-a"}, To: []netip.AddrPort{clusterIP, nodePort},
		Interval: 50 * time.Millisecond, Timeout: patience, // where the test kernel itself stands still for a while
	})
	for _, other := range []struct{ mode, tables string }{
		{"nftables", "table ip fairlead\ntable ip6 fairlead\n"},
		{"iptables", ""},
	} {
		conn, err := w.bed.Dial(t.Context(), testbed.Outside, model.TCP, nodePort)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		w.configure(other.mode, "")
		p.await("connections through another data plane live on")
		if err := load.AwaitAnswers(t.Context(), 50); err != nil {
			t.Error(err)
		}
		if _, err := io.WriteString(conn, "more\n"); err != nil {
			t.Error(err)
		}
		_ = conn.Close()
		w.becomes("what is left of IPVS in mode "+other.mode, "", func() string { return w.servers() + w.localRoutes() })
		w.configure("ipvs", section)
		w.becomes("ipvsadm -Ln", want, w.servers)
	}
	t.Log(w.tables())
	if r := load.Stop(); len(r.Failures) > 0 || r.Total() < 100 {
		t.Errorf("while the data plane changed: %s", r)
	}
	if err := p.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = p.Wait()
	w.runs("fairlead", "clean --own", 0, "ipvs: removed what there was")
	if left := w.servers() + w.tables() + w.localRoutes(); left != "" {
		t.Errorf("after fairlead clean there is\n%s", left)
	}
}
