package report

import (
	"fmt"
	"io"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// Markdown writes all tables of a Result, and what follows from them.
func Markdown(w io.Writer, r *study.Result) error {
	s := NewStatistics(r)
	var text strings.Builder
	lines := s.head()
	fmt.Fprintf(&text, "# fairlead bench, %s\n\n", day(s.Started))
	for _, line := range lines {
		fmt.Fprintf(&text, "* %s\n", escaped(line))
	}
	fmt.Fprintf(&text, "\n## Advice\n\n%s\n\n", escaped(s.Advice().String()))
	fmt.Fprint(&text, "## What others have published\n\n")
	verdictTable(s.Verdicts()).markdown(&text)
	for _, c := range s.sections() {
		s.markdownSection(&text, c)
	}
	fmt.Fprintf(&text, "\n%s\n", escaped(s.legend()))
	_, err := io.WriteString(w, text.String())
	return err
}

// verdictTable has a line for each verdict.
func verdictTable(all []Verdict) table {
	t := table{Head: []string{"published", "by", "here", "judged", "figures"}}
	for _, v := range all {
		answer := v.Answer.sign() + " " + string(v.Answer)
		t.Rows = append(t.Rows, []string{v.Conclusion, v.Published, answer, v.judged(), v.Says})
	}
	return t
}

func (s *Statistics) markdownSection(text *strings.Builder, c section) {
	fmt.Fprintf(text, "\n## %s, %s\n\n%s. %s\n", c.Name, c.Kernel.Name, escaped(c.Does), escaped(c.Sentence))
	if c.Source != "" {
		fmt.Fprintf(text, "\nPublished by: %s\n", escaped(c.Source))
	}
	for _, t := range s.all(c) {
		fmt.Fprintf(text, "\n%s\n\n", escaped(strings.TrimPrefix(t.Title+": ", ": ")+t.Note))
		t.markdown(text)
	}
	for _, p := range s.beside(c) {
		fmt.Fprintf(text, "\n* published: %s", escaped(p.String()))
	}
	for _, f := range c.Failures {
		fmt.Fprintf(text, "\n* %s", escaped(f))
	}
	if len(c.Failures)+len(s.beside(c)) > 0 {
		fmt.Fprintln(text)
	}
}

// beside are the figures that others have published of what a section has measured.
func (s *Statistics) beside(c section) (all []Published) {
	for _, f := range c.Figures {
		all = append(all, s.publishedFor(block{place: place{experiment: c.Name}, figure: f})...)
	}
	return all
}

// all are all tables of an experiment: by size for each figure and case where there are sizes, else by figure for each
// case.
func (s *Statistics) all(c section) (all []table) {
	for i := 0; i < len(c.blocks); {
		j := i
		for j < len(c.blocks) && c.blocks[j].of == c.blocks[i].of {
			j++
		}
		if len(c.blocks[i].sizes) == 1 {
			all = append(all, s.byFigure(c.blocks[i:j], true))
		} else {
			for _, b := range c.blocks[i:j] {
				all = append(all, s.bySize(b, b.sizes, true))
			}
		}
		i = j
	}
	return all
}

// markdown writes a table.
func (t table) markdown(text *strings.Builder) {
	rule := make([]string, len(t.Head))
	for i := range rule {
		rule[i] = "---"
	}
	for _, row := range append([][]string{t.Head, rule}, t.Rows...) {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = escaped(cell)
		}
		fmt.Fprintf(text, "| %s |\n", strings.Join(cells, " | "))
	}
}

// escaped keeps what programs have said from being taken for Markdown.
func escaped(text string) string {
	signs := []string{"|", `\|`, "\n", " ", "\r", " ", "*", `\*`, "_", `\_`, "<", "&lt;", "`", "\\`"}
	return strings.NewReplacer(signs...).Replace(text)
}
