package main

import (
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
)

// TestSwitch_portsComeRound has a client use its source ports again after the data plane has changed, as one does that
// opens many connections. Connection tracking still knows those that have ended.
func TestSwitch_portsComeRound(t *testing.T) {
	w := newMachine(t)
	if _, err := w.bed.AddPod(t.Context(), testbed.PodSpec{Name: "client"}); err != nil {
		t.Fatal(err)
	}
	// A firewall has connections tracked also when no data plane needs that.
	w.on(testbed.Node, "nft", "add table ip firewall; add chain ip firewall forward { type filter hook forward priority 0; }; "+
		"add rule ip firewall forward ct state invalid drop")
	w.configure("nftables", "")
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	connectAll := func(plane string) {
		for port := range uint16(20) { // a new connection to a port's former backend is what may fail
			p := testbed.Probe{From: "client", To: clusterIP, SourcePort: 20000 + port}
			if o, err := w.bed.Probe(t.Context(), p); err != nil || o.Result != testbed.Answered {
				t.Errorf("%s: port %d: %v, %v", plane, p.SourcePort, o, err)
			}
		}
	}
	connectAll("nftables")
	for _, plane := range []string{"ebpf", "iptables", "ebpf"} {
		w.switchTo(plane, 0)
		connectAll(plane)
	}
}
