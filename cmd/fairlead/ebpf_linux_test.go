package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// machine is a world whose node has cgroups, and a file system of type bpf, of its own.
type machine struct {
	*world
	mounts string // its mount namespace
	pinned string // its directory of pins
}

func newMachine(t *testing.T) machine {
	w := newWorldOf(t, testbed.Spec{Cgroup: true})
	alone(t)
	w.write("own.yaml", strings.NewReplacer("web", "own", "NodePort", "ClusterIP", ", nodePort: 30080", "", "10.96.0.10", "10.96.0.12",
		"8080", "8081").Replace(web))
	const run = "mount -t bpf bpf /sys/fs/bpf && echo mounted && exec sleep infinity"
	holder := w.bed.Command(t.Context(), testbed.Node, "unshare", "--mount", "sh", "-c", run)
	out, err := holder.StdoutPipe()
	if err == nil {
		err = holder.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("mount: %q, %v", line, err)
	}
	process := fmt.Sprintf("/proc/%d/", holder.Process.Pid)
	m := machine{w, process + "ns/mnt", process + "root" + "/sys/fs/bpf/" + ebpf.PinsDir}
	w.inside = []string{"nsenter", "--mount=" + m.mounts, "--root=" + process + "root", "--wd=" + process + "root", "--"}
	return m
}

