package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// asPlugin makes the test binary the program itself.
const asPlugin = "FAIRLEAD_TEST_PLUGIN"

// agentProgram is where the agent is compiled.
var agentProgram string

func TestMain(m *testing.M) {
	vm.Guest()
	traffic.Main()
	if os.Getenv(asPlugin) != "" {
		main()
	}
	os.Exit(testbed.RunTests(func() int {
		return programtest.WithAgent(func(agent string) int {
			agentProgram = agent
			return m.Run()
		})
	}))
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
  clusterIP: 10.96.0.10
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// world is a real control plane with two nodes, each with an agent.
type world struct {
	*testing.T
	plane  *kubernetes.ControlPlane
	bed    *testbed.Bed
	relay  *kubernetes.Relay
	agents map[testbed.Place]*testbed.Cmd
	dir    string // of this program, its kubeconfig, and the agents' sockets
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, agents: map[testbed.Place]*testbed.Cmd{}, dir: t.TempDir()}
	var err error
	if w.plane, err = kubernetes.Start(t.Context(), kubernetes.Options{Parts: kubernetes.NeedParts(t)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.plane.Close() })
	w.bed = testbed.Need(t, testbed.Spec{})
	if w.relay, err = w.plane.Serve(w.bed); err != nil {
		t.Fatal(err)
	}
	kubelet, err := w.plane.StartKubelet(t.Context(), w.bed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kubelet.Close() })
	err = kubelet.ServeExec(t.Context(), w.plane, func(node testbed.Place, words []string) *testbed.Cmd {
		return w.bed.Command(t.Context(), node, filepath.Join(filepath.Dir(agentProgram), words[0]),
			append(words[1:], "--control-socket", w.socket(node))...)
	})
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err == nil {
		err = os.Symlink(self, filepath.Join(w.dir, "kubectl-fairlead"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := w.plane.Kubectl(t.Context(), shop, "apply", "-f", "-"); err != nil {
		t.Fatal(err, out)
	}
	for _, node := range []testbed.Place{testbed.Node, testbed.NodeB} {
		w.start(node)
	}
	return w
}

func (w *world) socket(node testbed.Place) string {
	return filepath.Join(w.dir, string(node)+".socket")
}

// start runs an agent on a node, and makes its pod.
func (w *world) start(node testbed.Place) {
	w.Helper()
	config, err := w.relay.Kubeconfig(w.TempDir(), kubernetes.Admin())
	if err != nil {
		w.Fatal(err)
	}
	c := w.bed.Command(w.Context(), node, agentProgram, "run", "--kubeconfig", config, "--hostname-override", string(node),
		"--control-socket", w.socket(node), "--cluster-cidr", testbed.ClusterCIDR(), "--proxy-mode", "nftables")
	if err := c.Start(); err != nil {
		w.Fatal(err)
	}
	w.agents[node] = c
	w.register(node, "fairlead", corev1.Linux)
}

// register makes the pod of an agent.
func (w *world) register(node testbed.Place, app string, os corev1.OSName) {
	w.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: app + "-" + string(node), Labels: map[string]string{"app.kubernetes.io/name": app}},
		Spec: corev1.PodSpec{
			NodeName: string(node), HostNetwork: true, OS: &corev1.PodOS{Name: os},
			Containers: []corev1.Container{{Name: "fairlead", Image: "fairlead"}},
		},
	}
	_, err := w.plane.Client().CoreV1().Pods("kube-system").Create(w.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
}

// kubectl runs the plugin by kubectl, as a user.
func (w *world) kubectl(u kubernetes.User, words ...string) (status int, out string) {
	w.Helper()
	config, err := w.plane.Kubeconfig(w.dir, u)
	if err != nil {
		w.Fatal(err)
	}
	c := exec.CommandContext(w.Context(), kubernetes.NeedParts(w.T).Path("kubectl"), append([]string{"fairlead"}, words...)...)
	c.Env = append(os.Environ(), asPlugin+"=1", "KUBECONFIG="+config, "HOME="+w.dir, "PATH="+w.dir+":"+os.Getenv("PATH"))
	text, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.Fatal(err)
	}
	return c.ProcessState.ExitCode(), string(text)
}

