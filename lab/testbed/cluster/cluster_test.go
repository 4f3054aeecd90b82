package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/tools/txtar"
	"k8s.io/apimachinery/pkg/api/meta"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(m.Run))
}

// A golden file has manifests and, in "want", what they become. Further generations of a manifest,
// "again/…", are applied afterwards to the same cluster; "want-again" is what then holds.
// UPDATE_GOLDEN=1 writes the files anew.
func TestApply_golden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal("no golden files", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			golden(t, file)
		})
	}
}

func golden(t *testing.T, file string) {
	archive, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bed := testbed.Need(t, testbed.Spec{})
	c := New(bed)
	var manifests []Manifest
	for i, f := range archive.Files {
		name, again := strings.CutPrefix(f.Name, "again/")
		if again && len(manifests) > 0 && !strings.HasPrefix(archive.Files[i-1].Name, "again/") {
			manifests = nil
		}
		if !strings.HasPrefix(f.Name, "want") {
			manifests = append(manifests, Manifest{name, f.Data})
			continue
		}
		r, err := c.Apply(t.Context(), manifests)
		if err != nil {
			t.Fatal(err)
		}
		got := describe(r)
		if os.Getenv("UPDATE_GOLDEN") != "" {
			archive.Files[i].Data = []byte(got)
		} else if got != string(f.Data) {
			t.Errorf("%s:\n%s", f.Name, difference(string(f.Data), got))
		}
		answers(t, bed, r)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// answers checks that every backend answers with the name that the result says.
func answers(t *testing.T, bed *testbed.Bed, r *Result) {
	t.Helper()
	for _, e := range r.Addresses {
		for _, backend := range e.Backends {
			if !testbed.HasProtocol(e.Protocol) {
				continue
			}
			o, err := bed.Probe(t.Context(), testbed.Probe{
				From: testbed.Outside, To: backend.Addr, Protocol: e.Protocol, Timeout: time.Minute,
			})
			if err != nil || o.Backend != backend.Place {
				t.Errorf("%s %s: %s is %v, %v; want %s", e.Service, e.Port, backend.Addr, o, err, backend.Place)
			}
		}
	}
}

// kubectl's JSON can be appended to a file again and again.
func TestObjects_concatenated(t *testing.T) {
	t.Parallel()
	objects, problems := Objects([]Manifest{{"all.json", []byte(`{"kind": "List", "apiVersion": "v1", "items": [
		{"kind": "Service", "apiVersion": "v1", "metadata": {"name": "web"}}]}
{"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
	"metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}}}
{"apiVersion": "v1"}
`)}})
	if len(objects) != 2 || len(problems) != 1 || problems[0].Line != 5 || problems[0].Document != 3 {
		t.Errorf("objects %v, problems %v", objects, problems)
	}
}

// describe is a Result as text, one line for each fact.
func describe(r *Result) string {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	for _, p := range r.Pods {
		line("pod %s on %s: %s", p.Place, p.Node, join(p.Addrs))
	}
	for _, s := range r.Services {
		var ports []string
		for _, p := range s.Spec.Ports {
			port := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
			if p.NodePort != 0 {
				port += fmt.Sprintf(" (node port %d)", p.NodePort)
			}
			ports = append(ports, port)
		}
		line("service %s/%s %s %s: %s", s.Namespace, s.Name, s.Spec.Type, join(s.Spec.ClusterIPs), strings.Join(ports, ", "))
		for _, i := range s.Status.LoadBalancer.Ingress {
			line("  ingress %s%s", i.IP, i.Hostname)
		}
		if s.Spec.HealthCheckNodePort != 0 {
			line("  health check node port %d", s.Spec.HealthCheckNodePort)
		}
	}
	for _, s := range r.Slices {
		line("slice %s/%s of %s", s.Namespace, s.Name, s.Labels["kubernetes.io/service-name"])
		for _, p := range s.Ports {
			line("  port %q %s %d", *p.Name, *p.Protocol, *p.Port)
		}
		for _, e := range s.Endpoints {
			words := slices.Clone(e.Addresses)
			if e.NodeName != nil {
				words = append(words, "on "+*e.NodeName)
			}
			if e.Zone != nil {
				words = append(words, "in "+*e.Zone)
			}
			for name, condition := range map[string]*bool{"ready": e.Conditions.Ready} {
				if condition != nil && !*condition {
					words = append(words, "not "+name)
				}
			}
			if e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				words = append(words, "terminating")
			}
			if e.Conditions.Serving != nil && !*e.Conditions.Serving {
				words = append(words, "not serving")
			}
			if e.Hints != nil {
				words = append(words, fmt.Sprintf("hints %v %v", e.Hints.ForZones, e.Hints.ForNodes))
			}
			line("  endpoint %s", strings.Join(words, " "))
		}
	}
	for _, e := range r.Addresses {
		var names []string
		for _, b := range e.Backends {
			names = append(names, b.Place)
		}
		line("probe %s %s %s %s/%s -> %s", e.Service, e.Port, e.Kind, e.To, e.Protocol, strings.Join(names, " "))
	}
	for _, note := range r.Notes {
		line("note %s", note)
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Skipped)) {
		line("skipped %d %s", r.Skipped[kind], kind)
	}
	for _, p := range r.Problems {
		line("problem %v", p)
	}
	return out.String()
}

