package deploy

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// A real API server takes what is installed, knows every field of it, and gives it all back.
func TestInstall(t *testing.T) {
	c := startCluster(t)
	c.must(t, read(t, "testdata/monitoring-crds.yaml"), "apply", "-f", "-")
	c.must(t, "", "wait", "--for=condition=Established", "customresourcedefinitions", "--all")
	c.kubeadm(t, "create")
	for _, file := range values(t) {
		t.Run("helm "+filepath.Base(file), func(t *testing.T) { testHelm(t, c, chart, "--values", file) })
	}
	t.Run("helm without values", func(t *testing.T) { testHelm(t, c, chart) })
	t.Run("misspelt", func(t *testing.T) { testMisspelt(t, c) })
	t.Run("kubectl apply -k", func(t *testing.T) { testKustomize(t, c) })
	t.Run("instead of kube-proxy", func(t *testing.T) { testInstead(t, c) })
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// testHelm installs a chart, upgrades and uninstalls it.
func testHelm(t *testing.T, c *cluster, chart string, flags ...string) {
	release := append([]string{"fairlead", chart, "-n", "kube-system"}, flags...)
	c.helm(t, append([]string{"install"}, release...)...)
	manifest := c.helm(t, "get", "manifest", "fairlead", "-n", "kube-system")
	c.must(t, manifest, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
	c.helm(t, append([]string{"upgrade"}, release...)...)
	c.helm(t, "uninstall", "fairlead", "-n", "kube-system")
	equal(t, c.ours(t), "")
}

// testMisspelt shows that fields are known, those of the Prometheus operator's kinds too.
func testMisspelt(t *testing.T, c *cluster) {
	rendered := template(t, "--values", chart+"/ci/everything-values.yaml")
	for _, field := range []string{"updateStrategy", "podMetricsEndpoints", "relabelings", "expr"} {
		wrong := strings.ReplaceAll(rendered, field+":", field+"s:")
		out, err := c.kubectl(t, c.admin, wrong, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
		if err == nil || !strings.Contains(out+err.Error(), field+`s"`) {
			t.Errorf("%ss: %v\n%s", field, err, out)
		}
	}
}

// ours are the objects with our label.
func (c *cluster) ours(t *testing.T) string {
	t.Helper()
	return c.must(t, "", "get", "daemonsets,configmaps,serviceaccounts,clusterroles,clusterrolebindings,podmonitors,prometheusrules",
		"--all-namespaces", "--selector=app.kubernetes.io/name=fairlead", "--output=name")
}

func testKustomize(t *testing.T, c *cluster) {
	for _, dir := range []string{"base", "overlays/own-configuration", "../testdata/components"} {
		path := filepath.Join("kustomize", dir)
		c.must(t, "", "apply", "--dry-run=server", "--validate=strict", "-k", path)
	}
	c.must(t, "", "apply", "-k", "kustomize/base")
	equal(t, c.ours(t), "daemonset.apps/fairlead\nconfigmap/fairlead\nserviceaccount/fairlead\n"+
		"clusterrole.rbac.authorization.k8s.io/fairlead\nclusterrolebinding.rbac.authorization.k8s.io/fairlead")
	c.must(t, "", "delete", "-k", "kustomize/base")
	equal(t, c.ours(t), "")
}

// affinity is where a DaemonSet's pods may run, by its node affinity and by its anti-affinity.
func (c *cluster) affinity(t *testing.T, daemonSet string) string {
	t.Helper()
	return c.must(t, "", "-n", "kube-system", "get", "daemonset", daemonSet, "-o", `jsonpath={.spec.template.spec.nodeSelector} `+
		`{.spec.template.spec.affinity..matchExpressions}{.spec.template.spec.affinity.podAntiAffinity}`)
}

// testInstead lets kube-proxy's pods go and comes back, as docs/install.md says.
func testInstead(t *testing.T, c *cluster) {
	apply := func() []string {
		t.Helper()
		out := c.must(t, "", "apply", "--server-side", "-k", "kustomize/overlays/instead-of-kube-proxy")
		equal(t, c.affinity(t, "kube-proxy"), `{"kubernetes.io/os":"linux"} `+
			`[{"key":"fairlead.dev/kube-proxy","operator":"In","values":["wanted"]}]`)
		return strings.Split(out, "\n")
	}
	if first := apply()[0]; first != "daemonset.apps/kube-proxy serverside-applied" {
		t.Errorf("it begins with %s", first)
	}
	equal(t, c.affinity(t, "fairlead"), `{"kubernetes.io/os":"linux"} `+
		`[{"key":"fairlead.dev/kube-proxy","operator":"NotIn","values":["wanted"]}]`+
		`{"requiredDuringSchedulingIgnoredDuringExecution":`+
		`[{"labelSelector":{"matchLabels":{"k8s-app":"kube-proxy"}},"namespaces":["kube-system"],"topologyKey":"kubernetes.io/hostname"}]}`)
	c.kubeadm(t, "replace") // as kubeadm upgrade does
	equal(t, c.affinity(t, "kube-proxy"), `{"kubernetes.io/os":"linux"}`)
	apply()
	c.must(t, "", "delete", "-k", "kustomize/base")
	equal(t, c.ours(t), "")
	c.must(t, "", "-n", "kube-system", "patch", "daemonset", "kube-proxy", "-p", `{"spec":{"template":{"spec":{"affinity":null}}}}`)
	equal(t, c.affinity(t, "kube-proxy"), `{"kubernetes.io/os":"linux"}`)
}

// kubeadm has kubectl write what kubeadm writes, in its name: the owner of a field decides which program may apply it.
func (c *cluster) kubeadm(t *testing.T, verb string) {
	t.Helper()
	c.must(t, read(t, "testdata/kubeadm.yaml"), verb, "--field-manager=kubeadm", "-f", "-")
}

const account = "system:serviceaccount:kube-system:fairlead"

// The service account may do what the daemon does, and nothing else.
func TestRights(t *testing.T) {
	c := startCluster(t)
	c.helm(t, "install", "fairlead", chart, "-n", "kube-system", "--set", "apiServer=https://192.0.2.254:6443")
	config, err := c.Kubeconfig(t.TempDir(), kubernetes.User{Name: account})
	if err != nil {
		t.Fatal(err)
	}
	t.Run("daemon", func(t *testing.T) { testDaemonsRequests(t, c, config) })
	t.Run("others", func(t *testing.T) { testForbidden(t, c, config) })
	t.Run("rules", func(t *testing.T) {
		equal(t, c.must(t, "", "get", "clusterrole", "fairlead", "-o",
			`jsonpath={range .rules[*]}{.apiGroups} {.resources} {.verbs}{"\n"}{end}`), `
[""] ["services","nodes"] ["list","watch"]
["discovery.k8s.io"] ["endpointslices"] ["list","watch"]
["networking.k8s.io"] ["servicecidrs"] ["list","watch"]
["events.k8s.io"] ["events"] ["create","patch"]
["coordination.k8s.io"] ["leases"] ["list"]`)
	})
}

// With the setting readinessGate it may also read pods, and set one condition of those of its node.
func TestRights_readinessGate(t *testing.T) {
	c := startCluster(t)
	c.addNode(t)
	c.helm(t, "install", "fairlead", chart, "-n", "kube-system", "--set", "apiServer=https://192.0.2.254:6443",
		"--set", "fairleadConfig.readinessGate=true")
	c.must(t, gated, "apply", "-f", "-")
	c.must(t, "", "patch", "pod", "gated", "--subresource=status",
		`--patch={"status": {"podIPs": [{"ip": "10.244.1.7"}], "podIP": "10.244.1.7"}}`)
	pods := make(chan *kube.Pod, 10)
	agent := c.agent(t, string(testbed.Node), io.Discard)
	watch := agent.WatchPods(string(testbed.Node), func(_ service.Name, p *kube.Pod) { pods <- p })
	defer watch.Close()
	p := eventually.Receive(t, "a pod", pods)
	equal(t, fmt.Sprint(p.Name, p.Addrs, p.Port, p.Routed), "default/gated [10.244.1.7] 8080 {false }")

	set := func(a *kube.Client, p *kube.Pod) error {
		ctx, cancel := eventually.Context(t.Context())
		defer cancel()
		return a.SetRouted(ctx, p, kube.Routed{Is: true, Why: "tested"})
	}
	var log strings.Builder
	eventually.Nil(t, "the policy is in force", func() error {
		log.Reset()
		err := set(c.agent(t, "other", &log), p)
		switch {
		case err == nil:
			return errors.New("another node's pod can be written")
		case strings.Contains(err.Error(), "own node only"):
			return nil
		}
		return err
	})
	if !strings.Contains(log.String(), "own node only") {
		t.Errorf("the agent does not log that a policy denies what it writes:\n%s", &log)
	}
	log.Reset()
	another := *p
	another.UID = "another"
	if err := set(c.agent(t, string(testbed.Node), &log), &another); !apierrors.IsInvalid(err) {
		t.Errorf("a pod that was replaced: %v", err)
	}
	if log.Len() > 0 {
		t.Errorf("the agent logs that a pod was replaced:\n%s", &log)
	}
	if err := set(agent, p); err != nil {
		t.Error(err)
	}
	for { // the other agent may have written before the policy was in force
		if p = eventually.Receive(t, "the condition", pods); p.Routed == (kube.Routed{Is: true, Why: "tested"}) {
			break
		}
	}
	testOtherFields(t, c)
	for _, question := range []string{"get pods", "update pods", "patch pods", "delete pods", "create pods/exec"} {
		answer, _ := c.kubectl(t, c.admin, "", append([]string{"auth", "can-i", "--all-namespaces",
			"--as=" + account}, strings.Fields(question)...)...)
		equal(t, question+": "+answer, question+": no")
	}
}

// testOtherFields shows that an agent may write no other field of a pod.
func testOtherFields(t *testing.T, c *cluster) {
	config := c.Config()
	config.Impersonate.UserName = account
	user, err := clientset.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, patch := range []string{
		`{"status": {"conditions": [{"type": "Ready", "status": "True"}]}}`, `{"status": {"phase": "Failed"}}`,
		`{"status": {"podIP": "10.0.0.9", "podIPs": [{"$patch": "replace"}, {"ip": "10.0.0.9"}]}}`,
		`{"status": {"initContainerStatuses": [{"name": "init", "image": "init", "imageID": "", "restartCount": 1}]}}`,
		`{"metadata": {"labels": {"app": "web"}}}`,
	} {
		_, err := user.CoreV1().Pods("default").Patch(t.Context(), "gated", types.StrategicMergePatchType, []byte(patch),
			metav1.PatchOptions{}, "status")
		if err == nil || !strings.Contains(err.Error(), "the condition fairlead.dev/routed only") {
			t.Errorf("%s: %v", patch, err)
		}
	}
}

const gated = `
apiVersion: v1
kind: Pod
metadata: {name: gated, namespace: default}
spec:
  nodeName: node
  automountServiceAccountToken: false
  readinessGates: [{conditionType: fairlead.dev/routed}]
  containers: [{name: web, image: web, ports: [{containerPort: 53, protocol: UDP}, {containerPort: 8080}]}]
`

// agent is the client of the agent of a node, whose token names it.
func (c *cluster) agent(t *testing.T, node string, log io.Writer) *kube.Client {
	t.Helper()
	config := api.NewConfig()
	admin := c.Config()
	config.Clusters["c"] = &api.Cluster{Server: admin.Host, CertificateAuthorityData: admin.CAData}
	config.AuthInfos["a"] = &api.AuthInfo{
		ClientCertificateData: admin.CertData, ClientKeyData: admin.KeyData, Impersonate: account,
		ImpersonateUserExtra: map[string][]string{"authentication.kubernetes.io/node-name": {node}},
	}
	config.Contexts["c"] = &api.Context{Cluster: "c", AuthInfo: "a"}
	config.CurrentContext = "c"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	client, err := kube.Connect(kube.ClientOptions{Kubeconfig: path, QPS: -1, Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// testDaemonsRequests has the daemon's own client list, watch and write an Event, twice, so that the
// second one is a patch.
func testDaemonsRequests(t *testing.T, c *cluster, config string) {
	ctx, cancel := eventually.Context(t.Context())
	defer cancel()
	client, err := kube.Connect(kube.ClientOptions{Kubeconfig: config, QPS: -1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	source := client.Source("node")
	defer func() { _ = source.Close() }()
	first, err := source.Next(ctx)
	if err != nil {
		t.Fatalf("the first batch, for which all kinds are listed: %v", err)
	}
	if len(first.Services) == 0 || len(first.ServiceCIDRs) == 0 {
		t.Errorf("neither Service default/kubernetes nor a ServiceCIDR is seen: %+v", first)
	}
	c.must(t, "", "create", "service", "clusterip", "watched", "--tcp=80")
	if b, err := source.Next(ctx); err != nil || len(b.Services) != 1 {
		t.Errorf("a Service that is created: got %+v, %v", b, err)
	}
	events := client.Events("node", "fairlead")
	for range 2 {
		events.Emit(kube.Event{Object: "Service default/watched", Warning: true, Reason: "Tested", Message: "twice"})
	}
	events.Close()
	written, err := c.Client().EventsV1().Events("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, e := range written.Items {
		if e.ReportingController == "fairlead" { // the API server may write some of its own
			fmt.Fprintf(&got, "%s %s %s\n", e.Regarding.Name, e.Reason, e.Note)
		}
	}
	equal(t, got.String(), "watched Tested twice")
}

// testForbidden tries for real what a stolen token would be used for, and asks about the rest.
func testForbidden(t *testing.T, c *cluster, config string) {
	for _, command := range []string{
		"get secrets --all-namespaces",
		"get pods --all-namespaces",
		"get configmaps -n kube-system",
		"get service kubernetes",
		"create serviceaccount thief",
		"delete service kubernetes",
		"label service kubernetes stolen=yes",
		"create clusterrolebinding thief --clusterrole=cluster-admin --user=thief",
		"create token fairlead -n kube-system",
	} {
		_, err := c.kubectl(t, config, "", strings.Fields(command)...)
		if err == nil || !strings.Contains(err.Error(), "Forbidden") && !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("kubectl %s: got %v, want Forbidden", command, err)
		}
	}
	var got strings.Builder
	for _, question := range []string{
		"list services", "watch services", "list nodes", "watch endpointslices.discovery.k8s.io",
		"watch servicecidrs.networking.k8s.io", "create events.events.k8s.io", "patch events.events.k8s.io",
		"get services", "update services", "get nodes", "patch nodes", "get secrets", "list pods",
		"update endpointslices.discovery.k8s.io", "delete events.events.k8s.io", "create pods", "impersonate users",
	} {
		answer, _ := c.kubectl(t, config, "", append([]string{"auth", "can-i", "--all-namespaces"}, strings.Fields(question)...)...)
		fmt.Fprintln(&got, question+":", strings.TrimSpace(answer))
	}
	equal(t, got.String(), `
list services: yes
watch services: yes
list nodes: yes
watch endpointslices.discovery.k8s.io: yes
watch servicecidrs.networking.k8s.io: yes
create events.events.k8s.io: yes
patch events.events.k8s.io: yes
get services: no
update services: no
get nodes: no
patch nodes: no
get secrets: no
list pods: no
update endpointslices.discovery.k8s.io: no
delete events.events.k8s.io: no
create pods: no
impersonate users: no`)
}
