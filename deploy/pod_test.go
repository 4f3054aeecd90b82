package deploy

import (
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
)

// TestPod runs the containers of each DaemonSet on a node, as its kubelet would: from the image, with
// the capabilities, volumes and account that the DaemonSet says. Then a Service must be served.
func TestPod(t *testing.T) {
	i := needAgent(t)
	c := startCluster(t)
	// How many connections the kernel tracks is the machine's business, and no namespace may change it.
	kubeadm := strings.Replace(read(t, "testdata/kubeadm.yaml"), "maxPerCore: null", "maxPerCore: 0", 1)
	c.must(t, kubeadm, "apply", "-f", "-")
	c.must(t, read(t, "testdata/web.yaml"), "apply", "-f", "-")
	c.addNode(t)

	t.Run("chart", func(t *testing.T) {
		c.helm(t, "install", "fairlead", chart, "-n", "kube-system",
			"--set", "config.clusterCIDR=10.244.0.0/16", "--set", "config.conntrack.maxPerCore=0")
		defer c.helm(t, "uninstall", "fairlead", "-n", "kube-system")
		testServes(t, c, i, served{"fairlead", nftables})
	})
	t.Run("chart with kubeadm's configuration", func(t *testing.T) {
		c.helm(t, "install", "fairlead", chart, "-n", "kube-system")
		defer c.helm(t, "uninstall", "fairlead", "-n", "kube-system")
		testServes(t, c, i, served{"fairlead", iptables})
	})
	t.Run("chart with iptables-legacy", func(t *testing.T) {
		c.helm(t, "install", "fairlead", chart, "-n", "kube-system", "--set", "config.conntrack.maxPerCore=0",
			"--set", "config.mode=iptables", "--set", "fairleadConfig.iptablesBackend=legacy")
		defer c.helm(t, "uninstall", "fairlead", "-n", "kube-system")
		testServes(t, c, i, served{"fairlead", legacy})
	})
	t.Run("kustomize", func(t *testing.T) {
		c.must(t, "", "apply", "-k", "kustomize/base")
		defer c.must(t, "", "delete", "-k", "kustomize/base")
		testServes(t, c, i, served{"fairlead", iptables})
	})
	t.Run("kubeadm's DaemonSet with another image", func(t *testing.T) {
		c.must(t, "", "-n", "kube-system", "set", "image", "daemonset/kube-proxy", "kube-proxy=fairlead.dev/fairlead:v1.2.3")
		testServes(t, c, i, served{"kube-proxy", iptables})
	})
	t.Run("chart with mode auto and the laboratory's image", func(t *testing.T) {
		lab := needLab(t)
		c.helm(t, "install", "fairlead", chart, "-n", "kube-system", "--set", "config.clusterCIDR=10.244.0.0/16",
			"--set", "config.conntrack.maxPerCore=0", "--set", "config.mode=auto")
		defer c.helm(t, "uninstall", "fairlead", "-n", "kube-system")
		testMeasures(t, c, lab)
	})
}

