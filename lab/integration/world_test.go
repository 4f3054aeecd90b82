package integration

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// program is the agent.
var program string

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(func() int {
		return programtest.WithAgent(func(agent string) int {
			program = agent
			return m.Run()
		})
	}))
}

// fairlead is the agent under the name kube-proxy: users who replace the image get this name.
func fairlead(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "kube-proxy")
	if err := os.Symlink(program, name); err != nil {
		t.Fatal(err)
	}
	return name
}

// client is a pod from which connections come.
const client testbed.Place = "client"

// places are where connections come from.
func places() []testbed.Place { return []testbed.Place{client, testbed.Node, testbed.Outside} }

// addresses are those of the Service web.
func addresses() []netip.AddrPort {
	return []netip.AddrPort{
		netip.MustParseAddrPort("10.96.0.10:80"), netip.MustParseAddrPort("[fd00::a60:a]:80"),
		netip.MustParseAddrPort("192.0.2.1:30080"), netip.MustParseAddrPort("203.0.113.7:80"),
	}
}

// world is a cluster whose node has a service proxy.
type world struct {
	*testing.T
	plane   *kubernetes.ControlPlane
	bed     *testbed.Bed
	relay   *kubernetes.Relay
	kubelet *kubernetes.Kubelet
	proxy   *kubernetes.Proxy
	command []string
	dir     string // of its kubeconfig
}

// newWorld is a cluster in which the proxy runs and nothing else.
func newWorld(t *testing.T, o kubernetes.Options) *world {
	t.Helper()
	return newWorldIn(t, "nftables", o)
}

// newWorldIn is one in which the proxy has a mode.
func newWorldIn(t *testing.T, mode string, o kubernetes.Options) *world {
	t.Helper()
	o.Parts = kubernetes.NeedParts(t)
	w := &world{T: t}
	var err error
	if w.plane, err = kubernetes.Start(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	w.cleanup(w.plane.Close)
	w.bed = testbed.Need(t, testbed.Spec{
		Pods: []testbed.PodSpec{{Name: string(client)}}, Cgroup: mode == "ebpf",
	})
	if w.relay, err = w.plane.Serve(w.bed); err != nil {
		t.Fatal(err)
	}
	w.kubectl("create", "clusterrolebinding", "kubeadm:node-proxier",
		"--clusterrole=system:node-proxier", "--serviceaccount=kube-system:kube-proxy")
	if w.kubelet, err = w.plane.StartKubelet(t.Context(), w.bed); err != nil {
		t.Fatal(err)
	}
	w.cleanup(w.kubelet.Close)
	w.command = w.proxyCommand(o.Parts, mode)
	if mode == "ebpf" {
		w.command = append(w.command, "--cgroup-root="+w.bed.Cgroup())
		if err := w.bed.MountBPFFS("/sys/fs/bpf"); err != nil {
			t.Fatal(err)
		}
	}
	w.startProxy()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the proxy's log:\n%s", w.proxy.Log())
		}
	})
	return w
}

func (w *world) cleanup(f func() error) {
	w.Cleanup(func() {
		if err := f(); err != nil {
			w.Error(err)
		}
	})
}

// proxyCommand is Fairlead with the flags of kube-proxy, or that itself.
func (w *world) proxyCommand(parts kubernetes.Parts, mode string) []string {
	w.Helper()
	w.dir = w.TempDir()
	command := kubernetes.KubeProxyCommand(parts, w.newToken(), mode)
	if os.Getenv("FAIRLEAD_TEST_PROXY") != "kube-proxy" {
		command[0] = fairlead(w.T)
		command = append(command, "--control-socket="+filepath.Join(w.TempDir(), "socket"))
	}
	return command
}

// newToken writes the kubeconfig of the account that kubeadm makes for kube-proxy, with a new token, and
// returns its name.
func (w *world) newToken() string {
	w.Helper()
	config, err := w.relay.Kubeconfig(w.dir, kubernetes.User{Name: "system:serviceaccount:kube-system:kube-proxy"})
	if err != nil {
		w.Fatal(err)
	}
	return config
}

func (w *world) startProxy() {
	w.Helper()
	var err error
	// Its end is the Bed's: the test's context ends before the cleanups, which want it to run.
	w.proxy, err = kubernetes.StartProxy(context.WithoutCancel(w.Context()), kubernetes.ProxyOptions{Bed: w.bed, Command: w.command})
	if err == nil {
		err = w.proxy.Ready(w.Context())
	}
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) kubectl(args ...string) {
	w.Helper()
	w.kubectlStdin("", args...)
}

