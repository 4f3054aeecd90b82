package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// mostLines are those of report.md: as much as a person reads. All the rest is in report.html and result.json.
const mostLines = 200

// Markdown writes the scoreboard, the advice, the verdicts, and of each experiment the main table, as far as there is
// room.
func Markdown(w io.Writer, r *study.Result) error {
	s := NewStatistics(r)
	var text strings.Builder
	fmt.Fprintf(&text, "# fairlead bench, %s\n\n", day(s.Started))
	for _, line := range s.head() {
		fmt.Fprintf(&text, "* %s\n", escaped(line))
	}
	fmt.Fprint(&text, "\n## Scoreboard\n\n")
	s.scoreboard().table(score.String).markdown(&text)
	fmt.Fprintln(&text, "\n▲ best, ▼ worst, each with all whose bounds of 95 % overlap only with its own. "+
		"× direct: times that of direct access.")
	fmt.Fprintf(&text, "\n## Advice\n\n%s\n", escaped(strings.Join(s.Decision(), "\n")))
	fmt.Fprintf(&text, "\n## What others have concluded\n\n%s.\n\n", tallied(s.Verdicts()))
	verdictTable(s.Verdicts()).markdown(&text)
	end := fmt.Sprintf("\n%s\n", escaped(s.legend()))
	lines := strings.Count(text.String(), "\n") + strings.Count(end, "\n")
	for _, c := range s.sections() {
		part := c.markdown()
		if lines += strings.Count(part, "\n"); lines > mostLines {
			break
		}
		text.WriteString(part)
	}
	_, err := io.WriteString(w, text.String()+end)
	return err
}

// verdictTable has a line for each conclusion: the answers for kube-proxy's planes and for Fairlead's, by kernel.
func verdictTable(all []Verdict) table {
	t := table{Head: []string{"published", "by", "kube-proxy", "Fairlead"}}
	for _, g := range verdictGroups(all) {
		cells := map[string][]string{}
		for _, v := range g.Verdicts {
			text := v.Answer.sign() + " " + string(v.Answer)
			if v.Kernel != "" && v.Kernel != study.This {
				text += " (" + v.Kernel + ")"
			}
			cells[v.Of] = append(cells[v.Of], text)
		}
		if none := cells[""]; len(none) > 0 {
			cells["kube-proxy"], cells["Fairlead"] = none, none
		}
		t.Rows = append(t.Rows, []string{
			upper(g.Conclusion), g.Published, strings.Join(cells["kube-proxy"], "; "), strings.Join(cells["Fairlead"], "; "),
		})
	}
	return t
}

// markdown is the main table of an experiment: what was published, then the last case on each kernel.
func (c section) markdown() string {
	if len(c.Exhibits) == 0 {
		return ""
	}
	e := c.Exhibits[0]
	last := map[string]string{}
	for _, g := range e.Groups {
		last[g.Kernel] = g.Label
	}
	var text strings.Builder
	fmt.Fprintf(&text, "\n## %s: %s\n\n%s\n\n", c.Name, escaped(e.Title), escaped(e.Note))
	shown := func(g group) bool { return last[g.Kernel] == g.Label && g.known() }
	e.table(shown, mostInReports, exhibitCell.String).markdown(&text)
	return text.String()
}

// markdown writes a table.
func (t table) markdown(text *strings.Builder) {
	rule := slices.Repeat([]string{"---"}, len(t.Head))
	for _, row := range append([][]string{t.Head, rule}, t.Rows...) {
		cells := make([]string, len(t.Head))
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
