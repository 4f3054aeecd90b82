package main

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// freeze writes the objects of this version in place of those of the last release. Only a release does that.
var freeze = flag.Bool("freeze", false, "write testdata/frozen")

// adoption is what the last release has left in the kernel in a mode, and how this version starts on it.
type adoption struct {
	name string
	mode string
	more string // of Fairlead's configuration
	// rewritten is how many of its objects this version makes anew. -freeze makes it 0.
	rewritten int
}

// TestAdopts starts on a node that has the objects of the last release, and no process. Rules serve, also while this
// version takes them over. Sessions and flows that are in the kernel stay. Nothing is left that clean does not know.
func TestAdopts(t *testing.T) {
	t.Parallel()
	for _, a := range []adoption{
		{name: "nftables", mode: "nftables", rewritten: 12}, // rules that choose among several maps of slots
		{name: "iptables", mode: "iptables", more: "iptablesBackend: nf_tables\n"},
		{name: "iptables-legacy", mode: "iptables", more: "iptablesBackend: legacy\n"},
		{name: "ipvs", mode: "ipvs", rewritten: 26}, // rules of chains that let health checks pass
		{name: "userspace", mode: "userspace"},
		{name: "ebpf", mode: "ebpf", more: "ebpf: {sizes: {translations: 8192}}\n"}, // else memory and processors count
	} {
		t.Run(a.name, func(t *testing.T) {
			switch {
			case a.name == "ipvs" && *freeze && freezesInside(t) || a.name == "ipvs" && needIPVS(t):
			case *freeze:
				a.freeze(t)
			default:
				a.adopt(t)
			}
		})
	}
}

// freezesInside has the test kernel freeze if this one has no IPVS.
func freezesInside(t *testing.T) bool {
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return false
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := filepath.Abs("testdata/frozen")
	if err != nil {
		t.Fatal(err)
	}
	m := vm.Machine{Stdout: os.Stdout, Stderr: os.Stderr, Shared: []string{dir},
		Args: []string{self, "-test.run", "^TestAdopts$/^ipvs$", "-freeze"}}
	if status, err := m.Run(t.Context()); status != 0 || err != nil {
		t.Errorf("in the test kernel: status %d, %v", status, err)
	}
	return true
}

const sticky = `
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec:
  type: NodePort
  sessionAffinity: ClientIP
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20]
  ports: [{port: 80, targetPort: 8081, nodePort: 30090}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: sticky, labels: {kubernetes.io/service-name: sticky}}
addressType: IPv4
ports: [{port: 8081}]
endpoints:
- addresses: [POD-A]
- addresses: [POD-B]
`

// world has Services whose backend is pod-a, if it is the first one.
func (a adoption) world(t *testing.T, first bool) machine {
	var m machine
	if a.name == "ebpf" {
		m = newMachine(t)
	} else {
		m.world = newWorld(t)
	}
	m.configure(a.mode, "")
	file := filepath.Join(filepath.Dir(m.config()), "fairlead.conf")
	if err := os.WriteFile(file, []byte(fairleadConf+a.more), 0o644); err != nil {
		t.Fatal(err)
	}
	m.kept(first)
	return m
}

// kept writes the Services of which clients keep their backends.
func (m machine) kept(first bool) {
	for name, text := range map[string]string{"dns.yaml": dns, "sticky.yaml": sticky} {
		if first {
			text = strings.Replace(text, "- addresses: [POD-B]\n", "", 1)
		}
		m.write(name, text)
	}
}

// sessions are clients that have pod-a since it was the only backend.
func (m machine) sessions() {
	m.Helper()
	clients := map[testbed.Place]string{testbed.Outside: "192.0.2.1:30090", "pod-b": "10.96.0.20:80"}
	if m.pinned == "" { // which knows others by their network namespaces
		clients[testbed.Node], clients["pod-a"] = "10.96.0.20:80", "10.96.0.20:80"
	}
	for from, to := range clients {
		if who := m.probe(from, netip.MustParseAddrPort(to)); who != "pod-a" {
			m.Errorf("a client on %s had pod-a, and reaches %s", from, who)
		}
	}
}