// pins are the names of what is pinned on the node.
func (m machine) pins() string {
	m.Helper()
	entries, err := os.ReadDir(m.pinned)
	if err != nil && !os.IsNotExist(err) {
		m.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// tablesOfIPv4 are the names of those of planes, sorted.
func (w *world) tablesOfIPv4() string {
	w.Helper()
	var names []string
	for line := range strings.Lines(w.tables()) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "table ip "); ok && !strings.HasPrefix(name, "fairlead-outcomes") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// everywhere are clients and their destinations in the tests of the data plane ebpf. The node's connections go to
// another port of the pods: clients behind source NAT have the node's address, too, and ports of the same range in a
// testbed. And a pod does not take a connection from the address and port of one that has just ended.
func everywhere() map[testbed.Place]netip.AddrPort {
	return map[testbed.Place]netip.AddrPort{
		testbed.Node: netip.MustParseAddrPort("10.96.0.12:80"), "pod-a": clusterIP, testbed.Outside: nodePort, "pod-b": nodePort,
	}
}

// watch has clients connect to their addresses, each once in an interval.
func (w *world) watch(interval time.Duration, clients map[testbed.Place]netip.AddrPort) *traffic.Watch {
	w.Helper()
	var visits []traffic.Path
	for from, to := range clients {
		visits = append(visits, traffic.Path{From: from, To: to})
	}
	return watch(w, w.bed, interval, visits...)
}

// watch has clients connect on some paths, each once in an interval.
func watch(t testing.TB, bed *testbed.Bed, interval time.Duration, visits ...traffic.Path) *traffic.Watch {
	t.Helper()
	w, err := traffic.StartWatch(t.Context(), bed, traffic.WatchSpec{Visits: visits, Interval: interval, Timeout: eventually.Patience()})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestRun_ebpf changes between the data plane ebpf and each other one while connections are made all the time. Open ones,
// made under whichever, go on.
func TestRun_ebpf(t *testing.T) {
	w := newMachine(t)
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	w.configure("ebpf", "")
	p := w.start(flags...)
	load := w.watch(10*time.Millisecond, everywhere())
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	modes := []string{"nftables", "ebpf", "iptables", "ebpf", "ebpf"}
	for i, mode := range modes {
		for from, to := range everywhere() {
			open = append(open, w.dial(from, to))
		}
		w.configure(mode, "")
		if restart := i >= 3; restart {
			_ = p.Process.Kill()
			_ = p.Wait()
			p = w.start(flags...)
		}
		metrics := netip.MustParseAddrPort("127.0.0.1:10249")
		eventually.Equal(w, "/proxyMode", mode, func() string {
			_, body := w.page(metrics, "/proxyMode")
			return body
		})
		// Open connections of another mode keep what they need: programs without rows, with a table that keeps others
		// from their ports, and hooks of connection tracking.
		pins := map[bool]string{true: "links memory netns", false: "links memory netns retired"}[mode == "ebpf"]
		eventually.Equal(w, "pins in mode "+mode, pins, w.pins)
		tables := map[string]string{
			"nftables": "fairlead fairlead-ebpf-ports", "iptables": "fairlead-ebpf-ports filter nat", "ebpf": "fairlead",
		}[mode]
		eventually.Equal(w, "tables in mode "+mode, tables, w.tablesOfIPv4)
		if err := load.Settle(t.Context(), 20); err != nil {
			t.Error(err)
		}
		for _, c := range open {
			w.talksOver(c, "in mode "+mode)
		}
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 400 {
		t.Errorf("while the data plane changed: %s", r)
	}
	_ = p.Process.Kill()
	_ = p.Wait()
	w.sparesPins()
	w.runs("fairlead", "clean", 0, "nftables: removed what there was", "ebpf: removed what there was")
	if left := w.pins() + w.tables(); left != "" {
		t.Errorf("after fairlead clean there is %s", left)
	}
}

// TestRun_ebpfRights has no more than is said to be needed. A process in another mode, which has less, removes what is
// left all the same.
func TestRun_ebpfRights(t *testing.T) {
	w := newMachine(t)
	before := w.inside
	w.inside = slices.Concat(before, []string{"setpriv", "--bounding-set=-all,+net_admin,+bpf,+perfmon"})
	out := w.runs("fairlead", "run --manifests DIR --once --proxy-mode ebpf --node-ip 192.0.2.1 --conntrack-max-per-core 0 "+
		"--cgroup-root "+w.bed.Cgroup(), 0, "msg=programmed")
	if strings.Contains(out, "level=ERROR") || strings.Contains(out, "level=WARN") {
		t.Error(out)
	}
	w.inside = slices.Concat(before, []string{"setpriv", "--bounding-set=-all,+net_admin"})
	w.runs("fairlead", "run --manifests DIR --once --proxy-mode nftables --node-ip 192.0.2.1 --conntrack-max-per-core 0",
		0, "removed the leftovers of another data plane")
	if left := w.pins(); left != "" {
		t.Errorf("there is %s", left)
	}
}

// sparesPins has another node, which shares the file system, clean up and begin.
func (m machine) sparesPins() {
	m.Helper()
	before := m.pins()
	out, err := m.commandOn("node-b", "clean").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "nothing was left") || m.pins() != before {
		m.Errorf("clean on another node: %v\n%s\nthere were pins %s, now %s", err, out, before, m.pins())
	}
	out, err = m.commandOn("node-b", "run", "--once", "--proxy-mode", "ebpf", "--cgroup-root", m.bed.Cgroup(),
		"--manifests", m.manifests, "--node-ip", "192.0.2.2", "--control-socket", "").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "has the pins of another node") {
		m.Errorf("run on another node: %v\n%s", err, out)
	}
}

// Where the machine lacks what mode ebpf needs, the node has Services all the same, and one line says what is missing.
func TestRun_ebpfInstead(t *testing.T) {
	w := newMachine(t)
	const container = "mount -t cgroup2 cgroup2 /mnt && exec \"$0\" \"$@\""
	for _, c := range []struct {
		args, want string
		inside     []string
	}{
		{"--cgroup-root CGROUP --bpf-root DIR", "there is no file system of type bpf", nil},
		{"--cgroup-root DIR", "is no cgroup of version 2", nil},
		{"--cgroup-root /mnt", "is not the root of the machine's cgroups but that of this container",
			[]string{"unshare", "--cgroup", "--mount", "sh", "-c", container}},
		{"--cgroup-root CGROUP", "this process lacks CAP_BPF, CAP_PERFMON: operation not permitted",
			[]string{"setpriv", "--bounding-set=-bpf,-perfmon,-sys_admin"}},
	} {
		before := w.inside
		w.inside = slices.Concat(before, c.inside)
		args := strings.ReplaceAll("run --manifests DIR --once --proxy-mode ebpf --node-ip 192.0.2.1 "+
			"--conntrack-max-per-core 0 "+c.args, "CGROUP", w.bed.Cgroup())
		out := w.runs("fairlead", args, 0, c.want, "the data plane nftables serves instead")
		if n := strings.Count(out, "level=WARN"); n != 1 {
			t.Errorf("%s: there are %d warnings in\n%s", c.args, n, out)
		}
		w.inside = before
		if got := w.tablesOfIPv4() + w.pins(); got != "fairlead" {
			t.Errorf("%s: there is %s", c.args, got)
		}
		w.reaches("pod-b") // once in a while
	}
}

// TestRun_ebpfImpossible edits what the machine cannot do: what works stays. After a start another plane serves, and the
// status says so until the plane changes.
func TestRun_ebpfImpossible(t *testing.T) {
	w := newMachine(t)
	w.configure("ebpf", "")
	flags := []string{"--config", w.config()}
	p := w.start(flags...)
	pins := w.pins()
	w.ebpf("bpfRoot: " + t.TempDir())
	p.await("the configuration was refused; the old one stays")
	if r := w.status(); r.Plane != "ebpf" || !strings.Contains(r.ConfigurationRefused, "no file system of type bpf") {
		t.Errorf("the status is %+v", r)
	}
	if got := w.pins(); got != pins {
		t.Errorf("there was %s, and is %s", pins, got)
	}
	w.answers()
	p.end()
	p = w.start(flags...)
	if r := w.serves("nftables", "ebpf"); !strings.Contains(r.Why, "nftables serves instead") {
		t.Errorf("the status is %+v", r)
	}
	w.configure("ebpf", "iptables: {masqueradeBit: 20}\n") // which concerns what serves instead
	eventually.True(t, "the other bit", func() bool { return strings.Contains(w.ruleset(), "0x00100000") })
	if r := w.serves("nftables", "ebpf"); !strings.Contains(r.Why, "nftables serves instead") {
		t.Errorf("after an edit the status is %+v", r)
	}
	w.switchTo("iptables", 0)
	if r := w.serves("iptables", "ebpf"); r.Why != "" {
		t.Errorf("after a switch the status is %+v", r)
	}
	p.end()
}

// TestRun_ebpfAffinity: sockets are remembered by their network namespace, and explain finds it by its address.
func TestRun_ebpfAffinity(t *testing.T) {
	w := newMachine(t)
	w.write("web.yaml", strings.Replace(web, "type: NodePort", "type: NodePort\n  sessionAffinity: ClientIP", 1))
	w.start("--proxy-mode", "ebpf", "--cgroup-root", w.bed.Cgroup())
	process := w.bed.Command(t.Context(), "pod-a", "sleep", "infinity") // as a pod has, but not one of a testbed
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	}()
	backends := map[string]string{"pod-a": "10.244.1.2:8080", "pod-b": "10.244.2.2:8080"}
	for from, to := range map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, "pod-a": clusterIP, testbed.Outside: nodePort} {
		who := backends[w.probe(from, to)]
		status, out := w.execute("explain", w.bed.Addr(from, false).String(), to.String(), "--control-socket", w.socket)
		if want := "session affinity: the client keeps " + who; status != 0 || who == "" || !strings.Contains(out, want) {
			t.Errorf("from %s: exit status %d, no %q in\n%s", from, status, want, out)
		}
	}
}

