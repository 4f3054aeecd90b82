package kubernetes

import (
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

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

// newBed is a cluster's network that ends with the test.
func newBed(t *testing.T) *testbed.Bed {
	t.Helper()
	b, err := testbed.New(t.Context(), testbed.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestStart(t *testing.T) {
	c := newPlane(t, Options{Controllers: []string{}})
	bed := newBed(t)
	r, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.Client().CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(list.Items)
	for _, u := range []User{Admin, KubeProxy, {Name: "system:serviceaccount:kube-system:kube-proxy"}} {
		path, err := r.Kubeconfig(t.TempDir(), u)
		if err != nil {
			t.Fatal(err)
		}
		kubectl := bed.Command(t.Context(), testbed.Node, NeedParts(t).Path("kubectl"), "--kubeconfig", path, "get", "services", "-A")
		out, err := kubectl.CombinedOutput()
		t.Logf("%s: %v\n%s", u.Name, err, out)
	}
}

const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: web
        image: web
        ports: [{containerPort: 8080}]
        lifecycle: {preStop: {sleep: {seconds: 3}}}
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

// The real kube-proxy serves a Deployment that kubectl applies.
func TestKubelet_kubeProxy(t *testing.T) {
	parts := NeedParts(t)
	c := newPlane(t, Options{})
	bed := newBed(t)
	relay, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	k, err := c.StartKubelet(t.Context(), bed, KubeletOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	config, err := relay.Kubeconfig(dir, KubeProxy)
	if err != nil {
		t.Fatal(err)
	}
	p, err := StartProxy(t.Context(), ProxyOptions{Bed: bed, Command: KubeProxyCommand(parts, config, "nftables")})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(p.Log(), c.Log("kube-controller-manager"))
		}
	})
	kubectl := func(args ...string) {
		t.Helper()
		admin, err := c.Kubeconfig(dir, Admin)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), parts.Path("kubectl"), append([]string{"--kubeconfig", admin}, args...)...)
		cmd.Stdin = strings.NewReader(web)
		out, err := cmd.CombinedOutput()
		t.Logf("kubectl %s: %s", args, out)
		if err != nil {
			t.Fatal(err)
		}
	}
	kubectl("apply", "-f", "-")
	kubectl("rollout", "status", "deployment/web", "--timeout=60s")
	clusterIP := netip.MustParseAddrPort("10.96.0.10:80")
	for {
		o, err := bed.Probe(t.Context(), testbed.Probe{From: testbed.Node, To: clusterIP})
		if err != nil {
			t.Fatal(err)
		}
		if o.Result == testbed.Answered {
			break
		}
	}
	load := StartLoad(t.Context(), bed, LoadSpec{
		From: []testbed.Place{testbed.Node, testbed.Outside}, To: []netip.AddrPort{clusterIP, netip.MustParseAddrPort("192.0.2.1:30080")},
		Interval: 20 * time.Millisecond,
	})
	kubectl("set", "env", "deployment/web", "A=B")
	kubectl("rollout", "status", "deployment/web", "--timeout=60s")
	kubectl("drain", "node-b", "--ignore-daemonsets", "--timeout=60s")
	kubectl("get", "pods", "-o", "wide")
	r := load.Stop(); t.Log(r, r.Answered)
	u, err := p.Usage()
	t.Logf("%+v %v", u, err)
}
