package main

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// realCluster is a real control plane, two virtual nodes, and a directory that is mounted as a ConfigMap.
type realCluster struct {
	*testing.T
	plane  *kubernetes.ControlPlane
	bed    *testbed.Bed
	relay  *kubernetes.Relay
	volume string // what the process finds at /var/lib/kube-proxy
	env    []string
	swaps  int
}

const shop = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: web, ports: [{containerPort: 8080}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
`

var (
	webIP     = netip.MustParseAddrPort("10.96.0.10:80")
	localPort = netip.MustParseAddrPort("127.0.0.1:30080")
	metricsAt = netip.MustParseAddrPort("127.0.0.1:10249")
	healthzAt = netip.MustParseAddrPort("127.0.0.1:10256")
)

func newRealCluster(t *testing.T) *realCluster {
	t.Helper()
	w := &realCluster{T: t, volume: t.TempDir()}
	var err error
	if w.plane, err = kubernetes.Start(t.Context(), kubernetes.Options{Parts: kubernetes.NeedParts(t)}); err != nil {
		t.Fatal(err)
	}
	w.closes(w.plane.Close)
	w.bed = testbed.Need(t, testbed.Spec{})
	if w.relay, err = w.plane.Serve(w.bed); err != nil {
		t.Fatal(err)
	}
	kubelet, err := w.plane.StartKubelet(t.Context(), w.bed)
	if err != nil {
		t.Fatal(err)
	}
	w.closes(kubelet.Close)
	w.kubectl(shop, "apply", "-f", "-")
	return w
}

func (w *realCluster) closes(f func() error) {
	w.Cleanup(func() {
		if err := f(); err != nil {
			w.Error(err)
		}
	})
}

func (w *realCluster) kubectl(stdin string, args ...string) {
	w.Helper()
	if out, err := w.plane.Kubectl(w.Context(), stdin, args...); err != nil {
		w.Fatalf("kubectl %q: %v\n%s", args, err, out)
	}
}

// configMap is what the volume has now, by the names of the files.
type configMap map[string]string

// kubeadm is the data of the ConfigMap that kubeadm makes for kube-proxy, with credentials of this cluster.
func (w *realCluster) kubeadm() configMap {
	w.Helper()
	text, err := os.ReadFile("../../deploy/testdata/kubeadm.yaml")
	if err != nil {
		w.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var m corev1.ConfigMap
		if err := yaml.Unmarshal([]byte(doc), &m); err == nil && m.Kind == "ConfigMap" && m.Name == "kube-proxy" {
			return configMap{"config.conf": m.Data["config.conf"], "kubeconfig.conf": w.kubeconfig(kubernetes.KubeProxy())}
		}
	}
	w.Fatal("there is no ConfigMap kube-proxy")
	return nil
}

func (w *realCluster) kubeconfig(u kubernetes.User) string {
	w.Helper()
	path, err := w.relay.Kubeconfig(w.TempDir(), u)
	if err != nil {
		w.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		w.Fatal(err)
	}
	return string(text)
}

// mount puts data into the volume as the kubelet does: in a directory of its own, to which the link
// "..data" is then moved.
func (w *realCluster) mount(m configMap) {
	w.Helper()
	w.swaps++
	dir := fmt.Sprintf("..%d", w.swaps)
	try := func(err error) {
		if err != nil {
			w.Fatal(err)
		}
	}
	try(os.Mkdir(filepath.Join(w.volume, dir), 0o755))
	for name, text := range m {
		try(os.WriteFile(filepath.Join(w.volume, dir, name), []byte(text), 0o644))
		if _, err := os.Lstat(filepath.Join(w.volume, name)); err != nil {
			try(os.Symlink("..data/"+name, filepath.Join(w.volume, name)))
		}
	}
	try(os.Symlink(dir, filepath.Join(w.volume, "..data_tmp")))
	try(os.Rename(filepath.Join(w.volume, "..data_tmp"), filepath.Join(w.volume, "..data")))
	if w.swaps > 1 {
		try(os.RemoveAll(filepath.Join(w.volume, fmt.Sprintf("..%d", w.swaps-1))))
	}
}

// edit replaces text in a file of the ConfigMap and mounts the result.
func (w *realCluster) edit(m configMap, name, old, now string) {
	w.Helper()
	if !strings.Contains(m[name], old) {
		w.Fatalf("%s has no %q", name, old)
	}
	m[name] = strings.Replace(m[name], old, now, 1)
	w.mount(m)
}

// start starts this program as kube-proxy in the place of kubeadm's DaemonSet: with its volume and its
// command line.
func (w *realCluster) start(args ...string) *kubernetes.Proxy {
	w.Helper()
	self, err := os.Executable()
	if err != nil {
		w.Fatal(err)
	}
	program := filepath.Join(w.TempDir(), "kube-proxy")
	if err := os.Symlink(self, program); err != nil {
		w.Fatal(err)
	}
	run := fmt.Sprintf("mount -t tmpfs none /var/lib && mkdir /var/lib/kube-proxy && mount --bind '%s' /var/lib/kube-proxy && "+
		"mount -t tmpfs none /run && exec '%s' \"$@\"", w.volume, program)
	command := append([]string{"unshare", "-m", "sh", "-c", run, "sh",
		"--config=/var/lib/kube-proxy/config.conf", "--hostname-override=" + string(testbed.Node)}, args...)
	o := kubernetes.ProxyOptions{Bed: w.bed, Command: command, Env: append(w.env, asFairlead+"=1")}
	p, err := kubernetes.StartProxy(w.Context(), o)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = p.Kill()
		if w.Failed() {
			w.Logf("the proxy's log:\n%s", p.Log())
		}
	})
	return p
}

func (w *realCluster) answers(from testbed.Place, to netip.AddrPort) bool {
	o, err := w.bed.Probe(w.Context(), testbed.Probe{From: from, To: to})
	return err == nil && o.Result == testbed.Answered
}

func (w *realCluster) logged(p *kubernetes.Proxy, text ...string) {
	w.Helper()
	eventually.True(w, fmt.Sprintf("a line of the log has %q", text), func() bool {
		for line := range strings.Lines(p.Log()) {
			if !slices.ContainsFunc(text, func(s string) bool { return !strings.Contains(line, s) }) {
				return true
			}
		}
		return false
	})
}

// lookInterval is how often Fairlead looks for what kube-proxy has left.
const lookInterval = eventually.Taking(30 * time.Second)

// event waits for an Event.
func (w *realCluster) event(object, reason, text string) {
	w.Helper()
	lookInterval.True(w, "an Event "+reason+" of "+object, func() bool {
		list, err := w.plane.Client().EventsV1().Events("").List(w.Context(), metav1.ListOptions{})
		return err == nil && slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind+" "+e.Regarding.Name == object && e.Reason == reason && strings.Contains(e.Note, text)
		})
	})
}

// page is what a server of the proxy answers.
func (w *realCluster) page(p *kubernetes.Proxy, at netip.AddrPort, path string) string {
	status, body, err := p.Get(w.Context(), at, path)
	if err != nil || status != http.StatusOK {
		return fmt.Sprint(status, " ", err)
	}
	return string(body)
}

// health asks all the time whether the proxy is well; the result has everything else that came.
func (w *realCluster) health(p *kubernetes.Proxy) (stop func() []string) {
	ctx, cancel := context.WithCancel(w.Context())
	result := make(chan []string)
	go func() {
		var bad []string
		for ctx.Err() == nil {
			status, _, err := p.Get(ctx, healthzAt, "/healthz")
			if ctx.Err() == nil && (err != nil || status != http.StatusOK) {
				bad = append(bad, fmt.Sprint(status, " ", err))
			}
		}
		result <- bad
	}()
	return func() []string { cancel(); return <-result }
}

// dump waits until the rows have, or have not, some lines.
func (w *realCluster) dump(socket string, has, hasNot []string) {
	w.Helper()
	last := ""
	defer func() {
		if w.Failed() {
			w.Logf("the last dump:\n%s", last)
		}
	}()
	eventually.True(w, fmt.Sprintf("the rows have %q and not %q", has, hasNot), func() bool {
		text, err := engine.Ask(w.Context(), socket, "/dump")
		if err == nil {
			last = string(text)
		}
		missing := func(s string) bool { return !strings.Contains(last, s) }
		return err == nil && !slices.ContainsFunc(has, missing) && !slices.ContainsFunc(hasNot, func(s string) bool { return !missing(s) })
	})
}

// status asks as an administrator does.
func (w *realCluster) status(socket string, status int, has ...string) {
	w.Helper()
	self, err := os.Executable()
	if err != nil {
		w.Fatal(err)
	}
	c := exec.CommandContext(w.Context(), self, "status", "--control-socket", socket)
	c.Env = append(os.Environ(), asFairlead+"=1")
	out, _ := c.CombinedOutput()
	if got := c.ProcessState.ExitCode(); got != status {
		w.Errorf("status: exit status %d, want %d", got, status)
	}
	for _, text := range has {
		if !strings.Contains(string(out), text) {
			w.Errorf("status: no %q in\n%s", text, out)
		}
	}
}

// movesHealthz lets /healthz listen elsewhere.
func (w *realCluster) movesHealthz(p *kubernetes.Proxy, files configMap) {
	moved := netip.MustParseAddrPort("127.0.0.1:20256")
	healthy := func(at netip.AddrPort) bool {
		status, _, err := p.Get(w.Context(), at, "/healthz")
		return err == nil && status == http.StatusOK
	}
	w.edit(files, "config.conf", `healthzBindAddress: ""`, `healthzBindAddress: "127.0.0.1:20256"`)
	eventually.True(w, "/healthz has moved", func() bool { return healthy(moved) })
	if healthy(healthzAt) {
		w.Error("the old address of /healthz still answers")
	}
	w.edit(files, "config.conf", `healthzBindAddress: "127.0.0.1:20256"`, `healthzBindAddress: "0.0.0.0:10256"`)
	eventually.True(w, "/healthz is back", func() bool { return healthy(healthzAt) })
}

// followsNode changes the Node object, over which kube-proxy would exit.
func (w *realCluster) followsNode(p *kubernetes.Proxy, files configMap) {
	socket := filepath.Join(w.TempDir(), "control")
	files["fairlead.conf"] = "apiVersion: fairlead.dev/v1alpha1\nkind: FairleadConfiguration\ncontrolSocket: " + socket + "\n"
	w.mount(files)
	w.dump(socket, []string{"pods 10.244.0.0/16"}, nil)
	w.edit(files, "config.conf", `detectLocalMode: ""`, `detectLocalMode: NodeCIDR`)
	w.dump(socket, []string{"pods 10.244.1.0/24"}, []string{"pods 10.244.0.0/16"})
	w.edit(files, "config.conf", "nodePortAddresses: null", "nodePortAddresses: [primary]")
	w.dump(socket, []string{"192.0.2.1:30080/tcp"}, []string{"127.0.0.1:30080"})

	w.kubectl("", "delete", "node", "node")
	eventually.True(w, "/healthz says that the node is gone", func() bool {
		status, _, err := p.Get(w.Context(), healthzAt, "/healthz")
		return err == nil && status == http.StatusServiceUnavailable
	})
	if status, _, err := p.Get(w.Context(), healthzAt, "/livez"); err != nil || status != http.StatusOK {
		w.Errorf("/livez: %d, %v", status, err)
	}
	if !w.answers(testbed.Node, webIP) {
		w.Error("without its Node the node does not serve")
	}
	w.logged(p, "was deleted; /healthz says 503")
	w.event("Node node", "InvalidNode", "was deleted")
	w.dump(socket, []string{"pods 10.244.1.0/24", "192.0.2.1:30080/tcp"}, nil)
	w.status(socket, 1, "healthy          yes\n", "should not use it", "data plane       nftables\n", "nodes ", "servicecidrs ")

	if out, err := w.bed.Command(w.Context(), testbed.Node, "ip", "addr", "add", "192.0.2.77/32", "dev", "lo").CombinedOutput(); err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	w.kubectl(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"node"}}`, "apply", "-f", "-")
	w.kubectl("", "patch", "node", "node", "--subresource=status", "-p",
		`{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.77"}]}}`)
	w.dump(socket, []string{"192.0.2.77:30080/tcp"}, []string{"192.0.2.1:30080/tcp", "pods 10"})
	w.logged(p, "spec.podCIDRs", "until it has one, pods are not recognised")
	w.kubectl("", "patch", "node", "node", "-p", `{"spec":{"podCIDR":"10.244.1.0/24","podCIDRs":["10.244.1.0/24"]}}`)
	w.dump(socket, []string{"pods 10.244.1.0/24"}, nil)
	if err := p.Ready(w.Context()); err != nil {
		w.Error(err)
	}
}