func join[T any](values []T) string {
	var words []string
	for _, v := range values {
		words = append(words, fmt.Sprint(v))
	}
	return strings.Join(words, " ")
}

// difference shows the lines that only one text has.
func difference(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	var out []string
	for _, line := range a {
		if !slices.Contains(b, line) {
			out = append(out, "-"+line)
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			out = append(out, "+"+line)
		}
	}
	if out == nil {
		out = []string{"the same lines in another order or number:", got}
	}
	return strings.Join(out, "\n")
}

func TestApply_canceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := New(testbed.Need(t, testbed.Spec{})).Apply(ctx, []Manifest{{"a.yaml", []byte("{kind: Pod, apiVersion: v1, metadata: {name: a}}")}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestResult_Write(t *testing.T) {
	bed := testbed.Need(t, testbed.Spec{})
	in := []Manifest{{"a.yaml", []byte(`
apiVersion: v1
kind: Pod
metadata: {name: a, labels: {app: a}}
spec: {containers: [{name: c, ports: [{containerPort: 80}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {selector: {app: a}, ports: [{port: 80}]}
`)}}
	r, err := New(bed).Apply(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "new")
	for range 2 {
		if err := r.Write(dir); err != nil {
			t.Fatal(err)
		}
	}
	// The written objects mean the same to another cluster, which selects no pods.
	written, err := Load(dir)
	if err != nil || len(written) != 3 {
		t.Fatal(written, err)
	}
	again, err := New(testbed.Need(t, testbed.Spec{})).Apply(t.Context(), written)
	if err != nil {
		t.Fatal(err)
	}
	if want, got := join(r.Addresses), join(again.Addresses); got != want || len(r.Addresses) != 1 {
		t.Errorf("got %s, want %s", got, want)
	}
	if len(again.Problems) > 0 {
		t.Error(again.Problems)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.yaml", "a.yml", "c.json", "README.md"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{}"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	manifests, err := Load(dir, filepath.Join(dir, "README.md"))
	var names []string
	for _, m := range manifests {
		names = append(names, filepath.Base(m.Name))
	}
	if want := "a.yml b.yaml c.json README.md"; err != nil || join(names) != want {
		t.Errorf("got %v, %v; want %s", names, err, want)
	}
	if _, err := Load(filepath.Join(dir, "none")); err == nil {
		t.Error("loaded a file that is not there")
	}
}

// A Service that no plan knows is routed to the node.
func TestApply_foreignAddressesAreRouted(t *testing.T) {
	bed := testbed.Need(t, testbed.Spec{})
	c := New(bed)
	_, err := c.Apply(t.Context(), []Manifest{{"a.yaml", []byte(`
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 172.20.0.10, externalIPs: [8.8.8.8], ports: [{port: 80}]}
`)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bed.AddPod(t.Context(), testbed.PodSpec{
		Name: "proxy", HostNetwork: true, Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 80}},
	}); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"172.20.0.10", "8.8.8.8"} {
		out, err := bed.Command(t.Context(), testbed.Node, "ip", "addr", "add", addr, "dev", "lo").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		to := netip.AddrPortFrom(netip.MustParseAddr(addr), 80)
		if o, err := bed.Probe(t.Context(), testbed.Probe{From: testbed.Outside, To: to}); err != nil || o.Backend != "proxy" {
			t.Errorf("%s: %v, %v", addr, o, err)
		}
	}
}

// TestObjects: objects that no proxy asks for are left out. A document that does not parse does not stop the others.
func TestObjects(t *testing.T) {
	t.Parallel()
	const text = `
apiVersion: v1
kind: Service
metadata: {name: a, namespace: default}
---
# nothing
---
{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}}
---
{"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "u"}}
---
{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "wrong"}, "spec": {"ports": "many"}}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: b}}
- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: b-1}}
---
{"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "c"}}]}
`
	objects, problems := Objects([]Manifest{{"file", []byte(text)}})
	var all []string
	for _, o := range objects {
		m, err := meta.Accessor(o)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%T %s", o, m.GetName()))
	}
	const want = "*v1.Service a, *v1.Service b, *v1.Service c, *v1.EndpointSlice b-1"
	if got := strings.Join(all, ", "); got != want {
		t.Errorf("%s\ninstead of\n%s", got, want)
	}
	if len(problems) != 1 || !strings.HasPrefix(problems[0].Error(), "file:") {
		t.Errorf("problems: %v", problems)
	}
}
