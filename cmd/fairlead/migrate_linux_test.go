package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/plugin/migrate"
)

// dump is what kubectl shows of a cluster in mode ipvs.
const dump = `
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: kube-proxy, namespace: kube-system}
  data:
    config.conf: |
      apiVersion: kubeproxy.config.k8s.io/v1alpha1
      kind: KubeProxyConfiguration
      mode: ipvs
      ipvs: {scheduler: sh, strictARP: true, tcpTimeout: 15m}
      iptables: {masqueradeAll: true}
- apiVersion: v1
  kind: Node
  metadata: {name: old}
  status: {nodeInfo: {kernelVersion: 5.4.0-100-generic, operatingSystem: linux}}
- apiVersion: v1
  kind: Service
  metadata:
    name: cart
    namespace: shop
    annotations: {kube-router.io/service.scheduler: lc, service.cilium.io/src-ranges-policy: deny}
  spec:
    type: LoadBalancer
    clusterIP: 10.96.0.20
    sessionAffinity: ClientIP
    loadBalancerSourceRanges: [198.51.100.0/24]
    externalIPs: [192.0.2.77]
    healthCheckNodePort: 31000
    ports: [{name: t, port: 80, nodePort: 30090}, {name: u, port: 80, protocol: UDP}]
`

// TestMigrate_dump looks at a cluster without a node.
func TestMigrate_dump(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "dump.yaml")
	if err := os.WriteFile(file, []byte(dump), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   string
		status int
		has    []string
		hasNot string
	}{
		{"--to nftables", 1, []string{
			"kube-proxy ipvs to Fairlead nftables: ", "2 blocking", "found by --manifests, ConfigMap kube-system/kube-proxy; 1 Service\n",
			"blocks   kernel: older than Linux 5.13, which this mode needs\n           5.4.0-100-generic\n",
			"blocks   service.cilium.io/src-ranges-policy", "changes  ipvs.scheduler sh, dh, mh: ", `ipvs.scheduler: "sh"`,
			"changes  ipvs.tcpTimeout", "ipvs.tcpTimeout: 15m0s", "changes  nodePortAddresses: unset", "iptables.masqueradeAll: true",
			"changes  kube-router.io/service.scheduler: random", "note     ipvs.strictARP", "note     sessionAffinity: ",
			"note     externalIPs", "note     loadBalancerSourceRanges", "note     healthCheckNodePort", "note     ports of UDP",
			"changes  firewall: packets to Services pass FORWARD",
		}, "kube-ipvs0"},
		{"", 1, []string{"kube-proxy ipvs to Fairlead iptables: ", "1 blocking"}, "kernel: older"},
		{"--to ipvs -o json", 1, []string{`"mode": "ipvs"`, `"to": "ipvs"`, `"severity": "blocks"`, `"Service shop/cart"`}, "strictARP"},
		{"--to ebpf", 1, []string{"note     source ports: masqueraded clients have those outside"}, "rules of others"},
		{"--to nftables -o json", 1, []string{`"to": "nftables"`}, "source ports"},
		{"--to windows", 2, []string{`"windows" is none of`}, "Service"},
		{"--watch 1s --apply", 2, []string{"none of the others can be"}, "Service"},
	} {
		status, out := migrateHere(t, append(strings.Fields(c.args), "--manifests", file)...)
		if status != c.status || strings.Contains(out, c.hasNot) {
			t.Errorf("migrate %s: exit status %d, not %d, or there is %q:\n%s", c.args, status, c.status, c.hasNot, out)
		}
		for _, text := range c.has {
			if !strings.Contains(out, text) {
				t.Errorf("migrate %s: no %q in\n%s", c.args, text, out)
			}
		}
	}
}