// The program takes kube-proxy's place in a cluster of kubeadm: its ConfigMap and its command line
// stay as they are. Then the ConfigMap is edited, while connections are made all the time.
func TestKubeProxy_kubeadm(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	files := w.kubeadm()
	w.mount(files)
	p := w.start()
	if err := p.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually.True(w, "the Service answers", func() bool { return w.answers(testbed.Node, webIP) })
	for from, to := range map[testbed.Place]netip.AddrPort{testbed.Node: localPort, testbed.Outside: nodePort} {
		if !w.answers(from, to) {
			t.Errorf("from %s: no answer from %s", from, to)
		}
	}
	w.event("Node node", "Starting", "")
	if got := w.page(p, metricsAt, "/proxyMode"); got != "iptables" {
		t.Errorf("/proxyMode: %s", got)
	}
	if got := w.page(p, metricsAt, "/metrics"); !strings.Contains(got, "kubeproxy_sync_proxy_rules_duration_seconds") {
		t.Errorf("/metrics: %.300s", got)
	}

	load := watch(t, w.bed, 2*time.Millisecond, traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside}, []netip.AddrPort{webIP})...)
	stop := w.health(p)
	w.reloads(p, files)
	if bad := stop(); len(bad) > 0 {
		t.Errorf("while the configuration changed, /healthz answered: %q", bad)
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Errorf("while the configuration changed: %s", r)
	}
	w.movesHealthz(p, files)
	w.followsNode(p, files)
	if err := p.Terminate(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	if !w.answers(testbed.Node, webIP) {
		t.Error("the kernel's state is gone with the process")
	}
	if out, err := w.bed.Command(t.Context(), testbed.Node, "nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.edit(files, "config.conf", "mode: nftables", "mode: auto") // with no rules to keep
	w.env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}       // and no laboratory
	p = w.start("--hostname-override=nosuch")
	w.event("Node nosuch", "DataPlaneChosen", "nothing was measured")
	w.logged(p, "there is no such Node; is hostnameOverride (--hostname-override) right")
	w.event("Node nosuch", "InvalidNode", "--hostname-override")
}

