package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	if os.Getenv(helper) != "" {
		os.Exit(helperMain())
	}
	os.Exit(testbed.RunTests(m.Run))
}

// newPlane is a control plane that ends with the test.
func newPlane(t *testing.T, o Options) *ControlPlane {
	t.Helper()
	o.Parts = NeedParts(t)
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// newWorld is a whole cluster.
func newWorld(t *testing.T) (*ControlPlane, *testbed.Bed, *Relay) {
	t.Helper()
	c, bed := newPlane(t, Options{}), testbed.Need(t, testbed.Spec{})
	relay, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	k, err := c.StartKubelet(t.Context(), bed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, bed, relay
}

// clientIn is a client in a place of the bed.
func clientIn(t *testing.T, bed *testbed.Bed, kubeconfig string) *kubernetes.Clientset {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
		return bed.Dial(ctx, testbed.Node, model.TCP, netip.MustParseAddrPort(addr))
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// listServices returns an error's reason, or "ok".
func listServices(ctx context.Context, client *kubernetes.Clientset) string {
	_, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) { // it had not noticed yet that its connection is gone
		_, err = client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	}
	switch reason := apierrors.ReasonForError(err); {
	case err == nil:
		return "ok"
	case reason != "":
		return string(reason)
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline"
	}
	return err.Error()
}

func TestUsers(t *testing.T) {
	t.Parallel()
	c, bed := newPlane(t, Options{Controllers: []string{}}), testbed.Need(t, testbed.Spec{})
	r, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		user User
		want string
	}{
		{Admin(), "ok"},
		{KubeProxy(), "ok"},
		{User{Name: "somebody"}, "Forbidden"},
		{User{Name: "system:serviceaccount:kube-system:somebody"}, "Forbidden"},
		{User{Name: "late", Groups: Admin().Groups, Life: -time.Second}, "Unauthorized"},
	} {
		path, err := r.Kubeconfig(t.TempDir(), test.user)
		if err != nil {
			t.Fatal(err)
		}
		if got := listServices(t.Context(), clientIn(t, bed, path)); got != test.want {
			t.Errorf("%s: %s, want %s", test.user.Name, got, test.want)
		}
	}
}

func TestRelay(t *testing.T) {
	t.Parallel()
	c, bed := newPlane(t, Options{Controllers: []string{}}), testbed.Need(t, testbed.Spec{})
	r, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	path, err := r.Kubeconfig(t.TempDir(), KubeProxy())
	if err != nil {
		t.Fatal(err)
	}
	client := clientIn(t, bed, path)
	expect := func(when, want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if want != "deadline" {
			ctx = t.Context()
		}
		if got := listServices(ctx, client); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	restore := func() {
		if err := r.Restore(); err != nil {
			t.Fatal(err)
		}
	}
	expect("at first", "ok")
	r.Cut()
	expect("cut", "refused")
	restore()
	expect("restored", "ok")
	r.Hang()
	expect("hanging", "deadline")
	restore()
	expect("hanging no more", "ok")
	r.Slow(50 * time.Millisecond)
	start := time.Now()
	expect("slow", "ok")
	if took := time.Since(start); took < 100*time.Millisecond {
		t.Errorf("a slow answer took %s", took)
	}
	r.Close()
	expect("closed", "refused")
}

// Programs come back with what they knew, at the same addresses.
func TestRestart(t *testing.T) {
	t.Parallel()
	c := newPlane(t, Options{Controllers: []string{}})
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.10", Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := c.Client().CoreV1().Services("default").Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, kill := range []bool{false, true} {
		for name, restart := range map[string]func() error{
			"API server": func() error { return errors.Join(c.StopAPIServer(kill), c.StartAPIServer(t.Context())) },
			"etcd":       func() error { return errors.Join(c.StopEtcd(kill), c.StartEtcd(t.Context())) },
		} {
			if err := restart(); err != nil {
				t.Fatalf("%s, kill=%v: %v", name, kill, err)
			}
			eventually.Nil(t, fmt.Sprintf("%s, kill=%v", name, kill), func() error {
				_, err := c.Client().CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
				return err
			})
		}
	}
}

// Objects that no API server accepts can be stored, and read from it.
func TestStore(t *testing.T) {
	t.Parallel()
	c := newPlane(t, Options{Controllers: []string{}})
	bad := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "bad", Namespace: "default"},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.300", Ports: []corev1.ServicePort{{Port: 70000}}},
	}
	if _, err := c.Client().CoreV1().Services("default").Create(t.Context(), bad.DeepCopy(), metav1.CreateOptions{}); err == nil {
		t.Fatal("the API server accepted it")
	}
	if err := c.Store(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	if err := c.StoreRaw(t.Context(), "/registry/services/specs/default/json", []byte(
		`{"kind":"Service","apiVersion":"v1","metadata":{"name":"json","namespace":"default"},"spec":{"clusterIP":"x"}}`)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"bad": "10.96.0.300", "json": "x"} {
		got, err := c.Client().CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || got.Spec.ClusterIP != want {
			t.Errorf("%s: %v, %v; want %s", name, got, err, want)
		}
	}
	if err := c.Unstore(t.Context(), "/registry/services/specs/default/bad"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().CoreV1().Services("default").Get(t.Context(), "bad", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after Unstore: %v", err)
	}
}

// helper makes the test binary a process that starts a control plane and waits to be killed.
const helper = "KUBERNETES_TEST_HELPER"

func helperMain() int {
	c, err := Start(context.Background(), Options{Controllers: []string{}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(c.etcd.cmd.Process.Pid, c.apiServer.cmd.Process.Pid, c.dir)
	select {}
}

// A process that is killed takes its programs with it; the next one removes its directory.
func TestStart_killed(t *testing.T) {
	t.Parallel()
	NeedParts(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	process := exec.CommandContext(t.Context(), self)
	process.Env = append(os.Environ(), helper+"=1")
	out, err := process.StdoutPipe()
	if err == nil {
		err = process.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var etcd, apiServer int
	var dir string
	if _, err := fmt.Fscan(out, &etcd, &apiServer, &dir); err != nil {
		t.Fatal(err)
	}
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = process.Wait() // it was killed
	eventually.True(t, "etcd and the API server end", func() bool {
		return errors.Is(unix.Kill(etcd, 0), unix.ESRCH) && errors.Is(unix.Kill(apiServer, 0), unix.ESRCH)
	})
	sweep() // unless another process has done it already
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", dir, err)
	}
}

const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      readinessGates: [{conditionType: example.com/wanted}]
      containers:
      - name: web
        image: web
        ports: [{containerPort: 8080}]
        lifecycle: {preStop: {sleep: {seconds: 1}}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// podStates is a line for each pod.
func podStates(ctx context.Context, t *testing.T, c *ControlPlane) string {
	t.Helper()
	list, err := c.Client().CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, p := range list.Items {
		lines = append(lines, fmt.Sprintf("%s %s ready=%v", p.Spec.NodeName, p.Status.Phase, conditionTrue(&p, corev1.PodReady)))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// endpointStates counts those of the Service web.
func endpointStates(ctx context.Context, t *testing.T, c *ControlPlane) string {
	t.Helper()
	list, err := c.Client().DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
	if err != nil {
		t.Fatal(err)
	}
	ready, all := 0, 0
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			all++
			if *e.Conditions.Ready {
				ready++
			}
		}
	}
	return fmt.Sprintf("%d of %d ready", ready, all)
}

// A Deployment that kubectl applies runs on both nodes, follows its readiness gates, leaves a node that
// is drained, and ends.
func TestKubelet(t *testing.T) {
	t.Parallel()
	c, bed, _ := newWorld(t)
	kubectl := func(args ...string) {
		t.Helper()
		if out, err := c.Kubectl(t.Context(), web, args...); err != nil {
			t.Fatal(err, out)
		}
	}
	pods := c.Client().CoreV1().Pods("default")
	state := func(ctx context.Context) string { return podStates(ctx, t, c) }
	endpoints := func(ctx context.Context) string { return endpointStates(ctx, t, c) }
	expect := func(what func(context.Context) string, want string) {
		t.Helper()
		eventually.Equal(t, "the state", want, func() string { return what(t.Context()) })
	}
	lines := func(line ...string) string { return strings.Join(line, "\n") }
	kubectl("apply", "-f", "-")
	expect(state, lines("node Running ready=false", "node Running ready=false", "node-b Running ready=false", "node-b Running ready=false"))
	expect(endpoints, "0 of 4 ready")
	list, err := pods.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: "example.com/wanted", Status: corev1.ConditionTrue})
		if _, err := pods.UpdateStatus(t.Context(), &p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		o, err := bed.Probe(t.Context(), testbed.Probe{From: testbed.Outside, To: netip.AddrPortFrom(netip.MustParseAddr(p.Status.PodIP), 8080)})
		if err != nil || o.Backend != string(PodPlace(p.Namespace, p.Name)) {
			t.Errorf("pod %s: %v, %v", p.Name, o, err)
		}
	}
	expect(endpoints, "4 of 4 ready")
	kubectl("drain", "node-b", "--timeout=60s")
	expect(state, lines("node Running ready=false", "node Running ready=false", "node Running ready=true", "node Running ready=true"))
	kubectl("uncordon", "node-b")
	kubectl("scale", "deployment/web", "--replicas=0")
	expect(state, "")
	expect(endpoints, "0 of 0 ready")
	if place := bed.Owner(netip.MustParseAddr(list.Items[0].Status.PodIP)); place != "" {
		t.Errorf("the address of a pod that is gone belongs to %s", place)
	}
}

// The real kube-proxy serves what there is, with the rights that a node proxy has.
func TestStartProxy(t *testing.T) {
	t.Parallel()
	c, bed, relay := newWorld(t)
	if out, err := c.Kubectl(t.Context(), strings.Replace(web, "readinessGates", "#", 1), "apply", "-f", "-"); err != nil {
		t.Fatal(err, out)
	}
	config, err := relay.Kubeconfig(t.TempDir(), KubeProxy())
	if err != nil {
		t.Fatal(err)
	}
	p, err := StartProxy(t.Context(), ProxyOptions{Bed: bed, Command: KubeProxyCommand(NeedParts(t), config, "nftables")})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	to := netip.MustParseAddrPort("10.96.0.10:80")
	eventually.True(t, "the Service answers", func() bool {
		o, err := bed.Probe(t.Context(), testbed.Probe{From: testbed.Outside, To: to})
		return err == nil && o.Result == testbed.Answered
	})
	load, err := traffic.StartWatch(t.Context(), bed, traffic.WatchSpec{
		Visits: traffic.Paths([]testbed.Place{testbed.Node, testbed.Outside}, []netip.AddrPort{to}), Interval: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := load.More(t.Context(), 100); err != nil {
		t.Fatal(err)
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 100 {
		t.Error(r)
	}
	u, err := p.Usage()
	if err != nil || u.CPU == 0 || u.RSS < 1<<20 || u.Peak < u.RSS {
		t.Errorf("%+v, %v", u, err)
	}
	if err := p.Terminate(); err != nil {
		t.Log("kube-proxy ends with:", err)
	}
	select {
	case <-p.Ended():
	default:
		t.Error("it has not ended")
	}
}

func TestProxy_sizeOfChildren(t *testing.T) {
	bed := testbed.Need(t, testbed.Spec{})
	const child = "dd if=/dev/zero of=/dev/null bs=20M & trap 'kill $!' TERM; wait"
	p, err := StartProxy(t.Context(), ProxyOptions{Bed: bed, Command: []string{"sh", "-c", child}})
	if err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the child's size is known", func() bool {
		u, err := p.Usage()
		return err == nil && u.ChildPeak >= 20<<20
	})
	if err := p.Terminate(); err != nil {
		t.Log("the shell ends with:", err)
	}
}