// TestMigrate_finds has nodes with what proxies leave in the kernel, and their ConfigMaps.
func TestMigrate_finds(t *testing.T) {
	const (
		isCilium, isRouter = "ip link add cilium_host type veth peer name cilium_net", "ip link add kube-dummy-if type bridge"
		kubeProxy          = "{kind: ConfigMap, metadata: {name: kube-proxy, namespace: kube-system}, data: {config.conf: " +
			`"{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration, mode: nftables}"}}`
		cilium = "{kind: ConfigMap, metadata: {name: cilium-config, namespace: kube-system}, data: {kube-proxy-replacement: VALUE}}"
	)
	replaces := func(value string) string { return strings.Replace(cilium, "VALUE", value, 1) }
	for _, c := range []struct {
		name, node string
		maps       []string
		want       string // proxy, mode, and by what that is known
		blocks     bool
	}{
		{"nothing", "", nil, "an unknown proxy, , nothing", false},
		{"Cilium", isCilium, nil, "Cilium, cilium, link cilium_host", true},
		{"Cilium by its ConfigMap", "", []string{replaces("strict")}, "Cilium, cilium, ConfigMap kube-system/cilium-config", true},
		{"Cilium by both", isCilium, []string{replaces("'true'")}, "Cilium, cilium, link cilium_host", true},
		{"Cilium that does not serve", isCilium, []string{replaces("'false'")}, "an unknown proxy, , nothing", false},
		{"Cilium, and kubeadm's ConfigMap", isCilium, []string{kubeProxy}, "Cilium, cilium, link cilium_host", true},
		{"Cilium in the ConfigMap beside kube-proxy's", "", []string{kubeProxy, replaces("'true'")},
			"kube-proxy, nftables, ConfigMap kube-system/kube-proxy", true},
		{"kube-proxy beside Cilium", isCilium + "; nft add table ip kube-proxy", []string{kubeProxy},
			"kube-proxy, nftables, ConfigMap kube-system/kube-proxy", false},
		{"rules of kube-proxy beside Cilium", isCilium + "; nft add table ip kube-proxy", nil,
			"kube-proxy, nftables, its rules in the kernel", false},
		{"another mode than in the ConfigMap", "iptables -t nat -N KUBE-SERVICES", []string{kubeProxy},
			"kube-proxy, iptables, ConfigMap kube-system/kube-proxy, its rules in the kernel", false},
		{"kube-router", isRouter, nil, "kube-router, ipvs, link kube-dummy-if", false},
		{"kube-router, and kubeadm's ConfigMap", isRouter, []string{kubeProxy}, "kube-router, ipvs, link kube-dummy-if", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorldOf(t, testbed.Spec{})
			look := func(args ...string) {
				_, out := w.execute(append([]string{"migrate", "--control-socket", w.socket, "-o", "json"}, args...)...)
				var r migrate.Report
				if err := json.Unmarshal([]byte(out), &r); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				is := strings.Join([]string{r.Proxy, r.Mode, strings.Join(r.By, ", ")}, ", ")
				blocks := slices.ContainsFunc(r.Findings, func(f migrate.Finding) bool {
					return f.Severity == migrate.Blocks && f.Subject == "kube-proxy-replacement" && len(f.Objects) == 1
				})
				if strings.Replace(is, "--manifests, ", "", 1) != c.want || blocks != c.blocks {
					t.Errorf("%q: found %q, blocks: %t; want %q, %t", args, is, blocks, c.want, c.blocks)
				}
			}
			kubeconfig := serveMaps(t, w.bed, c.maps)
			if out, err := w.bed.Command(t.Context(), testbed.Node, "sh", "-ec", c.node).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			look("--kubeconfig", kubeconfig)
			if c.node == "" { // then a dump has all
				file := filepath.Join(t.TempDir(), "dump.yaml")
				if err := os.WriteFile(file, []byte(strings.Join(c.maps, "\n---\n")), 0o600); err != nil {
					t.Fatal(err)
				}
				look("--manifests", file)
			}
		})
	}
}

