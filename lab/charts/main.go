// Charts draws the tables of a document in Markdown that have a mark for it, so that a figure is written once:
//
//	<!-- chart figures/connect.svg: title -->   ─► charts ─► figures/connect.svg, beside the document
//	| row | series | series |
//
// Each row of such a table is a group of bars, one for each column with figures. A figure is the first number of a cell
// with its unit. The scale is logarithmic where the largest figure is more than 30 times the smallest one.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	extast "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/text"
)

func main() {
	for _, document := range os.Args[1:] {
		if err := draw(document); err != nil {
			fmt.Fprintf(os.Stderr, "charts: %s: %v\n", document, err)
			os.Exit(1)
		}
	}
}

// chart is a table that is to be drawn.
type chart struct {
	file, title string
	series      []string
	groups      []group
}

type group struct {
	label string
	bars  []bar
}

// bar is a figure as the table shows it, and its value in the smallest unit.
type bar struct {
	series int
	text   string
	value  float64
}

func draw(document string) error {
	source, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	for _, c := range find(source) {
		file := filepath.Join(filepath.Dir(document), c.file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(c.svg()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

var mark = regexp.MustCompile(`^<!-- chart (\S+): (.+) -->`)

func find(source []byte) (all []chart) {
	root := goldmark.New(goldmark.WithExtensions(extension.Table)).Parser().Parse(text.NewReader(source))
	for n := root.FirstChild(); n != nil; n = n.NextSibling() {
		html, ok := n.(*ast.HTMLBlock)
		if !ok {
			continue
		}
		m := mark.FindStringSubmatch(string(html.Lines().Value(source)))
		table, ok := n.NextSibling().(*extast.Table)
		if m != nil && ok {
			all = append(all, read(table, source, chart{file: m[1], title: m[2]}))
		}
	}
	return all
}

func read(table *extast.Table, source []byte, c chart) chart {
	for row := table.FirstChild(); row != nil; row = row.NextSibling() {
		var cells []string
		for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
			cells = append(cells, strings.ReplaceAll(string(cell.Lines().Value(source)), "`", ""))
		}
		if c.series == nil {
			c.series = cells[1:]
			continue
		}
		g := group{label: cells[0]}
		for i, cell := range cells[1:] {
			if b, ok := figure(cell); ok {
				b.series = i
				g.bars = append(g.bars, b)
			}
		}
		c.groups = append(c.groups, g)
	}
	return c
}

var number = regexp.MustCompile(`^(-?[\d,]*\.?\d+) ?(µs|ms|s|min|kB|MB|MiB|GB)?\b`)

// figure is the first number of a cell; times are in microseconds, sizes in kilobytes.
func figure(cell string) (bar, bool) {
	m := number.FindStringSubmatch(cell)
	if m == nil {
		return bar{}, false
	}
	value, err := strconv.ParseFloat(strings.ReplaceAll(m[1], ",", ""), 64)
	if err != nil || value <= 0 {
		return bar{}, false
	}
	unit := map[string]float64{
		"": 1, "µs": 1, "ms": 1e3, "s": 1e6, "min": 6e7, "kB": 1, "MB": 1e3, "MiB": 1049, "GB": 1e6,
	}[m[2]]
	return bar{text: strings.TrimSpace(m[0]), value: value * unit}, true
}
