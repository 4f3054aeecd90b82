// Site prepares the documents for the generator of their static site, which ./dev site runs.
//
//	README.md, docs/*.md ─► site: links, diagrams, order ─► pages/*.md, mkdocs.yml ─► mkdocs ─► out/site
//
// The documents link to each other and to files as a repository's do. Their diagrams are text, in Graphviz's language.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

func main() {
	repository := flag.String("repository", ".", "directory with README.md and docs")
	out := flag.String("out", "", "directory for the generator's input, which is emptied first")
	flag.Parse()
	if err := prepare(*repository, *out); err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
}

// prepare writes what the generator reads to a directory: mkdocs.yml, pages, and the files that belong to them.
func prepare(repository, out string) error {
	if out == "" {
		return errors.New("-out must name a directory")
	}
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	all, err := read(repository)
	if err != nil {
		return err
	}
	for name, content := range all {
		if strings.HasSuffix(name, ".md") {
			if content, err = all.page(name); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if err := write(filepath.Join(out, "pages", published(name)), content); err != nil {
			return err
		}
	}
	assets := os.DirFS(filepath.Join(repository, "lab/site/assets"))
	if err := os.CopyFS(filepath.Join(out, "pages", "assets"), assets); err != nil {
		return err
	}
	configuration, err := os.ReadFile(filepath.Join(repository, "lab/site/mkdocs.yml"))
	if err != nil {
		return err
	}
	return write(filepath.Join(out, "mkdocs.yml"), string(configuration)+all.order())
}

func write(file, content string) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(content), 0o644)
}

// documents are files of the repository, by path, that the site has.
type documents map[string]string

// outside are the documents outside of docs, and what their pages are called.
func outside() map[string]string {
	return map[string]string{
		"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "vulnerabilities.md",
	}
}

// published is the path of a document in the site.
func published(name string) string {
	if page, ok := outside()[name]; ok {
		return page
	}
	return strings.TrimPrefix(name, "docs/")
}

// read returns the documents. Of docs the programs are left out, and the examples that tests run.
func read(repository string) (documents, error) {
	all := documents{}
	add := func(name string) error {
		content, err := os.ReadFile(filepath.Join(repository, name))
		all[name] = string(content)
		return err
	}
	for name := range outside() {
		if err := add(name); err != nil {
			return nil, err
		}
	}
	err := fs.WalkDir(os.DirFS(repository), "docs", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || path.Ext(name) == ".go" || path.Dir(name) == "docs/examples" {
			return err
		}
		return add(name)
	})
	return all, err
}