// reloads edits the ConfigMap in many ways, each of which must be in force soon.
func (w *realCluster) reloads(p *kubernetes.Proxy, files configMap) {
	// Rows: NodePorts on 127.0.0.1 go, and come back.
	w.edit(files, "config.conf", "localhostNodePorts: null", "localhostNodePorts: false")
	w.logged(p, "configuration changed", "iptables.localhostNodePorts", "rows are computed anew")
	eventually.True(w, "127.0.0.1 is closed", func() bool { return !w.answers(testbed.Node, localPort) })
	w.edit(files, "config.conf", "localhostNodePorts: false", "localhostNodePorts: true")
	eventually.True(w, "127.0.0.1 is open", func() bool { return w.answers(testbed.Node, localPort) })

	// Listeners.
	moved := netip.MustParseAddrPort("127.0.0.1:20249")
	w.edit(files, "config.conf", `metricsBindAddress: ""`, `metricsBindAddress: "127.0.0.1:20249"`)
	eventually.True(w, "metrics have moved", func() bool { return w.page(p, moved, "/proxyMode") == "iptables" })
	if _, _, err := p.Get(w.Context(), metricsAt, "/proxyMode"); err == nil {
		w.Error("the old listener is still there")
	}

	// An invalid edit changes nothing, is reported, and is forgotten.
	w.edit(files, "config.conf", "mode: iptables", "mode: magic")
	w.logged(p, "level=ERROR", "configuration was refused", "magic")
	w.event("Node node", "ConfigurationRefused", "magic")
	refused := func(is string) {
		eventually.True(w, "the metric says "+is, func() bool {
			return strings.Contains(w.page(p, moved, "/metrics"), "\nfairlead_configuration_refused "+is+"\n")
		})
	}
	refused("1")
	w.edit(files, "config.conf", "mode: magic", "mode: [")
	w.logged(p, "level=ERROR", "configuration was refused", "config.conf")

	// The data plane and the mark of its packets.
	w.edit(files, "config.conf", "mode: [", "mode: nftables")
	w.logged(p, "configuration changed", "field=mode")
	w.logged(p, "the configuration is accepted again")
	w.event("Node node", "ConfigurationAccepted", "")
	refused("0")
	w.edit(files, "config.conf", "nftables:\n  masqueradeAll: false\n  masqueradeBit: null",
		"nftables:\n  masqueradeAll: false\n  masqueradeBit: 20")
	w.logged(p, "masqueradeBit", "new data plane that adopts")
	eventually.True(w, "rules with the new mark", func() bool {
		out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "table", "ip", "fairlead").CombinedOutput()
		return err == nil && strings.Contains(string(out), "0x00100000") && !strings.Contains(string(out), "0x00004000")
	})

	// Where objects come from: other credentials; none that work, and again some that do.
	files["kubeconfig.conf"] = w.kubeconfig(kubernetes.Admin())
	w.mount(files)
	w.logged(p, "kubeconfig", "until then the old ones are served")
	w.logged(p, "all objects were read anew")
	good := files["kubeconfig.conf"]
	files["kubeconfig.conf"] = strings.ReplaceAll(good, ":6443", ":6444")
	w.mount(files)
	w.logged(p, ":6444")
	w.kubectl("", "scale", "deployment/web", "--replicas=3") // the old source is still heard
	eventually.True(w, "three backends", func() bool {
		out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "table", "ip", "fairlead").CombinedOutput()
		return err == nil && strings.Contains(string(out), "choose-3")
	})
	files["kubeconfig.conf"] = good
	w.mount(files)
	w.logged(p, "what is in the file", `effect="at once"`) // what was waited for is given up
	w.kubectl(strings.NewReplacer("web", "more", "10.96.0.10", "10.96.0.11", "30080", "30081").Replace(shop), "apply", "-f", "-")
	more := netip.MustParseAddrPort("10.96.0.11:80")
	eventually.True(w, "a new Service", func() bool { return w.answers(testbed.Node, more) })

	// More words in the log.
	if strings.Contains(p.Log(), "level=DEBUG") || strings.Count(p.Log(), "settings are not as configured") > 1 {
		w.Error("debug messages, though nobody asked for them")
	}
	w.edit(files, "config.conf", "bindAddressHardFail: false", "bindAddressHardFail: true")
	w.logged(p, "bindAddressHardFail", `effect="when the process starts the next time"`)
	w.edit(files, "config.conf", "verbosity: 0", "verbosity: 6\n  format: json")
	w.edit(files, "config.conf", "tcpBeLiberal: false", "tcpBeLiberal: true") // one that is optional fails in a namespace
	w.logged(p, `"level":"DEBUG"`)
	w.event("Node node", "ConfigurationApplied", "")
}

