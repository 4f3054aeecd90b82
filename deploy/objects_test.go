package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

const chart = "chart"

// values are the files in chart/ci, each another way to use the chart.
func values(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(chart + "/ci/*-values.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("there are no values in chart/ci: ", err)
	}
	return files
}

// template renders the chart as helm install would.
func template(t *testing.T, args ...string) string {
	t.Helper()
	return must(t)(helm(t, append([]string{"template", "fairlead", chart, "--namespace", "kube-system"}, args...)...))
}

func TestChart_lint(t *testing.T) {
	if _, err := helm(t, "lint", "--strict", "--quiet", chart); err != nil {
		t.Errorf("without values: %v", err)
	}
	for _, file := range values(t) {
		if _, err := helm(t, "lint", "--strict", "--quiet", chart, "--values", file); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// Every object that is rendered has only fields that the API knows, with values of their types.
func TestChart_objects(t *testing.T) {
	for _, file := range values(t) {
		t.Run(filepath.Base(file), func(t *testing.T) { decodeAll(t, template(t, "--values", file)) })
	}
}

// TestChart_monitored: Prometheus reaches the metrics of nodes that have IPv6 only.
func TestChart_monitored(t *testing.T) {
	for address, want := range map[string]string{"": "0.0.0.0:10249", "192.0.2.1": "0.0.0.0:10249", "::": "'[::]:10249'"} {
		out := template(t, "--set", "podMonitor.enabled=true,config.bindAddress="+address)
		if !strings.Contains(out, "metricsBindAddress: "+want+"\n") {
			t.Errorf("with bindAddress %q there is no %s:\n%s", address, want, out)
		}
	}
}

func TestKustomize_objects(t *testing.T) {
	const rights = "Role fairlead, RoleBinding fairlead, ServiceAccount fairlead, " +
		"ValidatingAdmissionPolicy fairlead, ValidatingAdmissionPolicyBinding fairlead"
	for dir, want := range map[string]string{
		"base": "ClusterRole fairlead, ClusterRoleBinding fairlead, ConfigMap fairlead, DaemonSet fairlead, " +
			rights,
		"clean": "DaemonSet fairlead-clean",
		"overlays/windows": "ClusterRole fairlead, ClusterRoleBinding fairlead, ConfigMap fairlead, " +
			"ConfigMap fairlead-windows, DaemonSet fairlead, DaemonSet fairlead-windows, " + rights,
		"overlays/own-configuration": "ClusterRole fairlead, ClusterRoleBinding fairlead, ConfigMap fairlead, " +
			"ConfigMap kube-proxy, DaemonSet fairlead, " + rights,
		"overlays/instead-of-kube-proxy": "ClusterRole fairlead, ClusterRoleBinding fairlead, ConfigMap fairlead, " +
			"DaemonSet fairlead, DaemonSet kube-proxy, " + rights,
	} {
		t.Run(dir, func(t *testing.T) {
			equal(t, strings.Join(decodeAll(t, kustomize(t, dir)), ", "), want)
		})
	}
}

// The components add to the base what the chart's values do. Their settings are flags, so that each may come alone.
func TestKustomize_components(t *testing.T) {
	want := objects(t, template(t, "--set", "fairleadConfig.readinessGate=true,healthResponder.enabled=true,modes={ebpf,userspace}",
		"--set", "podMonitor.enabled=true,prometheusRule.enabled=true",
		"--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"))
	have := objects(t, kustomize(t, "../testdata/components"))
	set := daemonSet(t, have["DaemonSet fairlead"])
	flags := strings.Join(set.Spec.Template.Spec.Containers[0].Args[4:], " ")
	equal(t, flags, "--bpf-root=/host/bpf --health-check-max-age=60s --readiness-gate")
	equal(t, strings.Join(set.Spec.Template.Spec.InitContainers[0].Args[4:], " "), "--init-only --bpf-root=/host/bpf")
	for _, all := range []map[string]string{want, have} {
		delete(all, "ConfigMap fairlead")
		all["DaemonSet fairlead"] = sorted(t, daemonSet(t, all["DaemonSet fairlead"]))
	}
	equal(t, strings.Join(slices.Sorted(maps.Keys(have)), "\n"), strings.Join(slices.Sorted(maps.Keys(want)), "\n"))
	for name := range want {
		t.Run(name, func(t *testing.T) { equal(t, have[name], want[name]) })
	}
}

// objects are those of manifests by kind and name, in the same form whoever has written them.
func objects(t *testing.T, manifests string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatal(err)
		}
		if object == nil {
			continue // a comment
		}
		text, err := yaml.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		name := object["metadata"].(map[string]any)["name"]
		all[fmt.Sprint(object["kind"], " ", name)] = string(text)
	}
	return all
}

