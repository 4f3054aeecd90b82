package main

import (
	"context"
	"flag"
	"net/netip"
	"os"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// freeze writes the rules of this version in place of those of the last release. Only a release does that.
var freeze = flag.Bool("freeze", false, "write testdata/frozen")

// TestAdopts starts on a node that has the rules of the last release in mode iptables, and no process. The rules serve.
// They go on to serve while this version takes them over, which leaves nothing that it does not know.
func TestAdopts(t *testing.T) {
	const file, mode = "testdata/frozen/iptables.rules", "iptables"
	w := newWorld(t)
	if *freeze {
		w.start("--proxy-mode", mode, "--iptables-backend", "nf_tables")
		if err := os.WriteFile(file, []byte(w.on(testbed.Node, "iptables-nft-save")), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	rules, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer rules.Close()
	restore := w.bed.Command(context.WithoutCancel(t.Context()), testbed.Node, "iptables-nft-restore")
	restore.Stdin = rules
	if out, err := restore.CombinedOutput(); err != nil {
		t.Fatalf("iptables-nft-restore: %v: %s", err, out)
	}
	w.on(testbed.Node, "sysctl", "-w", "net.ipv4.conf.all.route_localnet=1") // the rules say that it was set
	open := w.dial(testbed.Outside, nodePort)
	load := w.watch(20*time.Millisecond, map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, testbed.Outside: nodePort})
	p := w.start("--proxy-mode", mode, "--iptables-backend", "nf_tables")
	w.runs("fairlead", "audit --control-socket "+w.socket, 0)
	if err := talk(open); err != nil {
		t.Errorf("the open connection broke: %v", err)
	}
	if err := load.More(t.Context(), 100); err != nil {
		t.Error(err)
	}
	if r := load.Stop(); len(r.Faults) > 0 {
		t.Errorf("clients had faults: %s", r)
	}
	_ = p.Process.Kill()
	_ = p.Wait()
	w.runs("fairlead", "clean", 0)
	if left := w.on(testbed.Node, "sh", "-c", "iptables-nft-save | grep -c KUBE- || true"); left != "0\n" {
		t.Errorf("clean leaves %s lines", left)
	}
}
