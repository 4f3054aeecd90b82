package main

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

func TestAudit(t *testing.T) {
	w := newWorld(t)
	ask := func(status int, args string, has ...string) {
		t.Helper()
		args = strings.ReplaceAll(args, "DIR", w.manifests+" --cluster-cidr 10.244.0.0/16 --node-ip 192.0.2.1")
		got, out := w.execute(append([]string{"audit", "--control-socket", w.socket}, strings.Fields(args)...)...)
		if got != status {
			t.Errorf("audit %s: exit status %d, want %d", args, got, status)
		}
		for _, text := range has {
			if !strings.Contains(out, text) {
				t.Errorf("audit %s: no %q in\n%s", args, text, out)
			}
		}
	}
	nft := func(words string) {
		t.Helper()
		c := w.bed.Command(t.Context(), testbed.Node, "nft", strings.Fields(words)...)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v %s", words, err, out)
		}
	}
	ask(1, "", "no proxy listens on "+w.socket, "--manifests")
	ask(2, "-o yaml", "--output")
	ask(1, "--manifests DIR", "the kernel holds no data plane's rules")
	p := w.start()
	ask(0, "", " rows compared with the data plane nftables in ", ": no difference\n")
	ask(0, "-o json", `"plane": "nftables"`, `"drifts": []`)
	nft("delete table ip6 fairlead")
	p.await(`by="nft (process `)
	if err := p.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait() // killed or not, it is over
	ask(0, "--manifests DIR", ": no difference\n")
	nft("flush map ip fairlead frontends")
	for range 2 { // as no agent repairs it
		ask(1, "--manifests DIR", "frontend 10.96.0.10:80/tcp any: missing: forward default/web cluster snat offcluster\n", " differences\n")
	}
	ask(1, "-o json --manifests DIR", `"object": "frontend 10.96.0.10:80/tcp any"`, `"repaired": false`)
}
