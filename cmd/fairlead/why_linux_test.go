package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// ask runs a command that asks the running proxy, and returns its exit status and what it prints, without numbers that
// differ from run to run.
func (w *world) ask(words ...string) (int, string) {
	w.Helper()
	status, out := w.execute(append(words, "--control-socket", w.socket)...)
	out = regexp.MustCompile(`[0-9.]+[mµ]?s\b`).ReplaceAllString(out, "TIME")
	return status, out
}

// says expects an exit status, and that a line has each of some texts.
func (w *world) says(status int, texts []string, words ...string) {
	w.Helper()
	got, out := w.ask(words...)
	if got != status {
		w.Errorf("%v: exit status %d, not %d:\n%s", words, got, status, out)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			w.Errorf("%v does not say %q, but:\n%s", words, text, out)
		}
	}
}

// TestServices asks a running proxy about a Service that works.
func TestServices(t *testing.T) {
	w := newWorld(t)
	w.start("--proxy-mode", "userspace")
	w.reaches("pod-a")
	a, b := w.bed.Addr("pod-a", false).String()+":8080", w.bed.Addr("pod-b", false).String()+":8080"
	w.says(0, []string{"SERVICE", "default/web", "10.96.0.10:80, NodePort 192.0.2.1:30080", "2 ready", a + ": ready", b + ": ready"},
		"services", "web")
	w.says(0, []string{`"address": "10.96.0.10:80"`, `"connections": `}, "services", "-o", "json")
	w.says(0, []string{"default/web", a, b, "in TIME"}, "probe", "web")
	w.says(0, []string{"default/web: it works from this node", "counted"}, "why", "default/web")
	w.says(1, []string{"default/nothing: the proxy has no such Service"}, "services", "nothing")
	w.says(1, []string{"default/nothing: the proxy has no such Service"}, "services", "nothing", "--watch")
	w.says(2, []string{"none of text, json, wide, yaml"}, "services", "-o", "xml")
	w.says(0, []string{"Service default/web answers, from one of 2 backends."},
		"explain", "node", "svc/default/web")
	w.says(0, []string{"Service default/web answers"}, "explain", "192.0.2.9", "node:30080")
	w.says(0, []string{"-> 10.96.0.10:80/tcp: forward"}, "explain", "node", "web.default.svc.cluster.local:80")
	w.says(2, []string{"there is no Service shop/cart here"}, "explain", "node", "svc/shop/cart:http")
}

// TestOutput_full: what cannot be written is a failure, as of "fairlead dump >rows.txt" on a disk that is full.
func TestOutput_full(t *testing.T) {
	w := newWorld(t)
	w.start("--proxy-mode", "userspace")
	w.reaches("pod-a")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, words := range []string{"dump", "status", "services", "services -o yaml", "audit", "config"} {
		c := w.command(append(strings.Fields(words), "--control-socket", w.socket)...)
		c.Stdout = full
		if err := c.Run(); c.ProcessState.ExitCode() != 1 {
			t.Errorf("%s: %v, not exit status 1", words, err)
		}
	}
}

// TestServices_counters: mode nftables counts connections of ports by itself, and of backends if it is told to.
func TestServices_counters(t *testing.T) {
	for _, args := range [][]string{nil, {"--counters", "backends"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) { testCounters(t, args...) })
	}
}

func testCounters(t *testing.T, args ...string) {
	w := newWorld(t)
	w.start(append(args, "--proxy-mode", "nftables")...)
	w.says(0, []string{"default/web: it works from this node", "the data plane has counted the connections"}, "why", "default/web")
	w.says(0, []string{`"connections": 1`}, "services", "web", "-o", "json")
	w.says(0, []string{"no difference"}, "audit")
}

// TestWhy has a Service fail in one way after another. The first line names the cause.
func TestWhy(t *testing.T) {
	w := newWorld(t)
	config := filepath.Join(t.TempDir(), "config.yaml")
	valid := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" +
		"clusterCIDR: \"" + testbed.ClusterCIDR() + "\"\nmode: nftables\n"
	if err := os.WriteFile(config, []byte(valid), 0o644); err != nil {
		t.Fatal(err)
	}
	p := w.start("--config", config)
	works := "default/web: it works from this node"
	w.because(works)

	w.write("web.yaml", web[:strings.Index(web, "---\napiVersion: discovery")])
	w.because("default/web: it has no endpoints: its selector matches no pod, or it has no selector")
	w.write("web.yaml", strings.ReplaceAll(web, "ports: [{port: 8080}]", "ports: [{name: http, port: 8080}]"))
	w.because(`default/web: port 80/tcp has no endpoints: its EndpointSlices have no port "" for tcp, only "http" for tcp`)
	w.write("web.yaml", strings.ReplaceAll(web, "]\n- ", "]\n  conditions: {ready: false}\n- ")+"  conditions: {ready: false}\n")
	w.because("default/web: port 80/tcp has no endpoint that takes connections: is not ready (2)")
	w.write("web.yaml", strings.ReplaceAll(strings.ReplaceAll(web, "port: 8080}]\nend", "port: 8099}]\nend"), "- addresses: [POD-B]\n", ""))
	w.because("default/web: endpoint " + w.bed.Addr("pod-a", false).String() +
		":8099 of port 80/tcp is ready by its EndpointSlice, and refuses connections (1 of 1)")

	w.write("web.yaml", strings.Replace(web, "spec:\n  type: NodePort", limited, 1))
	w.because("default/web: 1 warning, else it works from this node")
	w.says(0, []string{"203.0.113.7:80 (LoadBalancer IP) is for clients of 198.51.100.0/24 only"}, "why", "web")
	w.write("web.yaml", web)
	w.because(works)
	if err := os.WriteFile(config, []byte(valid+"bindAddress: nonsense\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p.await("the configuration was refused")
	w.says(0, []string{"default/web: 1 warning, else it works from this node", "the configuration is refused"}, "why", "web")
	w.says(0, []string{"refused, the one before stays"}, "status")
	w.vandalised()
	_ = p.Process.Kill()
	_ = p.Wait()
	w.says(1, []string{"default/web: no proxy listens on"}, "why", "web")
}

// limited is a load balancer for clients of one range.
const limited = `status: {loadBalancer: {ingress: [{ip: 203.0.113.7}]}}
spec:
  type: LoadBalancer
  loadBalancerSourceRanges: [198.51.100.0/24]`

// vandalised has another program delete the row of the ClusterIP again and again until why names that as the cause.
func (w *world) vandalised() {
	w.Helper()
	ctx, stop := context.WithCancel(w.Context())
	var vandal sync.WaitGroup
	vandal.Go(func() {
		for ctx.Err() == nil {
			const row = "delete element ip fairlead frontends { 10.96.0.10 . tcp . 80 }"
			_ = w.bed.Command(ctx, testbed.Node, "nft", row).Run() // which fails until the row is repaired
		}
	})
	eventually.Nil(w, "why web", func() error {
		_, out := w.ask("why", "web")
		if cause, _, _ := strings.Cut(out, "\n"); !strings.Contains(cause, "nft (process ") {
			return errors.New(out)
		}
		return nil
	})
	stop()
	vandal.Wait()
}

// because waits until the first line of why is that.
func (w *world) because(want string) {
	w.Helper()
	eventually.Equal(w, "why web", want, func() string {
		_, out := w.ask("why", "web")
		first, _, _ := strings.Cut(out, "\n")
		return first
	})
}