// rules tell whose rules are in the kernel of the node, and where.
func (w *realCluster) rules() string {
	w.Helper()
	var found []string
	for _, c := range ruleLists() {
		out, err := w.bed.Command(w.Context(), testbed.Node, c.command[0], c.command[1:]...).CombinedOutput()
		if err != nil {
			w.Logf("%q: %v\n%s", c.command, err, out)
		}
		for who, sign := range c.signs {
			if name := who + " " + c.where; strings.Contains(string(out), sign) && !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	}
	slices.Sort(found)
	return strings.Join(found, ", ")
}

// ruleList prints rules, and how those of the proxies are recognized.
type ruleList struct {
	where   string
	command []string
	signs   map[string]string
}

func ruleLists() (lists []ruleList) {
	lists = append(lists, ruleList{"nftables", []string{"nft", "list", "tables"},
		map[string]string{"kube-proxy": "table ip kube-proxy", "fairlead": "table ip fairlead\n"}})
	for _, where := range []string{"legacy", "nft"} {
		for _, family := range []string{"iptables-", "ip6tables-"} {
			lists = append(lists, ruleList{"iptables-" + where, []string{family + where + "-save"},
				map[string]string{"kube-proxy": "KUBE-SVC-", "fairlead": "KUBE-PROXY-IN"}})
		}
	}
	return lists
}

// translations are the pods to which the rules of a proxy translate.
func (w *realCluster) translations(ctx context.Context, who string) map[string]bool {
	pod := regexp.MustCompile(`(10\.244\.\d+\.\d+)(?::| \. )8080`)
	ours := regexp.MustCompile(`-A KUBE-(PODS|LOCAL|PART|STICK)-`)
	known := map[string]bool{}
	for _, c := range [][]string{
		{"nft", "list", "table", "ip", who}, {"iptables-legacy-save", "-t", "nat"}, {"iptables-nft-save", "-t", "nat"},
	} {
		out, _ := w.bed.Command(ctx, testbed.Node, c[0], c[1:]...).Output() // some have no rules
		for line := range strings.Lines(string(out)) {
			iptables := strings.Contains(line, "--to-destination") && ours.MatchString(line) == (who == "fairlead")
			if !iptables && c[0] != "nft" {
				continue
			}
			for _, m := range pod.FindAllStringSubmatch(line, -1) {
				known[m[1]] = true
			}
		}
	}
	return known
}

// knows waits until the rules of a proxy translate to so many pods, and no other is left.
func (w *realCluster) knows(who string, n int) {
	w.Helper()
	eventually.True(w, fmt.Sprintf("%s knows %d pods", who, n), func() bool {
		pods, err := w.plane.Client().CoreV1().Pods("default").List(w.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		return err == nil && len(pods.Items) == n && len(w.translations(w.Context(), who)) == n
	})
}

// kubeProxy starts the real one, with the mounted credentials, and waits for its rules.
func (w *realCluster) kubeProxy(mode, makes string) *kubernetes.Proxy {
	w.Helper()
	command := kubernetes.KubeProxyCommand(kubernetes.NeedParts(w), filepath.Join(w.volume, "kubeconfig.conf"), mode)
	p, err := kubernetes.StartProxy(w.Context(), kubernetes.ProxyOptions{Bed: w.bed, Command: command})
	if err == nil {
		err = p.Ready(w.Context())
	}
	if err != nil {
		w.Fatal(err)
	}
	eventually.True(w, "kube-proxy's rules", func() bool { return strings.Contains(w.rules(), makes) })
	return p
}

func (w *realCluster) fourPods() {
	w.Helper()
	w.kubectl("", "scale", "deployment/web", "--replicas=4")
	w.knows("fairlead", 4)
}

// goesBack takes away all pods but one, while the real kube-proxy runs and Fairlead, which has ended, still has all of
// them in its rules. The rules of kube-proxy count.
func (w *realCluster) goesBack(mode string) {
	w.Helper()
	w.knows("kube-proxy", 4)
	w.kubectl("", "scale", "deployment/web", "--replicas=1")
	w.knows("kube-proxy", 1)
	if left := w.translations(w.Context(), "fairlead"); len(left) != 4 {
		w.Fatalf("Fairlead should have left four pods in its rules, and has %v", left)
	}
	left := map[string]bool{}
	for i := range 50 {
		for from, to := range map[testbed.Place]netip.AddrPort{testbed.Outside: nodePort, testbed.Node: webIP} {
			o, err := w.bed.Probe(w.Context(), testbed.Probe{From: from, To: to})
			if left[o.Backend] = true; err != nil || o.Result != testbed.Answered || len(left) > 1 {
				w.Fatalf("back to kube-proxy in mode %s, connection %d from %s to %s: %s, %v", mode, i+1, from, to, o, err)
			}
		}
	}
}

func (w *realCluster) kill(p *kubernetes.Proxy) {
	w.Helper()
	if err := p.Kill(); err != nil {
		w.Fatal(err)
	}
}

// From kube-proxy to Fairlead and back, while connections are made all the time and pods go.
func TestKubeProxy_succession(t *testing.T) {
	t.Parallel()
	w := newRealCluster(t)
	w.mount(w.kubeadm())
	p := w.kubeProxy("iptables", "kube-proxy iptables-nft")
	eventually.True(w, "the Service answers", func() bool { return w.answers(testbed.Outside, webIP) })
	load := watch(t, w.bed, 2*time.Millisecond, traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside}, []netip.AddrPort{webIP})...)
	w.kill(p)
	if got := w.rules(); got != "kube-proxy iptables-nft" {
		t.Fatalf("kube-proxy has left: %s", got)
	}
	p = w.start()
	w.logged(p, "removed kube-proxy's leftovers", "iptables")
	w.event("Node node", "KubeProxyRulesRemoved", "(iptables-nft ip mangle)")
	if got := w.rules(); got != "fairlead iptables-nft" {
		t.Errorf("after taking over: %s", got)
	}
	w.kill(p)
	p = w.kubeProxy("nftables", "kube-proxy nftables")
	w.kill(p)
	p = w.start()
	w.logged(p, "removed kube-proxy's leftovers", "nftables")
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Errorf("while one took over from the other: %s", r)
	}
	for _, back := range []struct{ mode, makes string }{
		{"iptables", "kube-proxy iptables-nft"}, {"nftables", "kube-proxy nftables"},
	} {
		w.fourPods()
		w.kill(p)
		p = w.kubeProxy(back.mode, back.makes)
		w.goesBack(back.mode)
		w.kill(p)
		p = w.start()
		w.logged(p, "removed kube-proxy's leftovers", back.mode)
	}
	// Rules stay as long as the administrator keeps takeOver at Keep.
	w.kill(p)
	p = w.kubeProxy("nftables", "kube-proxy nftables")
	w.kill(p)
	p = w.start("--take-over=Keep")
	if err := p.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.rules(); got != "fairlead iptables-nft, kube-proxy nftables" {
		t.Errorf("with takeOver: Keep: %s", got)
	}
	w.kill(p)
	p = w.start("--once")
	<-p.Ended()
	if got := w.rules(); got != "fairlead iptables-nft" {
		t.Errorf("after --once: %s\n%s", got, p.Log())
	}
	p = w.kubeProxy("iptables", "kube-proxy iptables-nft")
	w.kill(p)
	p = w.start("--cleanup")
	<-p.Ended()
	if got := w.rules(); got != "" || !strings.Contains(p.Log(), "iptables: removed") || !strings.Contains(p.Log(), "kube-proxy: removed") {
		t.Errorf("after --cleanup: %s\n%s", got, p.Log())
	}
}
