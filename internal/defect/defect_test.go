package defect_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// row is a row of the table in README.md.
type row struct{ name, sentence, dir, tests string }

// table is what README.md says of defects.
func table(t *testing.T) (rows []row) {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)` \\| (.+) \\| `(\\./\\S+) (\\S+)` \\|$")
	for _, m := range line.FindAllStringSubmatch(string(text), -1) {
		rows = append(rows, row{m[1], m[2], m[3], m[4]})
	}
	return rows
}

// declared is each constant of defect.go with its sentence, as the first two columns of the table have them.
func declared(t *testing.T) (lines []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "defect.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			name, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, name+" | "+strings.TrimSpace(spec.Doc.Text()))
		}
		return true
	})
	return lines
}

// TestTable holds README.md against the constants, in their order, and against the tests that there are.
func TestTable(t *testing.T) {
	var listed []string
	for _, r := range table(t) {
		listed = append(listed, r.name+" | "+r.sentence)
		if !hasTest(t, r) {
			t.Errorf("%s: there is no test %s in %s", r.name, r.tests, r.dir)
		}
	}
	if want := declared(t); !slices.Equal(listed, want) {
		t.Errorf("README.md lists\n%s\ndefect.go has\n%s", strings.Join(listed, "\n"), strings.Join(want, "\n"))
	}
	if len(listed) < 20 {
		t.Errorf("there are %d defects", len(listed))
	}
}

// hasTest reports whether the package has the function that a row's pattern begins with.
func hasTest(t *testing.T, r row) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, r.dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	function, _, _ := strings.Cut(strings.TrimSuffix(r.tests, "$"), "$/")
	return slices.ContainsFunc(files, func(path string) bool {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(string(text), "\nfunc "+function+"(t *testing.T)")
	})
}
