package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

// served is a data plane as the configuration names it.
type served struct{ mode, backend string }

func (s served) String() string { return strings.TrimSuffix(s.mode+"-"+s.backend, "-") }

// hostPlanes are those that this kernel may have, whatever it is.
func hostPlanes() []served {
	return []served{{"nftables", ""}, {"iptables", "nf_tables"}, {"ebpf", ""}, {"iptables", "legacy"}, {"userspace", ""}}
}

// busyMachine is a machine with a Service of its own for each client. So no two clients behind source NAT ask the same
// port of a pod. IPVS, and the programs of mode ebpf, tell answers apart by nothing else.
type busyMachine struct {
	machine
	spec traffic.WatchSpec
	p    *proxy
}

// client is a place, and whether it connects to a NodePort. The others connect to ClusterIPs.
type client struct {
	from     testbed.Place
	nodePort bool
}

func clients() []client {
	return []client{
		{testbed.Node, false}, {"client", false}, {"client", true}, {"backend-0", false}, {testbed.Outside, true}, {"far", true},
	}
}

func newBusyMachine(t *testing.T) *busyMachine {
	b := &busyMachine{machine: newMachine(t)}
	b.addPod("client", testbed.Node)
	b.addPod("far", testbed.NodeB)
	var backends []testbed.Place
	for i, node := range []testbed.Place{testbed.Node, testbed.NodeB, testbed.Node, testbed.NodeB} {
		backends = append(backends, b.addPod(fmt.Sprintf("backend-%d", i), node))
	}
	var ports []testbed.PodPort // two for each Service
	var manifests strings.Builder
	for _, c := range clients() {
		for _, sticky := range []bool{false, true} {
			number := len(ports) / 2
			target := uint16(targetPort + number)
			ports = append(ports, testbed.PodPort{Protocol: model.TCP, Port: target}, testbed.PodPort{Protocol: model.UDP, Port: target})
			manifests.WriteString(b.service(number, sticky, backends))
			b.addPaths(c, number, sticky)
		}
	}
	for _, pod := range backends {
		if err := b.bed.Serve(string(pod), ports...); err != nil {
			t.Fatal(err)
		}
	}
	b.write("busy.yaml", manifests.String())
	return b
}

// The ports of the first Service; those of others follow.
const targetPort, firstNodePort = 7000, 31000

func clusterIPOf(number int) string { return fmt.Sprintf("10.96.1.%d", number) }

func (b *busyMachine) addPod(name string, node testbed.Place) testbed.Place {
	b.Helper()
	if _, err := b.bed.AddPod(b.Context(), testbed.PodSpec{Name: name, Node: node}); err != nil {
		b.Fatal(err)
	}
	return testbed.Place(name)
}

// addPaths has a client ask a Service.
func (b *busyMachine) addPaths(c client, number int, sticky bool) {
	for _, v6 := range []bool{false, true} {
		p := traffic.Path{From: c.from, To: netip.AddrPortFrom(address(clusterIPOf(number), v6), 80)}
		if c.nodePort {
			p.To = netip.AddrPortFrom(b.bed.Addr(testbed.Node, v6), uint16(firstNodePort+number))
		}
		if sticky {
			b.spec.Affinity = append(b.spec.Affinity, p)
		} else {
			b.spec.Paths = append(b.spec.Paths, p)
		}
	}
}

func address(v4 string, v6 bool) netip.Addr {
	a := netip.MustParseAddr(v4)
	if v6 {
		return testbed.EmbedV6(a)
	}
	return a
}

// service is one of both families and protocols, with its endpoints.
func (b *busyMachine) service(number int, sticky bool, backends []testbed.Place) string {
	affinity := map[bool]string{true: "ClientIP", false: "None"}[sticky]
	ip, target, nodePort := clusterIPOf(number), targetPort+number, firstNodePort+number
	name := fmt.Sprintf("busy-%d", number)
	text := fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {name: %s}
spec:
  type: NodePort
  sessionAffinity: %s
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  clusterIP: %s
  clusterIPs: [%s, "%s"]
  ports:
  - {name: tcp, port: 80, targetPort: %d, nodePort: %d}
  - {name: udp, port: 80, targetPort: %d, nodePort: %d, protocol: UDP}
`, name, affinity, ip, ip, address(ip, true), target, nodePort, target, nodePort)
	for _, v6 := range []bool{false, true} {
		family := map[bool]string{true: "IPv6", false: "IPv4"}[v6]
		text += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s-%s, labels: {kubernetes.io/service-name: %s}}
addressType: %s
ports: [{name: tcp, port: %d}, {name: udp, port: %d, protocol: UDP}]
endpoints:
`, name, strings.ToLower(family), name, family, target, target)
		for _, pod := range backends {
			text += fmt.Sprintf("- addresses: [\"%s\"]\n", b.bed.Addr(pod, v6))
		}
	}
	return text
}