func (w *world) kubectlStdin(stdin string, args ...string) {
	w.Helper()
	if out, err := w.plane.Kubectl(w.Context(), stdin, args...); err != nil {
		w.Fatal(err, "\n", out)
	}
}

//go:embed testdata/web.yaml
var web string

// deployWeb applies the Deployment and the Service web, whose pods serve on for a while when they are
// deleted, and returns when all addresses answer everywhere.
func (w *world) deployWeb(linger time.Duration) {
	w.Helper()
	manifest := strings.ReplaceAll(web, "LINGER", strconv.Itoa(int(linger.Seconds())))
	w.kubectlStdin(manifest, "apply", "-f", "-")
	services := w.plane.Client().CoreV1().Services("default")
	s, err := services.Get(w.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
	if _, err := services.UpdateStatus(w.Context(), s, metav1.UpdateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.rolledOut()
	w.awaitEverywhere(testbed.Answered)
}

// rolledOut returns when the Deployment has the pods that it shall have, and no others.
func (w *world) rolledOut() {
	w.Helper()
	w.kubectl("rollout", "status", "deployment/web", "--timeout=120s")
	d, err := w.plane.Client().AppsV1().Deployments("default").Get(w.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	eventually.Nil(w, "the old pods end", func() error {
		list, err := w.plane.Client().CoreV1().Pods("default").List(w.Context(), metav1.ListOptions{})
		if err == nil && len(list.Items) != int(*d.Spec.Replicas) {
			err = fmt.Errorf("there are %d", len(list.Items))
		}
		return err
	})
}

// awaitEverywhere returns when every address has a result for every place.
func (w *world) awaitEverywhere(want testbed.Result) {
	w.Helper()
	for _, from := range places() {
		for _, to := range addresses() {
			eventually.Nil(w, fmt.Sprintf("%s to %s is %s", from, to, want), func() error {
				o, err := w.bed.Probe(w.Context(), testbed.Probe{From: from, To: to})
				if err == nil && o.Result != want {
					err = errors.New(o.String())
				}
				return err
			})
		}
	}
}

// load connects from everywhere to everywhere, some hundred times a second.
func (w *world) load() *traffic.Watch {
	const (
		interval = 50 * time.Millisecond
		patience = 10 * time.Second // a slow answer is one
	)
	load, err := traffic.StartWatch(context.WithoutCancel(w.Context()), w.bed, traffic.WatchSpec{
		Visits: traffic.Paths(places(), addresses()), Interval: interval, Timeout: patience,
	})
	if err != nil {
		w.Fatal(err)
	}
	return load
}

// unbroken makes a change under load. No connection may fail, and those after the change are answered by
// the pods that there are then.
func (w *world) unbroken(change func()) {
	w.Helper()
	const some = 100
	load := w.load()
	w.answers(load, some)
	change()
	w.answers(load, some)
	before := load.Report()
	w.answers(load, some)
	after := load.Stop()
	w.Logf("%d connections, %d failed", after.Total().Answered, len(after.Faults))
	if len(after.Faults) > 0 {
		w.Error(after)
	}
	w.onlyPods(before, after)
}

func (w *world) answers(load *traffic.Watch, n int) {
	w.Helper()
	ctx, cancel := eventually.Context(w.Context())
	defer cancel()
	if err := load.More(ctx, n); err != nil {
		w.Fatal(err, load.Stop())
	}
}

// onlyPods checks that between two reports only pods answered that are there to stay, and all of them.
func (w *world) onlyPods(before, after traffic.Report) {
	w.Helper()
	pods := w.pods()
	for place := range pods {
		if after.Backends[place] == before.Backends[place] {
			w.Errorf("%s gets no connections", place)
		}
	}
	for place, n := range after.Backends {
		if n > before.Backends[place] && !pods[place] {
			w.Errorf("%s still gets connections", place)
		}
	}
}

// pods are those that are there to stay.
func (w *world) pods() map[string]bool {
	w.Helper()
	list, err := w.plane.Client().CoreV1().Pods("default").List(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	pods := map[string]bool{}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			pods[string(kubernetes.PodPlace(p.Namespace, p.Name))] = true
		}
	}
	return pods
}
