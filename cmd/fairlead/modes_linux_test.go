package main

import (
	"strings"
	"testing"

	"github.com/mdlayher/genetlink"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// The file that kubeadm writes starts the program whatever its mode is, and NodePorts are where that
// mode has them.
func TestKubeProxy_modes(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	written := w.kubeadm()["config.conf"]
	if !strings.Contains(written, "\nmode: iptables\n") {
		t.Fatalf("kubeadm's file has no mode iptables:\n%s", written)
	}
	kernel, err := genetlink.Dial(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer kernel.Close()
	ipvs, warning := "ipvs", ""
	if _, err := kernel.GetFamily("IPVS"); err != nil {
		ipvs, warning = "nftables", "this kernel cannot do what mode ipvs needs; the data plane nftables serves instead"
	}
	for _, c := range []struct {
		mode, plane, warning string
		localhost            testbed.Result
	}{
		{`""`, "iptables", "", testbed.Answered},
		{"iptables", "iptables", "", testbed.Answered},
		{"ipvs", ipvs, warning, testbed.Refused},
		{"nftables", "nftables", "", testbed.Refused},
	} {
		files := w.kubeadm()
		files["config.conf"] = strings.Replace(written, "\nmode: iptables\n", "\nmode: "+c.mode+"\n", 1)
		w.mount(files)
		p := w.start()
		if err := p.Ready(t.Context()); err != nil {
			t.Fatalf("mode %s: %v", c.mode, err)
		}
		for _, probe := range []testbed.Probe{
			{From: testbed.Node, To: webIP}, {From: testbed.Outside, To: nodePort},
		} {
			eventually.True(w, "mode "+c.mode+": an answer from "+probe.To.String(), func() bool {
				return w.answers(probe.From, probe.To)
			})
		}
		o, err := w.bed.Probe(t.Context(), testbed.Probe{From: testbed.Node, To: localPort})
		if err != nil || o.Result != c.localhost {
			t.Errorf("mode %s: %s answers %s, %v; want %s", c.mode, localPort, o, err, c.localhost)
		}
		if got := w.page(p, metricsAt, "/proxyMode"); got != c.plane {
			t.Errorf("mode %s: /proxyMode: %s", c.mode, got)
		}
		if got := aboutMode(p.Log()); len(got) > 1 || !strings.Contains(strings.Join(got, ""), c.warning) ||
			(len(got) > 0) != (c.warning != "") {
			t.Errorf("mode %s: the log should warn once with %q, but has %q", c.mode, c.warning, got)
		}
		if c.warning != "" {
			w.event("Node node", "DataPlaneSubstituted", "the data plane "+c.plane+" serves instead")
		}
		if err := p.Terminate(); err != nil {
			t.Errorf("mode %s: SIGTERM: %v", c.mode, err)
		}
		w.clean()
	}
}

// aboutMode are the warnings of a log that are about the mode.
func aboutMode(log string) (lines []string) {
	for line := range strings.Lines(log) {
		if strings.Contains(line, "level=WARN") && strings.Contains(line, "mode") {
			lines = append(lines, line)
		}
	}
	return lines
}

// clean removes all rules, so that the next process must make them.
func (w *realCluster) clean() {
	w.Helper()
	p := w.start("--cleanup")
	<-p.Ended()
	if got := w.rules(); got != "" {
		w.Fatalf("after --cleanup there is %s\n%s", got, p.Log())
	}
}