// sorted is a DaemonSet without its arguments, and with volumes sorted.
func sorted(t *testing.T, set appsv1.DaemonSet) string {
	t.Helper()
	pod := &set.Spec.Template.Spec
	slices.SortFunc(pod.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	for _, c := range []*corev1.Container{&pod.InitContainers[0], &pod.Containers[0]} {
		c.Args = nil
		slices.SortFunc(c.VolumeMounts, func(a, b corev1.VolumeMount) int { return strings.Compare(a.MountPath, b.MountPath) })
	}
	text, err := yaml.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The commands in docs/install.md put IMAGE in the place of every image of Fairlead.
func TestKustomize_image(t *testing.T) {
	recipe := regexp.MustCompile(`(?m)^kubectl kustomize deploy/kustomize/(\S+) \| sed '([^']+)' \| kubectl apply`)
	var have []string
	for _, m := range recipe.FindAllStringSubmatch(read(t, "../docs/install.md"), -1) {
		sed := exec.Command("sed", m[2])
		sed.Stdin = strings.NewReader(kustomize(t, m[1]))
		out, err := sed.Output()
		if err != nil {
			t.Fatalf("sed %s: %v", m[2], err)
		}
		for _, image := range regexp.MustCompile(`image: (.*)`).FindAllSubmatch(out, -1) {
			have = append(have, m[1]+" "+string(image[1]))
		}
	}
	slices.Sort(have)
	equal(t, strings.Join(have, "\n"), `base IMAGE
base IMAGE
clean IMAGE
clean registry.k8s.io/pause:3.10
overlays/instead-of-kube-proxy IMAGE
overlays/instead-of-kube-proxy IMAGE
overlays/own-configuration IMAGE
overlays/own-configuration IMAGE`)
}

// kustomize is kubectl kustomize, which kubectl apply -k applies.
func kustomize(t *testing.T, dir string) string {
	t.Helper()
	kubectl := kubernetes.NeedParts(t).Path("kubectl")
	return must(t)(output(t.Context(), kubectl, "kustomize", filepath.Join("kustomize", dir)))
}

// decodeAll decodes every document strictly and returns "Kind name" of each, sorted. Kinds of the
// Prometheus operator have no types here.
func decodeAll(t *testing.T, manifests string) (names []string) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		admissionv1.AddToScheme, appsv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	strict := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		var head struct {
			APIVersion string
			Kind       string
			Metadata   struct{ Name string }
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Errorf("%v in:\n%s", err, document)
		}
		if head.Kind == "" {
			continue // a comment
		}
		names = append(names, head.Kind+" "+head.Metadata.Name)
		if strings.HasPrefix(head.APIVersion, "monitoring.coreos.com/") {
			continue
		}
		if _, _, err := strict.Decode([]byte(document), nil, nil); err != nil {
			t.Errorf("%s %s: %v", head.Kind, head.Metadata.Name, err)
		}
	}
	slices.Sort(names)
	return names
}

// values.schema.json names the fields of KubeProxyConfiguration, all of them.
func TestChart_schemaKnowsConfiguration(t *testing.T) {
	var schema struct {
		Properties struct {
			Config struct{ Properties map[string]any }
		}
	}
	text, err := os.ReadFile(chart + "/values.schema.json")
	if err == nil {
		err = json.Unmarshal(text, &schema)
	}
	if err != nil {
		t.Fatal(err)
	}
	var fields []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[kubeproxy.KubeProxyConfiguration]()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && f.Name != "Kind" && f.Name != "APIVersion" {
			fields = append(fields, name)
		}
	}
	slices.Sort(fields)
	known := slices.Sorted(maps.Keys(schema.Properties.Config.Properties))
	equal(t, strings.Join(known, "\n"), strings.Join(fields, "\n"))
}

