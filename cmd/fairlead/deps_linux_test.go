package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const agentPackage = "fairlead.dev/fairlead/cmd/fairlead"

// unwanted are packages, each with all below it, that the agent must not link.
func unwanted() map[string]string {
	const (
		apis = "it knows every kind of Kubernetes; source/kube watches five"
		docs = "the agent neither writes nor serves OpenAPI"
	)
	return map[string]string{
		"fairlead.dev/fairlead/lab":               "the agent carries no laboratory",
		"testing":                                 "the agent carries no test framework",
		"k8s.io/client-go/kubernetes":             apis,
		"k8s.io/client-go/informers":              apis,
		"k8s.io/client-go/applyconfigurations":    apis,
		"k8s.io/client-go/discovery":              docs,
		"k8s.io/client-go/tools/events":           "source/kube writes Events, and without a clientset",
		"k8s.io/client-go/tools/record":           "source/kube writes Events, and without a clientset",
		"k8s.io/apiserver":                        "the agent is no API server",
		"k8s.io/kubernetes":                       "it is no library",
		"k8s.io/kube-openapi/pkg/common":          docs,
		"k8s.io/kube-openapi/pkg/validation/spec": docs,
		"github.com/google/gnostic-models":        docs,
		"github.com/go-openapi":                   docs,
		"github.com/emicklei/go-restful":          docs,
		"github.com/invopop/jsonschema":           "go generate writes the schemas, the agent reads them",
		"gopkg.in/evanphx/json-patch.v4":          "the agent patches no objects",
		"google.golang.org/grpc":                  "the agent speaks HTTP",
		"html/template":                           "it calls methods by name, see TestDeadCode",
	}
}

// apiGroups are the packages of k8s.io/api that source/kube and service need. Each registers all its kinds as the program
// starts, so that the linker can leave out none of them.
func apiGroups() []string {
	return []string{
		"k8s.io/api/coordination/v1", "k8s.io/api/core/v1", "k8s.io/api/discovery/v1", "k8s.io/api/events/v1",
		"k8s.io/api/networking/v1",
	}
}

// The agent carries nothing large that it does not need.
func TestDependencies(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", agentPackage).Output()
	if err != nil {
		t.Fatal(err)
	}
	var groups []string
	for pkg := range strings.FieldsSeq(string(out)) {
		for root, why := range unwanted() {
			if pkg == root || strings.HasPrefix(pkg, root+"/") {
				t.Errorf("the agent depends on %s: %s", pkg, why)
			}
		}
		if strings.HasPrefix(pkg, "k8s.io/api/") {
			groups = append(groups, pkg)
		}
	}
	slices.Sort(groups)
	if !slices.Equal(groups, apiGroups()) {
		t.Errorf("of k8s.io/api the agent depends on %q, want %q", groups, apiGroups())
	}
}

// The linker leaves out methods that nothing calls. It keeps all of them if code that can be reached looks up a method by a
// name that is not constant, as text/template does; -dumpdep marks functions that do.
func TestDeadCode(t *testing.T) {
	t.Parallel()
	build := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-dumpdep", "-o", filepath.Join(t.TempDir(), "fairlead"),
		agentPackage)
	out, err := build.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%.2000s", err, out)
	}
	if !strings.Contains(string(out), "main.main -> main.named") {
		t.Fatalf("-dumpdep no longer tells what refers to what:\n%.2000s", out)
	}
	for edge := range strings.Lines(string(out)) {
		from, to, _ := strings.Cut(strings.TrimSpace(edge), " -> ")
		if strings.Contains(to, "<ReflectMethod>") && !strings.Contains(from, "<ReflectMethod>") {
			t.Errorf("the linker keeps all exported methods, since %s calls %s", from, to)
		}
	}
}

// The compiler leaves out every trace of package defect from a program that is built without its tag.
func TestNoDefects(t *testing.T) {
	source, err := os.ReadFile("../../internal/defect/defect.go")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`Name = "(.+)"`).FindAllSubmatch(source, -1)
	if len(names) == 0 || !bytes.Contains(program, []byte(asFairlead)) {
		t.Fatalf("of %d names none would be found: not even %s is", len(names), asFairlead)
	}
	for _, name := range names {
		if bytes.Contains(program, name[1]) {
			t.Errorf("the program has the text %s; if that is no trace of a defect, give the defect another name", name[1])
		}
	}
}
