package main

import (
	"net"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
)

// Beside a running Fairlead, clean refuses, as the agent would restore everything, unless it is forced.
func TestClean_besideRun(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	before := w.ruleset()
	for _, c := range [][2]string{{"fairlead", "clean"}, {"fairlead", "clean --own"}, {"kube-proxy", "--cleanup"}} {
		w.runs(c[0], c[1], 1, "a Fairlead runs here", "stop it first", "fairlead clean --force")
	}
	if after := w.ruleset(); after != before || !strings.Contains(after, "table ip fairlead") {
		t.Errorf("before\n%s\nand now\n%s", before, after)
	}
	w.runs("fairlead", "clean --own --force", 0, "nftables: removed")
	p.await("another program changed Fairlead's rules")
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	w.runs("fairlead", "clean --control-socket "+w.socket, 0, "control socket: removed "+w.socket)
	w.runs("fairlead", "clean --own --control-socket "+w.socket, 0, "nothing was left of Fairlead\n")
	if after := w.ruleset(); after != "" {
		t.Errorf("it has left\n%s", after)
	}
}

// After mode ebpf, open connections go on. Their programs go once they have ended.
func TestClean_ebpf(t *testing.T) {
	w := newMachine(t)
	w.configure("ebpf", "")
	p := w.start("--config", w.config())
	var open []net.Conn
	for from, to := range everywhere() {
		open = append(open, w.dial(from, to))
	}
	p.end()
	w.runs("fairlead", "clean --own", 0, "ebpf: 2 open connections keep what they need")
	for _, c := range open {
		w.talksOver(c, "after clean --own")
		_ = c.Close()
	}
	eventually.True(t, "clean --own removes the rest", func() bool {
		_, out := w.execute("clean", "--own")
		return out == "ebpf: removed what there was\n"
	})
	if left := w.pins() + w.ruleset(); left != "" {
		t.Errorf("it has left\n%s", left)
	}
}