// inNamespace is a kubeconfig whose user works in a namespace.
func (w *world) inNamespace(name string) string {
	w.Helper()
	path, err := w.plane.Kubeconfig(w.TempDir(), kubernetes.Admin())
	if err != nil {
		w.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(path)
	if err == nil {
		config.Contexts[config.CurrentContext].Namespace = name
		err = clientcmd.WriteToFile(*config, path)
	}
	if err != nil {
		w.Fatal(err)
	}
	return path
}

// says expects an exit status, and texts in what is printed, in order.
func (w *world) says(status int, texts []string, words ...string) {
	w.Helper()
	got, out := w.kubectl(kubernetes.Admin(), words...)
	rest := out
	for _, text := range texts {
		_, after, ok := strings.Cut(rest, text)
		if !ok {
			w.Errorf("%v does not say %q in order, but:\n%s", words, text, out)
			return
		}
		rest = after
	}
	if got != status {
		w.Errorf("%v: exit status %d, not %d:\n%s", words, got, status, out)
	}
}

// TestPlugin asks the agents of two nodes through a real API server, and has them switch.
func TestPlugin(t *testing.T) {
	w := newWorld(t)
	eventually.True(t, "both nodes serve", func() bool {
		status, _ := w.kubectl(kubernetes.Admin(), "why", "web")
		return status == 0
	})
	w.says(0, []string{"NODE", "HEALTHY", "\nnode ", "nftables", "yes", "\nnode-b ", "nftables", "yes"}, "status")
	w.says(0, []string{`"node": "node"`, `"plane": "nftables"`, `"node": "node-b"`}, "status", "-o", "json")
	w.says(0, []string{"node: default/web: it works from this node", "node-b: default/web: it works from this node"}, "why", "web")
	w.says(1, []string{"node: other/web: other/web: the proxy has no such Service", "node-b: other/web"}, "why", "web", "-n", "other")
	w.says(0, []string{"default/web", "2 ready"}, "services", "--node", "node-b")
	w.says(1, []string{"other/web: the proxy has no such Service"}, "services", "web", "--node", "node-b", "--kubeconfig", w.inNamespace("other"))
	w.says(0, []string{"Service default/web answers"}, "explain", "--node", "node", "node", "svc/default/web")
	w.says(0, []string{": no difference"}, "audit", "--node", "node")
	w.says(1, []string{"drop"}, "explain", "--node", "node", "node", "10.96.0.99:80")
	w.says(2, []string{"name one --node of node, node-b"}, "audit")
	w.says(2, []string{"--node other: no agent is there, but on: node, node-b"}, "status", "--node", "other")
	w.says(2, []string{"--output"}, "status", "-o", "yaml")
	w.says(1, []string{"no agent is in namespace default"}, "status", "--agent-namespace", "default")
	if status, out := w.kubectl(kubernetes.User{Name: "guest"}, "status"); status != 1 || !strings.Contains(out, "forbidden") {
		t.Errorf("a user without rights: exit status %d, %s", status, out)
	}

	w.says(1, []string{"node: not switched: there is no data plane \"other\"", "switched: none; not begun: node-b"}, "switch", "other")
	w.says(0, []string{"node: opening iptables", "node: healthy", "node-b: opening iptables", "node-b: healthy"}, "switch", "iptables")
	w.says(0, []string{"\nnode ", "iptables", "\nnode-b ", "iptables"}, "status")
	_ = w.agents[testbed.NodeB].Process.Kill()
	_ = w.agents[testbed.NodeB].Wait()
	w.says(1, []string{"node: opening nftables", "node: healthy", "node-b: not switched: no proxy listens", "switched: node; not begun: none"},
		"switch", "nftables")
	w.says(1, []string{"\nnode ", "nftables", "yes", "\nnode-b ", "no ", "no proxy listens"}, "status")
	w.says(1, []string{"node-b: default/web: no proxy listens", "node: default/web: it works"}, "why", "web")

	if out, err := w.plane.Kubectl(t.Context(), "", "delete", "pod", "-n", "kube-system", "--grace-period=0", "--force", "fairlead-node-b"); err != nil {
		t.Fatal(err, out)
	}
	w.register(testbed.NodeB, "fairlead-windows", corev1.Windows)
	eventually.True(t, "its node's kubelet knows the pod", func() bool {
		_, out := w.kubectl(kubernetes.Admin(), "status", "--node", "node-b")
		return strings.Contains(out, "no proxy listens")
	})
	w.says(1, []string{"\nnode ", "yes", "\nnode-b ", "no proxy listens"}, "status")
	w.says(1, []string{"node-b: default/web: no proxy listens", "node: default/web: it works"}, "why", "web")
	w.says(2, []string{"name one --node of node, node-b"}, "services")
	w.says(0, []string{"node-b: not switched: Windows", "node: opening iptables", "node: healthy"}, "switch", "iptables")
	w.says(1, []string{"node-b: not switched: Windows"}, "switch", "iptables", "--node", "node-b")
}