// TestMigrate_firewall has rules of others that match what mode ipvs has.
func TestMigrate_firewall(t *testing.T) {
	w := newWorldOf(t, testbed.Spec{})
	const rules = "ip link add kube-ipvs0 type bridge; iptables -A INPUT -i kube-ipvs0 -j DROP; iptables -A INPUT -i eth0; " +
		"nft 'table inet site { chain in { iifname kube-ipvs0 drop; }; chain out { oifname eth0 drop; }; }'"
	if out, err := w.bed.Command(t.Context(), testbed.Node, "sh", "-ec", rules).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, out := w.execute("migrate", "--control-socket", w.socket, "-o", "json", "--kubeconfig", serveMaps(t, w.bed, nil))
	var r migrate.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	i := slices.IndexFunc(r.Findings, func(f migrate.Finding) bool { return f.Subject == "rules of others" })
	if i < 0 || len(r.Findings[i].Objects) != 2 || !strings.HasSuffix(r.Findings[i].Objects[0], " ip filter INPUT: kube-ipvs0") ||
		r.Findings[i].Objects[1] != "nftables inet site in: kube-ipvs0" {
		t.Errorf("it finds %s", out)
	}
}

// serveMaps returns a kubeconfig for an API that has ConfigMaps.
func serveMaps(t *testing.T, bed *testbed.Bed, maps []string) (kubeconfig string) {
	catalog, err := kubernetes.NewCatalog()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = catalog.Close() })
	for _, text := range maps {
		o := &corev1.ConfigMap{}
		if err := errors.Join(yaml.Unmarshal([]byte(text), o), catalog.Add(o)); err != nil {
			t.Fatal(err)
		}
	}
	if kubeconfig, err = catalog.Serve(bed, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// migrateHere runs the command in the namespaces of the test.
func migrateHere(t *testing.T, args ...string) (status int, out string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), self, append([]string{"migrate"}, args...)...)
	c.Env = append(os.Environ(), asFairlead+"=1")
	text, err := c.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), string(text)
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0, string(text)
}

// migrating is a node with the real kube-proxy, and clients of it all the time.
type migrating struct {
	machine
	kubeconfig string
	dir        string // of scripts and the numbers of processes
	load       *traffic.Watch
	open       []net.Conn
}

// own are Services of each client, as IPVS tells answers of one port apart by their clients only.
const own = `
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: default, resourceVersion: "1"}
spec:
  type: NodePort
  clusterIP: ADDRESS
  clusterIPs: [ADDRESS]
  ipFamilies: [IPv4]
  ipFamilyPolicy: SingleStack
  sessionAffinity: None
  externalTrafficPolicy: Cluster
  internalTrafficPolicy: Cluster
  ports:
  - {name: t, protocol: TCP, port: 80, targetPort: TARGET, nodePort: NODEPORT}
  - {name: u, protocol: UDP, port: 53, targetPort: 5353}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: NAME, namespace: default, resourceVersion: "1", labels: {kubernetes.io/service-name: NAME}}
addressType: IPv4
ports: [{name: t, protocol: TCP, port: TARGET}, {name: u, protocol: UDP, port: 5353}]
endpoints:
- {addresses: [POD-A], nodeName: node}
- {addresses: [POD-B], nodeName: node-b}
`

const node = `
apiVersion: v1
kind: Node
metadata: {name: node}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
`

// ownNodePort is what the client outside asks.
var ownNodePort = netip.MustParseAddrPort("192.0.2.1:30081")