// flows are datagrams that have gone to pod-a since then, twice, for the first answer may be the last one.
func (m machine) flows() {
	m.Helper()
	for i := range uint16(8) {
		p := testbed.Probe{From: testbed.Outside, To: netip.MustParseAddrPort("192.0.2.1:30053"), Protocol: model.UDP,
			SourcePort: 20000 + i, Timeout: 5 * time.Second}
		for range 2 {
			if o, err := m.bed.Probe(m.Context(), p); err != nil || o.Backend != "pod-a" {
				m.Errorf("datagrams from port %d went to pod-a: %s, %v", p.SourcePort, o, err)
			}
		}
	}
}

func (a adoption) file() string { return filepath.Join("testdata/frozen", a.name+".txtar") }

// freeze writes what a process has left that has ended.
func (a adoption) freeze(t *testing.T) {
	m := a.world(t, true)
	p := m.start("--config", m.config())
	m.sessions()
	m.flows()
	m.kept(false)
	eventually.True(t, "there are two backends", func() bool {
		_, out := m.execute("dump", "--control-socket", m.socket)
		return strings.Contains(out, "sticky cluster 10.244.2.2") && strings.Contains(out, "dns cluster 10.244.2.2")
	})
	if err := p.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	archive := &txtar.Archive{}
	for _, k := range facilities() {
		if text := k.save(m); text != "" {
			archive.Files = append(archive.Files, txtar.File{Name: k.name, Data: []byte(text)})
		}
	}
	if err := os.WriteFile(a.file(), txtar.Format(archive), 0o644); err != nil {
		t.Fatal(err)
	}
}

// thaw makes the frozen objects.
func (a adoption) thaw(m machine) {
	m.Helper()
	archive, err := txtar.ParseFile(a.file())
	if err != nil {
		m.Fatal(err)
	}
	for _, k := range facilities() {
		for _, f := range archive.Files {
			if f.Name == k.name {
				k.load(m, string(f.Data))
			}
		}
	}
}

func (a adoption) adopt(t *testing.T) {
	m := a.world(t, false)
	a.thaw(m)
	before := m.objects()
	var open []net.Conn
	var load *traffic.Watch
	clients := map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, testbed.Outside: nodePort}
	watch := func() *traffic.Watch { return m.watch(20*time.Millisecond, clients) }
	if a.name != "ebpf" && a.name != "userspace" { // the frozen objects serve without a process
		open, load = append(open, m.dial(testbed.Outside, nodePort)), watch()
	}
	p := m.start("--config", m.config())
	m.runs("fairlead", "audit --control-socket "+m.socket, 0)
	a.judge(t, before, m.objects())
	m.sessions()
	if a.name == "ebpf" {
		m.flows()
	}
	for _, c := range open {
		m.talksOver(c, "now there is a process")
	}
	if load == nil {
		load = watch()
	}
	if err := load.More(t.Context(), 100); err != nil {
		t.Error(err)
	}
	if r := load.Stop(); len(r.Faults) > 0 {
		t.Errorf("clients had faults: %s", r)
	}
	p.end()
	m.runs("fairlead", "clean", 0)
	for _, k := range facilities() {
		if left := k.save(m); left != "" && k.name != "sysctl" {
			t.Errorf("clean leaves %s:\n%s", k.name, left)
		}
	}
	if left := m.pins(); left != "" {
		t.Errorf("clean leaves pins: %s", left)
	}
}

// judge counts the objects that were there before and are not the same ones now.
func (a adoption) judge(t *testing.T, before, now map[string]bool) {
	t.Helper()
	var gone []string
	for o := range before {
		if !now[o] {
			gone = append(gone, o)
		}
	}
	if len(gone) != a.rewritten {
		t.Errorf("%d of %d objects were made anew, want %d; if that is meant, say so in the table: %s",
			len(gone), len(before), a.rewritten, fmt.Sprint(gone))
	}
}
