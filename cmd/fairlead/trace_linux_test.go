package main

import (
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// nameServer is a Service of UDP.
const nameServer = `
apiVersion: v1
kind: Service
metadata: {name: dns}
spec:
  clusterIP: 10.96.0.11
  clusterIPs: [10.96.0.11]
  ports: [{port: 53, targetPort: 5353, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{port: 5353, protocol: UDP}]
endpoints:
- addresses: [POD-A]
`

func TestTrace(t *testing.T) {
	for _, plane := range []string{"nftables", "iptables", "userspace"} {
		t.Run(plane, func(t *testing.T) {
			w := newWorld(t)
			w.traces(plane)
			w.misled(plane)
		})
	}
}

func TestTrace_IPVS(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	w.traces("ipvs")
	w.misled("ipvs")
}

func TestTrace_eBPF(t *testing.T) { newMachine(t).traces("ebpf") }

// traces sends packets that go where they should.
func (w *world) traces(plane string) {
	w.Helper()
	w.write("dns.yaml", nameServer)
	w.start("--proxy-mode", plane)
	w.reaches("pod-a")
	pod := "web-" + plane
	sleeper := w.bed.Command(w.Context(), "pod-a", "sleep", "infinity")
	sleeper.Env = append(os.Environ(), "HOSTNAME="+pod)
	if err := sleeper.Start(); err != nil {
		w.Fatal(err)
	}
	for _, source := range []string{"node", "pod/default/" + pod} {
		for _, to := range []string{"svc/default/web", "svc/default/dns"} {
			w.says(0, []string{": answered\n", "explain    Service default/", "They agree.\n"}, "trace", source, to)
		}
		w.says(1, []string{": refused\n", "is a ClusterIP, but not on this port", "They agree.\n"}, "trace", source, "10.96.0.10:81")
	}
	w.says(0, []string{`"result": "answered"`, `"backend": "10.244.`}, "trace", "node", "10.96.0.10:80", "-o", "json")
	w.says(2, []string{"no process of pod/default/nobody is seen here"}, "trace", "pod/default/nobody", "10.96.0.10:80")
	w.says(2, []string{"only TCP and UDP"}, "trace", "node", "10.96.0.10:80/sctp")
	if plane == "nftables" {
		w.says(0, []string{"table ip fairlead, chain output, rule ", "goto ", "conntrack "}, "trace", "node", "svc/default/web")
		out, _ := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "tables").CombinedOutput()
		if strings.Contains(string(out), "fairlead-trace") {
			w.Errorf("a table is left:\n%s", out)
		}
		w.tracesBesideOthers()
	}
}

// tracesBesideOthers sends a packet while another program has others traced all the time.
func (w *world) tracesBesideOthers() {
	w.Helper()
	nft := func(words string) {
		w.Helper()
		if out, err := w.bed.Command(w.Context(), testbed.Node, "nft", words).CombinedOutput(); err != nil {
			w.Fatalf("nft %s: %v %s", words, err, out)
		}
	}
	nft("table ip others { chain output { type filter hook output priority -320; udp dport 9 meta nftrace set 1; }; }")
	defer nft("delete table ip others")
	var conn net.Conn
	err := w.bed.Do(testbed.Node, func() (err error) { conn, err = net.Dial("udp", "192.0.2.1:9"); return err })
	if err != nil {
		w.Fatal(err)
	}
	const packets = 20_000
	var noise sync.WaitGroup
	var sent atomic.Int64
	noise.Go(func() {
		for next := time.NewTicker(time.Millisecond); sent.Load() < packets; sent.Add(1) {
			<-next.C
			_, _ = conn.Write([]byte{0}) // no socket listens
		}
	})
	status, out := w.ask("trace", "node", "svc/default/web")
	if status != 0 || strings.Contains(out, "table ip others") || !strings.Contains(out, "table ip fairlead") || sent.Load() >= packets {
		w.Errorf("beside %d traced packets of others: exit status %d\n%s", sent.Load(), status, out)
	}
	sent.Store(packets)
	noise.Wait()
	_ = conn.Close()
}

// misled has rules of another program in the way.
func (w *world) misled(plane string) {
	w.Helper()
	pod := w.bed.Addr("pod-a", false).String()
	for rule, says := range map[string]string{
		"type nat hook output priority -120; ip daddr 10.96.0.10 tcp dport 80 dnat to " + pod + ":8081": "it went to " + pod +
			":8081, which is none of the backends",
		"type filter hook output priority -250; ip daddr 10.96.0.10 drop": "a backend should get it, and none did; it was not answered",
	} {
		if plane == "userspace" && strings.Contains(rule, "dnat") {
			continue // its rules come first
		}
		nft := func(words string) {
			w.Helper()
			c := w.bed.Command(w.Context(), testbed.Node, "nft", words)
			if out, err := c.CombinedOutput(); err != nil {
				w.Fatalf("nft %s: %v %s", words, err, out)
			}
		}
		nft("table ip other { chain output { " + rule + "; }; }")
		w.says(1, []string{"They contradict each other: " + says, "fairlead report"}, "trace", "node", "10.96.0.10:80", "--timeout", "300ms")
		nft("delete table ip other")
	}
	w.says(0, []string{"They agree."}, "trace", "node", "10.96.0.10:80")
}