func newMigrating(t *testing.T, mode string) *migrating {
	m := &migrating{machine: newMachine(t), dir: t.TempDir()}
	catalog, err := kubernetes.NewCatalog(m.object(&corev1.Node{}, node))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range [][]string{{"web", clusterIP.Addr().String(), "8080", "30080"}, {"outer", "10.96.0.11", "8081", "30081"}} {
		text := strings.NewReplacer("NAME", s[0], "ADDRESS", s[1], "TARGET", s[2], "NODEPORT", s[3],
			"POD-A", m.bed.Addr("pod-a", false).String(), "POD-B", m.bed.Addr("pod-b", false).String()).Replace(own)
		service, slice, _ := strings.Cut(text, "---\n")
		for _, o := range []runtime.Object{m.object(&corev1.Service{}, service), m.object(&discoveryv1.EndpointSlice{}, slice)} {
			if err := catalog.Add(o); err != nil {
				t.Fatal(err)
			}
		}
	}
	if m.kubeconfig, err = catalog.Serve(m.bed, m.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = catalog.Close() })
	proxy := kubernetes.KubeProxyCommand(kubernetes.NeedParts(t), m.kubeconfig, mode)
	m.script("kube-proxy", proxy)
	m.do("sh", m.path("kube-proxy-start"))
	// Its virtual servers are there before its rules. A connection between them is not tracked, and breaks when it is.
	// Its /healthz is well before its first rules.
	synced := regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{ip_family="IPv4"\} [1-9]`)
	metrics := netip.MustParseAddrPort("127.0.0.1:10249")
	eventually.True(t, "kube-proxy's first rules are written", func() bool {
		_, body := m.page(metrics, "/metrics")
		return synced.MatchString(body)
	})
	for from, to := range m.clients() {
		eventually.True(t, "kube-proxy serves "+to.String(), func() bool { return strings.HasPrefix(m.probe(from, to), "pod-") })
	}
	m.load = m.watch(20*time.Millisecond, m.clients())
	m.goesOn("under kube-proxy")
	return m
}

func (m *migrating) clients() map[testbed.Place]netip.AddrPort {
	return map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, testbed.Outside: ownNodePort}
}

func (m *migrating) object(o runtime.Object, text string) runtime.Object {
	m.Helper()
	if err := yaml.Unmarshal([]byte(text), o); err != nil {
		m.Fatal(err)
	}
	return o
}

func (m *migrating) path(name string) string { return filepath.Join(m.dir, name) }

// script writes NAME-start and NAME-stop, which return when the process has begun, or ended.
func (m *migrating) script(name string, command []string, more ...string) {
	m.Helper()
	pid := m.path(name + ".pid")
	start := fmt.Sprintf("setsid '%s' >>%s 2>&1 </dev/null &\necho $! >%s\n%s", strings.Join(command, "' '"), m.path(name+".log"), pid,
		strings.Join(more, "\n"))
	stop := fmt.Sprintf("p=$(cat %s)\nkill -TERM $p\nwhile [ -e /proc/$p/exe ]; do sleep 0.1; done\n", pid)
	for name, text := range map[string]string{name + "-start": start, name + "-stop": stop} {
		if err := os.WriteFile(m.path(name), []byte(text), 0o755); err != nil {
			m.Fatal(err)
		}
	}
	m.Cleanup(func() {
		text, err := os.ReadFile(pid)
		if number, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil {
			if p, err := os.FindProcess(number); err == nil {
				_ = p.Kill()
			}
		}
		if text, err := os.ReadFile(m.path(name + ".log")); err == nil && m.Failed() {
			m.Logf("the log of %s:\n%s", name, text[max(0, len(text)-4000):])
		}
	})
}

// do runs a program on the node, which succeeds.
func (m *migrating) do(name string, args ...string) {
	m.Helper()
	if out, err := m.bed.Command(context.WithoutCancel(m.Context()), testbed.Node, name, args...).CombinedOutput(); err != nil {
		m.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

// migrate runs the command on the node.
func (m *migrating) migrate(want int, args ...string) string {
	m.Helper()
	m.load.Mark("migrate " + strings.Join(args, " "))
	args = append([]string{"migrate", "--control-socket", m.socket}, args...)
	status, out := m.execute(args...)
	if status != want {
		m.Fatalf("%q: exit status %d, not %d:\n%s", args, status, want, out)
	}
	m.Logf("%q:\n%s", args, out)
	return out
}

// goesOn reports connections that failed, or broke.
func (m *migrating) goesOn(when string) {
	m.Helper()
	if err := m.load.More(m.Context(), 50); err != nil {
		m.Error(err)
	}
	for _, c := range m.open {
		m.talksOver(c, when)
	}
	for from, to := range m.clients() {
		m.open = append(m.open, m.dial(from, to))
	}
	m.load.Mark(when)
}

// apply has commands for all that the migration starts and stops.
func (m *migrating) apply(to string, more ...string) []string {
	self, err := os.Executable()
	if err != nil {
		m.Fatal(err)
	}
	agent := []string{"env", asFairlead + "=1", self, "run", "--kubeconfig", m.kubeconfig, "--hostname-override", "node",
		"--cluster-cidr", testbed.ClusterCIDR(), "--control-socket", m.socket, "--cgroup-root", m.bed.Cgroup(), "--proxy-mode", to,
		"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0"}
	m.script("agent", agent, more...)
	return []string{"--apply", "--to", to, "--check", "3s", "--stop", "sh " + m.path("kube-proxy-stop"),
		"--start", "sh " + m.path("kube-proxy-start"), "--agent-start", "sh " + m.path("agent-start"), "--agent-stop", "sh " + m.path("agent-stop")}
}

// TestMigrate goes from kube-proxy in each mode to two of Fairlead's, and back.
func TestMigrate(t *testing.T) {
	for _, from := range []string{"iptables", "nftables", "ipvs"} {
		for _, to := range []string{"nftables", "ebpf"} {
			t.Run(from+" to "+to, func(t *testing.T) {
				if from == "ipvs" && needIPVS(t) {
					return
				}
				newMigrating(t, from).there(from, to)
			})
		}
	}
}

// The test kernel has other modes of kube-proxy, too. One pair is drawn.
func TestMigrate_othersIPVS(t *testing.T) {
	if needIPVS(t) {
		return
	}
	pairs := [][2]string{{"iptables", "nftables"}, {"iptables", "ebpf"}, {"nftables", "nftables"}, {"nftables", "ebpf"}}
	for _, p := range sample.Of(t, len(pairs), pairs) {
		t.Run(p[0]+" to "+p[1], func(t *testing.T) {
			newMigrating(t, p[0]).there(p[0], p[1])
		})
	}
}

func (m *migrating) there(from, to string) {
	var r migrate.Report
	if err := json.Unmarshal([]byte(m.migrate(0, "--to", to, "-o", "json")), &r); err != nil {
		m.Fatal(err)
	}
	if from == "ipvs" && slices.ContainsFunc(r.Findings, func(f migrate.Finding) bool { return f.Subject == "rules of others" }) {
		m.Errorf("kube-proxy's own rules are those of others: %+v", r.Findings)
	}
	if r.Proxy != "kube-proxy" || r.Mode != from || r.To != to || r.Services != 2 || len(r.Unread) > 0 || len(r.Findings) == 0 {
		m.Errorf("the report is %+v", r)
	}
	m.shadow()
	m.goesOn("under kube-proxy")
	m.migrate(0, m.apply(to)...)
	m.goesOn("under Fairlead")
	if _, out := m.execute("status", "--control-socket", m.socket, "-o", "json"); !strings.Contains(out, `"plane": "`+to+`"`) {
		m.Errorf("after --apply: %s", out)
	}
	other := map[string]string{"nftables": "iptables", "ebpf": "nftables"}[to]
	m.migrate(0, "--apply", "--to", other, "--check", "2s")
	m.goesOn("in another mode")
	m.migrate(0, "--back", "--check", "2s")
	m.goesOn("in the configured mode")
	m.migrate(0, "--back", "--check", "2s", "--start", "sh "+m.path("kube-proxy-start"), "--agent-stop", "sh "+m.path("agent-stop"))
	m.goesOn("under kube-proxy again")
	if err := json.Unmarshal([]byte(m.migrate(0, "--to", to, "-o", "json")), &r); err != nil || r.Proxy != "kube-proxy" || r.Mode != from {
		m.Errorf("after --back there is %s %s, %v", r.Proxy, r.Mode, err)
	}
	m.ends()
}

// ends is an error if a connection failed.
func (m *migrating) ends() {
	m.Helper()
	m.closeAll()
	r := m.load.Stop()
	m.Logf("%s", r)
	if len(r.Faults) > 0 || r.Total().Answered < 100 {
		m.Errorf("clients had faults: %s", r)
	}
}

func (m *migrating) closeAll() {
	for _, c := range m.open {
		_ = c.Close()
	}
	m.open = nil
}

// shadow compares rows with connections, and then has a rule by hand send some elsewhere.
func (m *migrating) shadow() {
	m.Helper()
	var w migrate.Watched
	if err := json.Unmarshal([]byte(m.migrate(0, "--watch", "3s", "-o", "json")), &w); err != nil || w.Agreed == 0 {
		m.Errorf("connections of kube-proxy: %+v, %v", w, err)
	}
	wrong := netip.AddrPortFrom(m.bed.Addr("pod-a", false), 8080).String()
	m.do("nft", "table ip wrong { chain c { type nat hook prerouting priority -150; ip daddr 192.0.2.1 tcp dport 30081 ip saddr 192.0.2.9 dnat to "+
		wrong+"; }; }")
	defer m.do("nft", "delete table ip wrong")
	out := m.migrate(1, "--watch", "3s")
	if want := "192.0.2.1:30081/tcp default/outer"; !strings.Contains(out, want) || !strings.Contains(out, "this is no backend by the rows") ||
		!strings.Contains(out, wrong) {
		m.Errorf("no contradiction in\n%s", out)
	}
}

// failing is a firewall that comes with Fairlead, and what migrate says of it.
type failing struct{ from, to, chain, says string }

// TestMigrate_failure has a firewall come with Fairlead: kube-proxy serves again, by itself.
func TestMigrate_failure(t *testing.T) {
	goBack(t, []failing{
		{"iptables", "nftables", "hook prerouting priority -300; tcp sport 8081 tcp flags == 0x12 tcp flags set 0x14", "more connections fail than before: "},
		{"iptables", "ebpf", "hook output priority 300; tcp dport 8080 drop",
			"2 of 4 addresses answered before, and not now: 10.96.0.10:80/tcp, 192.0.2.1:30080/tcp"},
		{"nftables", "nftables", "hook output priority -200; tcp dport 30080 drop",
			"1 of 4 addresses answered before, and not now: 192.0.2.1:30080/tcp"},
		{"nftables", "ebpf", "hook output priority 300; udp dport 5353 reject",
			"2 of 4 addresses answered before, and not now: 10.96.0.10:53/udp, 10.96.0.11:53/udp"},
	})
}

func TestMigrate_failureIPVS(t *testing.T) {
	if needIPVS(t) {
		return
	}
	goBack(t, []failing{
		{"ipvs", "nftables", "hook output priority 300; udp dport 5353 reject",
			"2 of 4 addresses answered before, and not now: 10.96.0.10:53/udp, 10.96.0.11:53/udp"},
		{"ipvs", "ebpf", "hook output priority 300; tcp dport 8080 drop",
			"2 of 4 addresses answered before, and not now: 10.96.0.10:80/tcp, 192.0.2.1:30080/tcp"},
	})
}

// goBack draws half of them.
func goBack(t *testing.T, all []failing) {
	for _, f := range sample.Of(t, 2, all) {
		t.Run(f.from+" to "+f.to, func(t *testing.T) {
			m := newMigrating(t, f.from)
			// The node cannot reach what the client outside asks. So only counters tell how that fares.
			m.do("nft", "table ip own { chain c { type filter hook output priority 300; ip saddr != 192.0.2.9 tcp dport 8081 reject; }; }")
			args := m.apply(f.to, "nft 'table ip firewall { chain c { type filter "+f.chain+"; }; }'")
			stop, err := os.ReadFile(m.path("agent-stop"))
			if err == nil {
				err = os.WriteFile(m.path("agent-stop"), append(stop, "nft delete table ip firewall\n"...), 0o755)
			}
			if err != nil {
				t.Fatal(err)
			}
			out := m.migrate(1, args...)
			_ = m.load.Stop()
			for _, text := range []string{f.says, "it is as it was before"} {
				if !strings.Contains(out, text) {
					t.Errorf("no %q in\n%s", text, out)
				}
			}
			m.closeAll()
			m.load = m.watch(20*time.Millisecond, m.clients())
			for range 3 {
				m.goesOn("under kube-proxy again")
			}
			m.ends()
		})
	}
}
