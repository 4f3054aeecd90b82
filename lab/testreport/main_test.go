package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
)

// events are those of a line each: action, package, test ("-": none), output.
func events(lines ...string) string {
	var b strings.Builder
	for _, line := range lines {
		f := strings.SplitN(line, " ", 4)
		b.WriteString(`{"Time":"2026-01-02T03:04:05Z","Action":"` + f[0] + `","Package":"fairlead.dev/fairlead/` + f[1] + `"`)
		if f[2] != "-" {
			b.WriteString(`,"Test":"` + f[2] + `"`)
		}
		if len(f) > 3 && f[0] == "output" {
			b.WriteString(`,"Output":"` + f[3] + `\n"`)
		} else if len(f) > 3 {
			b.WriteString(`,"Elapsed":` + f[3])
		}
		b.WriteString("}\n")
	}
	return b.String()
}

type reported struct {
	events []string
	want   string
}

const prometheus = "output a TestUser     x_test.go:5: lacks prometheus: it is not in PATH"

func reports() map[string]reported {
	return map[string]reported{
		"nothing": {nil, "WRONG: no test has run\n0 passed, 0 failed, 0 skipped\n"},
		"subtests count": {
			[]string{"run a TestA", "run a TestA/b", "fail a TestA/b", "fail a TestA", "run a TestB", "pass a TestB", "fail a -"},
			"1 passed, 2 failed, 0 skipped\n",
		},
		"a listed one": {
			[]string{
				"run a TestBrowser/page/dark", "output a TestBrowser/page/dark     x_test.go:5: lacks chromium: none: here",
				"output a TestBrowser/page/dark --- SKIP: TestBrowser/page/dark (0.00s)", "skip a TestBrowser/page/dark",
			},
			"skipped: a TestBrowser/page/dark: lacks chromium: none: here\n0 passed, 0 failed, 1 skipped\n",
		},
		"another lack": {
			[]string{"run a TestUser", prometheus, "skip a TestUser"},
			`skipped: a TestUser: lacks prometheus: it is not in PATH
WRONG: a TestUser: lab/lack/skips.txt does not list it with that lack
0 passed, 0 failed, 1 skipped
`,
		},
		"no lack": {
			[]string{"run a TestUser", "output a TestUser     x_test.go:5: too slow", "skip a TestUser"},
			`skipped: a TestUser: it does not say why as lack.Skip does
WRONG: a TestUser: lab/lack/skips.txt does not list it with that lack
0 passed, 0 failed, 1 skipped
`,
		},
		"a whole program": {
			[]string{"start a -", "output a - ALL TESTS SKIPPED: lacks user-namespaces: not permitted", "pass a - 0.01"},
			"skipped: a TestMain: lacks user-namespaces: not permitted\n0 passed, 0 failed, 1 skipped\n",
		},
		"a program that ends badly": {
			[]string{"run a TestB", "pass a TestB", "fail a -", "fail b -"}, "1 passed, 2 failed, 0 skipped\n",
		},
		"a crash": {
			[]string{"run a TestB", "run a TestB/c", "fail a -"}, "0 passed, 2 failed, 0 skipped\n",
		},
		"go test is killed": {[]string{"run a TestB"}, "0 passed, 1 failed, 0 skipped\n"},
		"again and again": {
			[]string{"run a TestB", "pass a TestB", "run a TestB", "pass a TestB", "pass a -"},
			"2 passed, 0 failed, 0 skipped\n",
		},
	}
}

func TestReport(t *testing.T) {
	rows := []lack.Row{
		{Package: "a", Test: "TestBrowser/page", Lack: lack.Chromium},
		{Package: "a", Test: "TestUser", Lack: lack.Fairlead},
		{Package: "a", Test: "TestMain", Lack: lack.UserNamespaces},
	}
	for name, c := range reports() {
		t.Run(name, func(t *testing.T) {
			r := newRun()
			if err := r.read(strings.NewReader(events(c.events...))); err != nil {
				t.Fatal(err)
			}
			var got strings.Builder
			ok := r.report(&got, rows)
			if got.String() != c.want || ok == (strings.Contains(c.want, "WRONG") || !strings.Contains(c.want, " 0 failed")) {
				t.Errorf("right is %v:\n%s\nwant:\n%s", ok, got.String(), c.want)
			}
		})
	}
}

func TestTable(t *testing.T) {
	r := newRun()
	err := r.read(strings.NewReader(events(
		"run a TestA", "pass a TestA 2.7", "pass a - 2.8", "run lab/b TestB", "pass lab/b -  31.2", "skip none -",
		"run c TestC", "pass c - 0.3", "run d TestD", "pass d - 0.4", "run e TestE", `output e - ok\te\t(cached)`, "pass e -",
	)))
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	r.table(&got)
	const want = `| package | seconds |
|---|---:|
| ` + "`lab/b`" + ` | 31 |
| ` + "`a`" + ` | 3 |
| ` + "`e`" + ` | cached |
| others (2) | 1 |
| all | 35 |
`
	if got.String() != want {
		t.Errorf("the table is\n%swant\n%s", got.String(), want)
	}
}

// The output of go test is read, whatever its version: a package in which tests pass, fail and are skipped.
func TestRead_go(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module fairlead.dev/fairlead/small\ngo 1.26\n",
		"small_test.go": `package small

import "testing"

func TestPass(t *testing.T) { t.Run("sub", func(t *testing.T) {}) }
func TestFail(t *testing.T) { t.Error("wrong") }
func TestSkip(t *testing.T) { t.Skipf("lacks %s: %v", "helm", "it is not here") }
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c := exec.CommandContext(t.Context(), "go", "test", "-json", "./...")
	c.Dir = dir
	out, err := c.Output()
	if err == nil {
		t.Error("a test fails, and go test does not")
	}
	r := newRun()
	if err := r.read(strings.NewReader(string(out))); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	r.report(&got, []lack.Row{{Package: "small", Test: "*", Lack: lack.Helm}})
	const want = "skipped: small TestSkip: lacks helm: it is not here\n2 passed, 1 failed, 1 skipped\n"
	if got.String() != want {
		t.Errorf("got\n%swant\n%s", got.String(), want)
	}
}