// addNode registers the testbed's node, with the addresses that it has there.
func (c *cluster) addNode(t *testing.T) {
	t.Helper()
	nodes := c.Client().CoreV1().Nodes()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	made, err := nodes.Create(t.Context(), object, metav1.CreateOptions{})
	if err == nil {
		made.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
		_, err = nodes.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// served is what a DaemonSet serves Services with.
type served struct{ daemonSet, plane string }

const (
	nftables = "nftables"
	iptables = "iptables"
	legacy   = "iptables-legacy"
)

// testServes runs the pod of a DaemonSet on a new testbed and tries Service web. Its log has no warnings or errors.
func testServes(t *testing.T, c *cluster, i image, by served) {
	p := startPod(t, c, i, by.daemonSet)
	testProbes(t, p.bed, p.proxy, p.spec.Containers[0])
	probes := []testbed.Probe{
		{From: testbed.Node, To: netip.MustParseAddrPort("10.96.0.77:80")},
		{From: "web", To: netip.MustParseAddrPort("10.96.0.77:80")},
		{From: testbed.Outside, To: netip.MustParseAddrPort("192.0.2.1:30077")},
	}
	if by.plane != nftables { // that mode serves NodePorts on all addresses
		probes = append(probes, testbed.Probe{From: testbed.Node, To: netip.MustParseAddrPort("127.0.0.1:30077")})
	}
	for _, probe := range probes {
		o, err := p.bed.Probe(t.Context(), probe)
		if err != nil || o.Backend != "web" {
			t.Errorf("from %s to %s: %v, %v", probe.From, probe.To, o, err)
		}
	}
	terminate(t, p.proxy)
	equal(t, complaints(p.proxy.Log()), "")
	testClean(t, c, p, by)
}

// testMeasures runs the pod with the laboratory beside the agent: what the DaemonSet allows is enough to measure in mode
// auto.
func testMeasures(t *testing.T, c *cluster, i image) {
	t.Helper()
	p := startPod(t, c, i, "fairlead")
	terminate(t, p.proxy)
	equal(t, complaints(p.proxy.Log()), "")
	// A busy machine may have too little time to measure, which the laboratory finds out.
	log := p.proxy.Log()
	if !strings.Contains(log, "Measured here with") && !strings.Contains(log, "there was not enough time") {
		t.Errorf("the log does not say what the laboratory has found:\n%s", log)
	}
}

// pod is one of a DaemonSet's, whose container runs.
type pod struct {
	bed   *testbed.Bed
	host  host
	spec  corev1.PodSpec
	proxy *kubernetes.Proxy
}

// startPod runs the pod of a DaemonSet on a new testbed, in which Service web has its backend.
func startPod(t *testing.T, c *cluster, i image, daemonSet string) pod {
	t.Helper()
	bed := newBed(t)
	relay, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(relay.Close)
	web := testbed.PodSpec{
		Name: "web", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.77")},
		Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}},
	}
	if _, err := bed.AddPod(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	set, err := c.Client().AppsV1().DaemonSets("kube-system").Get(t.Context(), daemonSet, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p := pod{bed: bed, host: c.host(t, i, set), spec: set.Spec.Template.Spec}
	p.proxy = p.host.start(t, bed, p.spec)
	return p
}

// testClean runs what cleans a node on which kube-proxy is back: its rules, of which one stands for all,
// stay.
func testClean(t *testing.T, c *cluster, p pod, by served) {
	t.Helper()
	run := func(command ...string) string {
		t.Helper()
		out, err := p.bed.Command(t.Context(), testbed.Node, command[0], command[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		return string(out)
	}
	run("nft", "add table ip kube-proxy; add chain ip kube-proxy services")
	list := map[string]string{nftables: "nft list ruleset", iptables: "nft list ruleset", legacy: "iptables-legacy-save"}
	rules := func() string { return run(strings.Fields(list[by.plane])...) }
	sign := map[string]string{nftables: "table ip fairlead {", iptables: "KUBE-PROXY-IN", legacy: "KUBE-PROXY-IN"}[by.plane]
	if rules := rules(); !strings.Contains(rules, sign) {
		t.Errorf("Services are not served any more when the pod has ended: %s", rules)
	}
	c.must(t, "", "apply", "-k", "kustomize/clean")
	defer c.must(t, "", "delete", "-k", "kustomize/clean")
	set, err := c.Client().AppsV1().DaemonSets("kube-system").Get(t.Context(), "fairlead-clean", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.host.initialise(t, p.bed, set.Spec.Template.Spec)
	equal(t, run("nft", "list", "tables"), "table ip kube-proxy")
	if rules := rules(); strings.Contains(rules, sign) {
		t.Errorf("fairlead clean has left %s", rules)
	}
}

// terminate ends the container as a kubelet does: with SIGTERM to its first process, which is the child
// of bubblewrap's.
func terminate(t *testing.T, proxy *kubernetes.Proxy) {
	t.Helper()
	if err := unix.Kill(child(t, proxy), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-proxy.Ended()
	if err := proxy.Terminate(); err != nil { // it has ended, and this tells how
		t.Errorf("it does not end as it should: %v", err)
	}
}

// child is the process in the container.
func child(t *testing.T, proxy *kubernetes.Proxy) int {
	t.Helper()
	all, err := procfs.AllProcs()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if s, err := p.Stat(); err == nil && s.PPID == proxy.Pid() {
			return p.PID
		}
	}
	t.Fatalf("process %d has no child", proxy.Pid())
	return 0
}

func newBed(t *testing.T) *testbed.Bed {
	t.Helper()
	bed := testbed.Need(t, testbed.Spec{})
	return bed
}

// host has what the API server gives to the kubelet for the pods of a DaemonSet.
func (c *cluster) host(t *testing.T, i image, set *appsv1.DaemonSet) host {
	t.Helper()
	h := host{root: i.unpack(t), name: string(testbed.Node), paths: t.TempDir(), config: map[string]map[string]string{}}
	maps, err := c.Client().CoreV1().ConfigMaps("kube-system").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range maps.Items {
		h.config[m.Name] = m.Data
	}
	account := kubernetes.User{Name: "system:serviceaccount:kube-system:" + set.Spec.Template.Spec.ServiceAccountName}
	config, err := c.Kubeconfig(t.TempDir(), account)
	if err != nil {
		t.Fatal(err)
	}
	h.account = h.dir(t, "account")
	h.file(t, filepath.Join(h.account, "ca.crt"), string(c.Config().CAData))
	h.file(t, filepath.Join(h.account, "token"), read(t, config+".token"))
	return h
}

// start runs the init containers of a pod to their ends, and then its only container.
func (h host) start(t *testing.T, bed *testbed.Bed, pod corev1.PodSpec) *kubernetes.Proxy {
	t.Helper()
	h.initialise(t, bed, pod)
	c, args := h.arrange(t, pod, pod.Containers[0])
	command := slices.Concat(h.inside, c.command(t, args...))
	proxy, err := kubernetes.StartProxy(t.Context(), kubernetes.ProxyOptions{Bed: bed, Command: command})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(proxy.Log())
		}
	})
	if err := proxy.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.exec(t, bed, c)
	return proxy
}

// initialise runs the init containers of a pod to their ends.
func (h host) initialise(t *testing.T, bed *testbed.Bed, pod corev1.PodSpec) {
	t.Helper()
	for _, spec := range pod.InitContainers {
		c, args := h.arrange(t, pod, spec)
		command := slices.Concat(h.inside, c.command(t, args...))
		out, err := bed.Command(t.Context(), testbed.Node, command[0], command[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", spec.Name, err, out)
		}
		t.Logf("%s:\n%s", spec.Name, out)
	}
}

// exec asks the daemon through its control socket, as kubectl exec into the pod would.
func (h host) exec(t *testing.T, bed *testbed.Bed, c container) {
	t.Helper()
	if c.mounts["/run/fairlead"] == "" {
		return // kubeadm's DaemonSet does not share that directory
	}
	command := slices.Concat(h.inside, c.command(t, "/usr/local/bin/fairlead", "dump"))
	out, err := bed.Command(t.Context(), testbed.Node, command[0], command[1:]...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "10.96.0.77:80/tcp") {
		t.Errorf("fairlead dump in the container: %v\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(h.paths, "run/fairlead/fairlead.sock")); err != nil {
		t.Errorf("the control socket is not in the host's /run/fairlead: %v", err)
	}
}

// testProbes asks what the kubelet asks.
func testProbes(t *testing.T, bed *testbed.Bed, proxy *kubernetes.Proxy, spec corev1.Container) {
	t.Helper()
	ports := map[string]int32{}
	for _, p := range spec.Ports {
		ports[p.Name] = p.ContainerPort
	}
	for _, probe := range []*corev1.Probe{spec.StartupProbe, spec.LivenessProbe, spec.ReadinessProbe} {
		if probe == nil {
			continue
		}
		to := netip.AddrPortFrom(bed.Addr(testbed.Node, false), uint16(ports[probe.HTTPGet.Port.StrVal]))
		status, body, err := proxy.Get(t.Context(), to, probe.HTTPGet.Path)
		if err != nil || status != http.StatusOK {
			t.Errorf("probe of %s%s: %d %s %v", to, probe.HTTPGet.Path, status, body, err)
		}
	}
}

// complaints are the warnings and errors of a log, without their times.
func complaints(log string) string {
	wanted := regexp.MustCompile(`(?m)^(time=\S+ )?(level=(?:WARN|ERROR).*|panic:.*|[WEF][0-9]{4} .*)$`)
	var lines []string
	for _, match := range wanted.FindAllStringSubmatch(log, -1) {
		lines = append(lines, match[2])
	}
	return strings.Join(lines, "\n")
}
