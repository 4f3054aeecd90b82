package main

import (
	"fmt"
	"html"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
)

// page returns a document as the generator reads it: links lead to pages, and diagrams are drawn.
func (d documents) page(name string) (string, error) {
	var out strings.Builder
	rest := d[name]
	for _, block := range regexp.MustCompile("(?ms)^ *```.*?^ *```").FindAllString(rest, -1) {
		before, after, _ := strings.Cut(rest, block)
		drawn, err := draw(block)
		if err != nil {
			return "", err
		}
		out.WriteString(d.links(name, before) + drawn)
		rest = after
	}
	out.WriteString(d.links(name, rest))
	return out.String(), nil
}

// links has each link lead to the page that the site has of a document. A link to another file becomes text.
func (d documents) links(from, text string) string {
	link := regexp.MustCompile(`\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)`)
	return link.ReplaceAllStringFunc(text, func(found string) string {
		m := link.FindStringSubmatch(found)
		name, heading, anchored := strings.Cut(m[2], "#")
		if name == "" || strings.Contains(m[2], "://") {
			return found
		}
		target := path.Join(path.Dir(from), name)
		if _, ok := d[target]; !ok {
			return m[1]
		}
		to := relative(published(from), published(target))
		if anchored {
			to += "#" + heading
		}
		return "[" + m[1] + "](" + to + ")"
	})
}

// relative is the way from one page to another one.
func relative(from, to string) string {
	return strings.Repeat("../", strings.Count(from, "/")) + to
}

// defaults are what all diagrams have in common. Their colours are the page's: see assets/site.css.
const defaults = `{ rankdir=LR bgcolor=transparent pad=0.1 nodesep=0.3
node [shape=box style=rounded fontname="sans-serif" fontsize=13 margin="0.15,0.08"]
edge [fontname="sans-serif" fontsize=11]
`

// draw turns a diagram into SVG that is part of the page. Its first line is a comment, and names it. Other blocks stay.
func draw(block string) (string, error) {
	m := regexp.MustCompile("(?s)^```dot\n// (.*?)\n(.*)```$").FindStringSubmatch(block)
	if m == nil {
		return block, nil
	}
	dot := exec.Command("dot", "-Tsvg")
	dot.Stdin = strings.NewReader(strings.Replace(m[2], "{", defaults, 1))
	out, err := dot.Output()
	if err != nil {
		return "", fmt.Errorf("dot draws %q: %w", m[1], err)
	}
	_, svg, ok := strings.Cut(string(out), "<svg ")
	if !ok {
		return "", fmt.Errorf("dot draws %q: no SVG", m[1])
	}
	svg = regexp.MustCompile(`(?s)<title>.*?</title>|<!--.*?-->| (?:fill|stroke)="[^"]*"|\n`).ReplaceAllString(svg, "")
	title := html.EscapeString(m[1])
	return `<div class="diagram"><svg role="img" aria-label="` + title + `" ` + svg + "</div>", nil
}

// order is the navigation, in the generator's form. Documents that have no place in it follow as reference.
func (d documents) order() string {
	sections := []struct {
		title string
		pages []string
	}{
		{"Start", []string{"index", "quickstart", "install", "choosing", "migrate"}},
		{"Operate", []string{"troubleshooting", "operations", "faq"}},
		{"Judge", []string{
			"compare", "compatibility", "performance", "scale", "benchmark", "security", "security-figures",
		}},
		{"Reference", nil},
		{"Work on it", []string{
			"contributing", "architecture", "packages", "planes", "changes", "testing", "dependencies",
			"vulnerabilities",
		}},
	}
	placed := map[string]bool{}
	for _, s := range sections {
		for _, p := range s.pages {
			placed[p] = true
		}
	}
	there, hidden := d.pages()
	for p := range there {
		if !placed[p] {
			sections[3].pages = append(sections[3].pages, p)
		}
	}
	slices.Sort(sections[3].pages)
	var out strings.Builder
	out.WriteString("nav:\n")
	for _, s := range sections {
		out.WriteString("  - " + s.title + ":\n")
		for _, p := range s.pages {
			if there[p] {
				out.WriteString("      - " + p + ".md\n")
			}
		}
	}
	return out.String() + "not_in_nav: |\n  /" + strings.Join(hidden, "\n  /") + "\n"
}

// pages are those of the navigation, without the ending, and those that only other pages lead to.
func (d documents) pages() (there map[string]bool, hidden []string) {
	there = map[string]bool{}
	for name := range d {
		page, ok := strings.CutSuffix(published(name), ".md")
		switch {
		case !ok:
		case strings.Contains(page, "/"):
			hidden = append(hidden, page+".md")
		default:
			there[page] = true
		}
	}
	slices.Sort(hidden)
	return there, hidden
}