// TestRun_ebpfSizes: tables are as large as is configured, also when that changes, and connections live on.
func TestRun_ebpfSizes(t *testing.T) {
	w := newMachine(t)
	w.configure("ebpf", "")
	const first = "affinities 5000, flows 6000, sockets 8192, translations 9000"
	w.sizes("affinities: 5000, flows: 6000, sockets: 7000, translations: 9000")
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	eventually.Equal(w, "tables", first, w.capacities)
	var open []net.Conn
	for from, to := range everywhere() {
		c := w.dial(from, to)
		defer c.Close()
		open = append(open, c)
	}
	for _, change := range []struct{ sizes, want string }{
		{"translations: 20000, sockets: 8193, flows: 4096", "affinities 65536, flows 4096, sockets 16384, translations 20000"},
		{"affinities: 5000, flows: 6000, sockets: 7000, translations: 9000", first},
	} {
		w.sizes(change.sizes)
		eventually.Equal(w, "tables", change.want, w.capacities)
		for _, c := range open {
			w.talksOver(c, change.sizes)
		}
	}
}

// sizes has the configuration say how much mode ebpf remembers.
func (m machine) sizes(sizes string) {
	m.Helper()
	m.ebpf("sizes: {" + sizes + "}")
}

// ebpf has the configuration say something of that mode.
func (w *world) ebpf(says string) {
	w.Helper()
	text := "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\nebpf: {" + says + "}\n"
	path := filepath.Join(filepath.Dir(w.config()), "fairlead.conf")
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

// capacities are those of the tables that outlive programs.
func (m machine) capacities() string {
	m.Helper()
	_, out := m.execute("dump", "--counters", "--control-socket", m.socket)
	var all []string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "table" || !slices.Contains([]string{"affinities", "flows", "sockets", "translations"}, f[1]) {
			continue
		}
		all = append(all, f[1]+" "+f[3])
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// TestDump_counters asks the running process what backends got, and all together.
func TestDump_counters(t *testing.T) {
	w := newMachine(t)
	w.configure("ebpf", "")
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	c := w.dial(testbed.Outside, nodePort)
	if err := errors.Join(talk(c), c.Close()); err != nil {
		t.Error(err)
	}
	_, out := w.execute("dump", "--counters", "--control-socket", w.socket)
	for _, want := range []string{"\nserved default/web cluster 10.244.", "\ntable slots capacity "} {
		if !strings.Contains("\n"+out, want) {
			t.Errorf("%q is missing among what was counted:\n%s", want, out)
		}
	}
	_, body := w.page(netip.MustParseAddrPort("127.0.0.1:10249"), "/metrics")
	for _, want := range []string{
		"\nfairlead_served_connections_total 1\n", "\nfairlead_served_packets_total{to=\"backend\"} ",
		"\nfairlead_refused_connections_total{reason=\"no-endpoints\",verdict=\"reject\"} 0\n", "\nfairlead_table_bytes{table=\"slots\"} ",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("%q is missing among the metrics:\n%s", want, body)
		}
	}
}
