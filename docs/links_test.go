package docs

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

//go:generate go run ../lab/charts performance.md
//go:generate go run ../lab/packagelist packages.md
//go:generate go run ../lab/messagelist messages.txt operations.md
//go:generate go run ../lab/stablelist stable.txt operations.md

const root = ".."

// Each link to a file leads to one, and each link to a heading to one of that document.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for file, text := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(prose(text), -1) {
			name, heading, _ := strings.Cut(m[1], "#")
			target := file
			if name != "" {
				target = filepath.Join(filepath.Dir(file), name)
			}
			if strings.Contains(m[1], "://") {
				continue
			}
			content, err := readFile(target)
			if err != nil {
				t.Errorf("%s links to %s: %v", file, m[1], err)
			} else if heading != "" && !headings(content)[heading] {
				t.Errorf("%s links to %s, and there is no such heading", file, m[1])
			}
		}
	}
}

// Each file and package that is named by its path is there. A path begins with a directory of the repository, or wrongly
// with one below lab; words in capitals stand for names.
func TestPaths(t *testing.T) {
	code := regexp.MustCompile("`([a-z.][\\w.-]*(?:/[\\w.-]+)+)/?`|(?:^|[\\s`])\\./([a-z][\\w.-]*(?:/[\\w.-]+)*)")
	for file, text := range documents(t) {
		for _, m := range code.FindAllStringSubmatch(text, -1) {
			path := strings.TrimRight(m[1]+m[2], ".")
			first, _, _ := strings.Cut(path, "/")
			if first == "bin" || first == "out" { // made by ./dev
				continue
			}
			if !exists(first) && !exists(filepath.Join("lab", first)) || strings.ContainsFunc(path, unicode.IsUpper) {
				continue
			}
			if !exists(path) {
				t.Errorf("%s names %s, which is not there", file, path)
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(filepath.Join(root, path))
	return err == nil
}

// documents are all texts in Markdown by their paths in the repository.
func documents(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == ".git" || name == "out" || name == "bin") {
			return fs.SkipDir
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		file, err := filepath.Rel(root, path)
		if err == nil {
			all[file], err = readFile(file)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if all["README.md"] == "" {
		t.Fatal("there is no README.md")
	}
	return all
}

// readFile returns the text of a file in the repository; that of a directory is empty.
func readFile(name string) (string, error) {
	if info, err := os.Stat(filepath.Join(root, name)); err != nil || info.IsDir() {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(root, name))
	return string(text), err
}

// prose is a text without the blocks of code in it.
func prose(text string) string {
	return regexp.MustCompile("(?ms)^ *```.*?^ *```").ReplaceAllString(text, "")
}

// headings are the names of a document's headings in links, as GitHub makes them.
func headings(text string) map[string]bool {
	all := map[string]bool{}
	linked := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	for line := range strings.Lines(prose(text)) {
		title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " ")
		if !ok || !strings.HasPrefix(line, "#") {
			continue
		}
		title = strings.TrimSpace(linked.ReplaceAllString(title, "$1"))
		all[strings.Map(inHeading, title)] = true
	}
	return all
}

// inHeading is what becomes of a character in the name of a heading; -1: it is left out.
func inHeading(r rune) rune {
	switch {
	case r == ' ':
		return '-'
	case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
		return unicode.ToLower(r)
	}
	return -1
}

// Each package of the repository is listed; its text is not compared, which "go generate ./docs" renews.
func TestPackages(t *testing.T) {
	page, err := readFile("docs/packages.md")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "list", "-f", "{{if .Doc}}{{.ImportPath}}{{end}}", "fairlead.dev/fairlead/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		if row := "| `" + strings.TrimPrefix(path, "fairlead.dev/fairlead/") + "` |"; !strings.Contains(page, row) {
			t.Errorf("docs/packages.md has no row of %s: run go generate ./docs", path)
		}
	}
}

// The glossary stays small enough to be read.
func TestGlossary(t *testing.T) {
	page, err := readFile("docs/glossary.md")
	if err != nil {
		t.Fatal(err)
	}
	const most = 60
	if rows := strings.Count(page, "\n| ") - 1; rows > most || rows < 1 {
		t.Errorf("docs/glossary.md has %d terms, more than %d or none", rows, most)
	}
}
