package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestSemantics keeps docs/semantics.md complete and true: every case stands there, and every case
// and function that stands there exists.
func TestSemantics(t *testing.T) {
	text, err := os.ReadFile("../../docs/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	functions := declared(t, "../../model", "../../service", "../../dataplane/conntrack")
	missing := map[string]bool{}
	for _, name := range caseNames(t) {
		missing[name] = true
	}
	for i, line := range strings.Split(string(text), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || strings.HasPrefix(line, "|---") || strings.HasPrefix(line, "| rule |") {
			continue
		}
		for _, function := range quoted(cells[2]) {
			if !functions[function] {
				t.Errorf("line %d: there is no function %s", i+1, function)
			}
		}
		for _, name := range quoted(cells[3]) {
			if !slices.Contains(caseNames(t), name) {
				t.Errorf("line %d: there is no case %s", i+1, name)
			}
			delete(missing, name)
		}
		if len(quoted(cells[2])) == 0 || len(quoted(cells[3])) == 0 {
			t.Errorf("line %d: a rule without function or case", i+1)
		}
	}
	for name := range missing {
		t.Errorf("case %s stands for no rule", name)
	}
}

// quoted are the words in backquotes.
func quoted(cell string) (words []string) {
	for _, match := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
		words = append(words, match[1])
	}
	return words
}

func caseNames(t *testing.T) (names []string) {
	files, err := fs.Glob(testdata, "testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".txtar"))
	}
	return names
}

// declared are the functions of packages as package.function or package.Type.method.
func declared(t *testing.T, dirs ...string) map[string]bool {
	names := map[string]bool{}
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range parsed.Decls {
				if f, ok := d.(*ast.FuncDecl); ok {
					names[parsed.Name.Name+"."+receiver(f)+f.Name.Name] = true
				}
			}
		}
	}
	return names
}

// receiver is the method's type and a dot.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	t := f.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if generic, ok := t.(*ast.IndexListExpr); ok {
		t = generic.X
	}
	if name, ok := t.(*ast.Ident); ok {
		return name.Name + "."
	}
	return ""
}