// choose writes the configuration. Settings other than the mode come first.
func (b *busyMachine) choose(s served) {
	b.Helper()
	if s.backend != "" {
		path := filepath.Join(filepath.Dir(b.config()), "fairlead.conf")
		text := fairleadConf + "iptablesBackend: \"" + s.backend + "\"\n"
		if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
			b.Fatal(err)
		}
	}
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" +
		"clusterCIDR: \"" + testbed.ClusterCIDR() + "\"\nmode: " + s.mode + "\n"
	path := b.config()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		b.Fatal(err)
	}
}

// serve starts the program.
func (b *busyMachine) serve() {
	b.Helper()
	b.p = b.start("--config", b.config(), "--cgroup-root", b.bed.Cgroup(),
		"--node-ip", b.bed.Addr(testbed.Node, true).String(), "--cluster-cidr", testbed.ClusterCIDR())
}

// load starts one when the program serves.
func (b *busyMachine) load() *traffic.Watch {
	b.Helper()
	l, err := traffic.StartWatch(b.Context(), b.bed, b.spec)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Stop() })
	if err := l.Settle(b.Context(), 1); err != nil {
		b.Fatal(err)
	}
	return l
}

// settle waits until all clients have been answered again.
func (b *busyMachine) settle(l *traffic.Watch) {
	b.Helper()
	if err := l.Settle(b.Context(), 2); err != nil {
		b.Error(err)
	}
}

// edit has the running program serve by another plane by editing the configuration, and returns when that does, and the
// former one's rows are gone.
func (b *busyMachine) edit(from, to served) {
	b.Helper()
	b.choose(to)
	if from.mode != to.mode {
		b.p.await("the data plane has changed")
		return
	}
	b.p.await("by a new data plane")
	b.p.await("msg=programmed")
}

// order does it by the command, which knows no back ends.
func (b *busyMachine) order(from, to served) {
	b.Helper()
	if from.mode == to.mode {
		b.edit(from, to)
		return
	}
	if status, out := b.execute("switch", to.mode, "--control-socket", b.socket); status != 0 {
		b.Errorf("switch %s: exit status %d\n%s", to.mode, status, out)
	}
}

// TestRun_pairs switches from a data plane to another one and back under load: no client notices.
func TestRun_pairs(t *testing.T) {
	var pairs [][2]served
	for _, from := range hostPlanes() {
		for _, to := range others(hostPlanes(), from) {
			pairs = append(pairs, [2]served{from, to})
		}
	}
	switchPairs(t, pairs)
}

// switchPairs draws a fifth of the pairs.
func switchPairs(t *testing.T, pairs [][2]served) {
	for _, pair := range sample.Of(t, 5, pairs) {
		t.Run(fmt.Sprintf("%s to %s", pair[0], pair[1]), func(t *testing.T) { thereAndBack(t, pair[0], pair[1]) })
	}
}

// TestRun_pairsIPVS does it with IPVS as one of the two. The test kernel is slow: its clients have more time.
func TestRun_pairsIPVS(t *testing.T) {
	if needIPVS(t) {
		return
	}
	ipvs := served{"ipvs", ""}
	var pairs [][2]served
	for _, other := range hostPlanes() {
		pairs = append(pairs, [2]served{ipvs, other}, [2]served{other, ipvs})
	}
	switchPairs(t, pairs)
}

func thereAndBack(t *testing.T, from, to served) {
	b := newBusyMachine(t)
	if from.mode == "ipvs" || to.mode == "ipvs" {
		b.spec.Interval, b.spec.Pause, b.spec.Timeout = time.Second, 2*time.Second, 40*time.Second
	}
	b.choose(from)
	b.serve()
	l := b.load()
	for _, s := range []struct {
		from, to served
		how      func(from, to served)
	}{{from, to, b.edit}, {to, from, b.order}} {
		l.Mark(fmt.Sprintf("switch to %s", s.to))
		start := time.Now()
		s.how(s.from, s.to)
		t.Logf("switched to %s in %s", s.to, time.Since(start))
		b.settle(l)
		if err := l.Open(12); err != nil {
			t.Error(err)
		}
	}
	b.judge(l.Stop())
}

// judge expects that all clients were answered, no connection ended, and clients with affinity stayed with their pods.
func (b *busyMachine) judge(r traffic.Report) {
	b.Helper()
	all := r.Total()
	if all.Failed+all.Reset+r.Counts[traffic.AffinityTCP].Moved+r.Counts[traffic.AffinityUDP].Moved > 0 {
		b.Error(r)
		return
	}
	b.Log(r)
}