// helm refuses invalid values before it installs anything, and the message names the value.
func TestChart_refuses(t *testing.T) {
	for set, want := range map[string]string{
		"apiServer=192.0.2.1:6443":                  "apiServer",
		"confg.mode=nftables":                       "confg",
		"config.clusterCidr=10.0.0.0/8":             "clusterCidr",
		"config.detectLocalMode=Nonsense":           "config/detectLocalMode",
		"config.conntrack.maxPerCore=many":          "config/conntrack/maxPerCore",
		"fairleadConfig.takeOver=Perhaps":           "fairleadConfig/takeOver",
		"fairleadConfig.auditIntervall=1s":          "auditIntervall",
		"config.oomScoreAdj=-2000":                  "config/oomScoreAdj",
		"existingConfigMap=":                        "existingConfigMap",
		"existingConfigMap=Kube_Proxy":              "existingConfigMap",
		"extraArgs={v=4}":                           "extraArgs/0",
		"healthzPort=70000":                         "healthzPort",
		"image.digest=sha256:0":                     "image/digest",
		"image.pullPolicy=Sometimes":                "image/pullPolicy",
		"image.tag=a b":                             "image/tag",
		"podMonitor.interval=soon":                  "podMonitor/interval",
		"privilegedInit=maybe":                      "privilegedInit",
		"resources.cpu=1":                           "cpu",
		"serviceAccount.create=false":               "serviceAccount.name: name the account",
		"updateStrategy.rollingUpdate.maxSurge=100": "maxSurge",
	} {
		t.Run(set, func(t *testing.T) {
			t.Parallel()
			out, err := helm(t, "template", "fairlead", chart, "--set", "apiServer=https://192.0.2.1:6443", "--set", set)
			if err == nil {
				t.Fatalf("accepted:\n%s", out)
			}
			if !strings.Contains(err.Error(), want) {
				t.Errorf("does not say %q: %v", want, err)
			}
		})
	}
}

// The configuration that the chart writes is kube-proxy's, and what the values say is in it.
func TestChart_configuration(t *testing.T) {
	for _, file := range values(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			var said struct{ Config map[string]any }
			text, err := os.ReadFile(file)
			if err == nil {
				err = yaml.Unmarshal(text, &said)
			}
			if err != nil {
				t.Fatal(err)
			}
			written := configMap(t, template(t, "--values", file))["config.conf"]
			if written == "" {
				equal(t, fmt.Sprint(said.Config), "map[]") // another ConfigMap has it
				return
			}
			var config kubeproxy.KubeProxyConfiguration
			if err := yaml.UnmarshalStrict([]byte(written), &config); err != nil {
				t.Fatalf("%v in:\n%s", err, written)
			}
			var have map[string]any
			if err := yaml.Unmarshal([]byte(written), &have); err != nil {
				t.Fatal(err)
			}
			for field, value := range said.Config {
				if !reflect.DeepEqual(have[field], value) {
					t.Errorf("%s: got %v, want %v", field, have[field], value)
				}
			}
		})
	}
}

// configMap returns the data of the chart's ConfigMap.
func configMap(t *testing.T, manifests string) map[string]string {
	t.Helper()
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		var m corev1.ConfigMap
		if !strings.Contains(document, "fairlead.conf: |") {
			continue
		}
		if err := yaml.Unmarshal([]byte(document), &m); err != nil {
			t.Fatal(err)
		}
		return m.Data
	}
	t.Fatal("no ConfigMap is rendered")
	return nil
}

// The cluster's monitoring loads the files of directory monitoring, byte for byte.
func TestChart_monitoring(t *testing.T) {
	rendered := template(t, "--values", chart+"/ci/everything-values.yaml")
	seen := 0
	for document := range strings.SplitSeq(rendered, "\n---\n") {
		var object struct {
			Kind string
			Data map[string]string
			Spec json.RawMessage
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatal(err)
		}
		switch {
		case object.Data["fairlead.json"] != "":
			want, err := os.ReadFile("monitoring/dashboard.json")
			if err != nil {
				t.Fatal(err)
			}
			equal(t, object.Data["fairlead.json"], string(want))
			seen++
		case object.Kind == "PrometheusRule":
			want, err := os.ReadFile("monitoring/alerts.yaml")
			if err == nil {
				want, err = yaml.YAMLToJSON(want)
			}
			if err != nil {
				t.Fatal(err)
			}
			equal(t, compact(t, object.Spec), compact(t, want))
			seen++
		}
	}
	if seen != 2 {
		t.Errorf("%d of dashboard and alerts are rendered", seen)
	}
}

func compact(t *testing.T, text []byte) string {
	t.Helper()
	var out bytes.Buffer
	if err := json.Compact(&out, text); err != nil {
		t.Fatal(err)
	}
	return out.String()
}
