package lack

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each row is about tests that exist, and rows are sorted, so that the list can be read.
func TestList(t *testing.T) {
	rows, err := List()
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string][]string{}
	for i, r := range rows {
		if i > 0 && slices.Compare(keys(rows[i-1]), keys(r)) >= 0 {
			t.Errorf("%v comes after %v", r, rows[i-1])
		}
		if tests[r.Package] == nil {
			tests[r.Package] = testsOf(t, r.Package)
		}
		top, _, _ := strings.Cut(r.Test, "/")
		listed := Row{Package: r.Package, Test: top}
		if !slices.ContainsFunc(tests[r.Package], func(name string) bool { return listed.Allows(r.Package, name, "") }) {
			t.Errorf("%s has no test %s", r.Package, r.Test)
		}
	}
}

func keys(r Row) []string { return []string{r.Package, r.Test, string(r.Lack)} }

// testsOf are the tests and benchmarks of a package.
func testsOf(t *testing.T, pkg string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", pkg, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("package %s has no tests: %v", pkg, err)
	}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				names = append(names, f.Name.Name)
			}
		}
	}
	return slices.DeleteFunc(names, func(name string) bool {
		return !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Benchmark") && !strings.HasPrefix(name, "Fuzz")
	})
}

func TestParse(t *testing.T) {
	rows, err := parse("# a comment\n\nlab/demo  TestPage/*/dark  chromium  shows the page\n")
	want := Row{"lab/demo", "TestPage/*/dark", Chromium, "shows the page"}
	if err != nil || !slices.Equal(rows, []Row{want}) {
		t.Errorf("%v, %v", rows, err)
	}
	for text, want := range map[string]string{
		"lab/demo TestPage chromium":       "has not got",
		"lab/demo TestPage patience slow":  "no lack patience",
		"lab/demo Test[ chromium the page": "syntax error",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestAllows(t *testing.T) {
	r := Row{Package: "lab/demo", Test: "TestPage/*/dark", Lack: Chromium}
	for test, want := range map[string]bool{
		"TestPage/a/dark": true, "TestPage/a/dark/b": true, "TestPage/a/light": false, "TestPage/a": false, "TestPages/a/dark": false,
	} {
		if got := r.Allows("lab/demo", test, Chromium); got != want {
			t.Errorf("%s: %v", test, got)
		}
	}
	if r.Allows("lab/demo", "TestPage/a/dark", Root) || r.Allows("lab", "TestPage/a/dark", Chromium) {
		t.Error("another lack or package is allowed")
	}
}

// recorder is a test of which only is of interest how it ends.
type recorder struct {
	testing.TB
	how, said string
}

func (r *recorder) Helper() {}

func (r *recorder) Skipf(format string, args ...any) { r.ends("skipped", format, args) }

func (r *recorder) Fatalf(format string, args ...any) { r.ends("failed", format, args) }

func (r *recorder) ends(how, format string, args []any) {
	if r.how == "" { // as the goroutine of a real test ends
		r.how, r.said = how, strings.TrimSpace(fmt.Sprintf(format, args...))
	}
}

// A lack that the machine has not got fails the test, in CI also one that could be cured.
func TestSkip(t *testing.T) {
	for _, c := range []struct{ ci, proxy, how string }{
		{"", "", "failed"}, {"", "kube-proxy", "skipped"}, {"true", "", "failed"}, {"true", "kube-proxy", "skipped"},
	} {
		t.Setenv("CI", c.ci)
		t.Setenv("FAIRLEAD_TEST_PROXY", c.proxy)
		var direct, inherited recorder
		Skip(&direct, Fairlead, "it has no weights")
		if direct.how != c.how {
			t.Errorf("%+v: %s: %s", c, direct.how, direct.said)
		}
		Inherit(&inherited, []byte("=== RUN TestX\n    x_test.go:7: "+direct.said+"\n--- SKIP: TestX\n"))
		if inherited.how != c.how {
			t.Errorf("%+v, inherited: %s: %s", c, inherited.how, inherited.said)
		}
		l, reason, ok := Said("    x_test.go:7: " + direct.said)
		if !ok || l != Fairlead || !strings.HasPrefix(reason, "it has no weights") {
			t.Errorf("%+v: said is %s, %q, %v", c, l, reason, ok)
		}
	}
	for ci, want := range map[string]string{"": "skipped", "true": "failed"} {
		t.Setenv("CI", ci)
		var r recorder
		if Skip(&r, Prometheus, "it is not in PATH"); r.how != want {
			t.Errorf("CI=%s, what can be installed: %s: %s", ci, r.how, r.said)
		}
	}
	t.Setenv("FAIRLEAD_TEST_PROXY", "")
	var needs, inherits recorder
	Need(&needs, Fairlead)
	if needs.how != "" {
		t.Errorf("what is there is not there: %s", needs.said)
	}
	Inherit(&inherits, []byte("--- SKIP: TestX\n    x_test.go:7: the kernel lacks patience: no"))
	if inherits.how != "failed" {
		t.Errorf("without a lack: %s: %s", inherits.how, inherits.said)
	}
}

func TestSkipAll(t *testing.T) {
	for _, c := range []struct {
		ci, proxy string
		want      int
	}{{"", "", 1}, {"", "kube-proxy", 0}, {"true", "kube-proxy", 1}} {
		t.Setenv("CI", c.ci)
		t.Setenv("FAIRLEAD_TEST_PROXY", c.proxy)
		if status := SkipAll(Fairlead, "this is a test"); status != c.want {
			t.Errorf("%+v: the exit status is %d", c, status)
		}
	}
}

// The checks agree with what this machine has.
func TestExplained(t *testing.T) {
	if os.Getuid() != 0 && !Root.Explained() {
		t.Error("another user is taken for root")
	}
	if before(2, 6) || !before(99, 0) {
		t.Error("the kernel's version is not known")
	}
	if Prometheus.Explained() {
		t.Error("what can be installed is no lack of the machine")
	}
}
