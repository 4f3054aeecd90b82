package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/lab/study"
)

// width is that to which prose is broken in a terminal.
const width = 110

// Text writes a summary for a terminal: what matters first, and one small table of each experiment.
func Text(w io.Writer, r *study.Result) error {
	s := NewStatistics(r)
	var text strings.Builder
	for _, line := range s.head() {
		fmt.Fprintln(&text, advise.Wrap(line, "  ", width))
	}
	s.scoreboard().table(score.short).text(&text)
	fmt.Fprintf(&text, "\nADVICE\n")
	for _, sentence := range s.Decision() {
		fmt.Fprintln(&text, advise.Wrap(sentence, "", width))
	}
	fmt.Fprintln(&text, "\nWHAT OTHERS HAVE PUBLISHED, AND WHAT IS SEEN HERE")
	textVerdicts(&text, s.Verdicts())
	for _, c := range s.sections() {
		c.text(&text)
	}
	fmt.Fprintln(&text, "\n"+advise.Wrap(s.legend(), "", width))
	_, err := io.WriteString(w, text.String())
	return err
}

// textVerdicts writes each conclusion once, and below it for whom it holds.
func textVerdicts(text *strings.Builder, all []Verdict) {
	last, missing := "", 0
	for _, v := range all {
		if v.Answer == Unknown && strings.HasPrefix(v.Says, itNeeds) {
			missing++
			continue
		}
		if v.Answer == Unknown && v.Of == "" {
			fmt.Fprintln(text, advise.Wrap("? Cannot tell whether "+v.Conclusion+": "+v.Says, "  ", width))
			continue
		}
		if v.Conclusion != last {
			fmt.Fprintln(text, advise.Wrap(upper(v.Conclusion)+" ["+v.Published+"]", "  ", width))
		}
		last = v.Conclusion
		who := v.judged()
		if who != "" {
			who = ", " + who
		}
		says := v.Says
		if v.Why != "" {
			says += ". " + v.Why
		}
		fmt.Fprintln(text, advise.Wrap("  "+v.Answer.sign()+" "+string(v.Answer)+who+": "+says, "      ", width))
	}
	if missing > 0 {
		fmt.Fprintln(text, counted(missing, "conclusions")+" could not be judged, as the experiments were not made.")
	}
}

// upper begins a sentence, but for names that are written small.
func upper(text string) string {
	for _, name := range []string{"iptables", "nftables", "kube-proxy"} {
		if strings.HasPrefix(text, name) {
			return text
		}
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// head says what was run, when and where.
func (s *Statistics) head() []string {
	lines := []string{fmt.Sprintf("fairlead bench, %s, %s to %s, Fairlead %s, Services: %s", s.Depth,
		s.Started.UTC().Format("2 January 2006 15:04"), s.Ended.UTC().Format("15:04 MST"), s.Version, s.Services)}
	for _, k := range s.Kernels {
		lines = append(append(lines, describe(k)), s.missingOn(k.Name)...)
	}
	failed := 0
	for _, row := range s.Rows {
		if row.Failed != "" {
			failed++
		}
	}
	if failed > 0 {
		lines = append(lines, fmt.Sprintf("%s of %s failed; each experiment says which, and why.",
			study.Number(failed), counted(len(s.Rows), "turns")))
	}
	if !s.Complete {
		lines = append(lines, "This run is not complete: it was interrupted, or something failed.")
	}
	return lines
}

// facts are what a reader needs before all else, in a line.
func (s *Statistics) facts() string {
	parts := []string{fmt.Sprintf("%s run of %s, Fairlead %s", s.Depth, day(s.Started), s.Version)}
	for _, k := range s.Kernels {
		k.Note = ""
		parts = append(parts, describe(k))
	}
	if !s.Complete {
		parts = append(parts, "not complete")
	}
	return strings.Join(parts, " · ")
}

// missingOn says which contenders cannot run on a kernel, in a line for each reason.
func (s *Statistics) missingOn(kernel string) (lines []string) {
	names := map[string][]string{}
	for _, m := range s.Missing {
		if m.Kernel == kernel {
			why := cut(m.Why)
			names[why] = append(names[why], m.Contender)
		}
	}
	for _, why := range slices.SortedFunc(maps.Keys(names), func(a, b string) int {
		return cmp.Compare(names[a][0], names[b][0])
	}) {
		lines = append(lines, fmt.Sprintf("Not on %s: %s (%s).", kernel, strings.Join(names[why], ", "), why))
	}
	return lines
}

// describe is a kernel in one line.
func describe(k study.Kernel) string {
	var parts []string
	for _, p := range []struct {
		has  bool
		text string
	}{
		{k.Release != "", "Linux " + k.Release}, {k.CPU != "", k.CPU}, {k.CPUs > 0, counted(k.CPUs, "CPUs")},
		{k.Memory > 0, quantity(study.Bytes, float64(k.Memory))}, {k.Note != "", k.Note},
	} {
		if p.has {
			parts = append(parts, p.text)
		}
	}
	return k.Name + ": " + strings.Join(parts, ", ")
}

// legend explains the signs.
func (s *Statistics) legend() string {
	margins := fmt.Sprintf("%.0f %%", 100*(study.Figure{}.Matters()-1))
	for _, d := range s.Experiments {
		if f, ok := mainFigure(d); ok && f.Margin > 0 {
			margins += fmt.Sprintf("; %s, %s: %.0f %%", d.Name, f.Name, 100*f.Margin)
		}
	}
	return "Medians of rounds; in brackets the bounds of 95 %, which hold however often one looks. = there is no " +
		"difference that matters: the bounds lie within " + margins + ". ? is undecided. Growth: the figure grows as the " +
		"size to that power. Figures of different kernels are never compared."
}

// The most columns of a terminal's table, and of one in Markdown.
const (
	mostColumns   = 4
	mostInReports = 10
)

func (c section) text(text *strings.Builder) {
	fmt.Fprintf(text, "\n%s: %s\n", strings.ToUpper(c.Name), c.Does)
	for _, sentence := range c.Sentences {
		fmt.Fprintln(text, advise.Wrap(sentence, "  ", width))
	}
	if len(c.Exhibits) > 0 {
		c.Exhibits[0].table(group.here, mostColumns, exhibitCell.short).text(text)
	}
	for _, f := range c.Failures {
		fmt.Fprintln(text, advise.Wrap("! "+f, "  ", width))
	}
}

// text writes a table for a terminal. A row of one cell goes across all columns, and heads may have several lines.
func (t table) text(text *strings.Builder) {
	lines := 1
	for _, h := range t.Head {
		lines = max(lines, 1+strings.Count(h, "\n"))
	}
	rows := make([][]string, lines, lines+len(t.Rows))
	for _, h := range t.Head {
		parts := strings.Split(h, "\n")
		for i := range lines {
			rows[i] = append(rows[i], strings.Join(parts[min(i, len(parts)):min(i+1, len(parts))], ""))
		}
	}
	rows = append(rows, t.Rows...)
	widths := make([]int, len(t.Head))
	for _, row := range rows {
		for i, cell := range row[:len(row)*one(len(row) > 1)] {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	fmt.Fprintln(text)
	for _, row := range rows {
		line := ""
		for i, cell := range row {
			line += "  " + cell + strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell)))
		}
		fmt.Fprintln(text, strings.TrimRight(line, " "))
	}
	if about := strings.TrimPrefix(t.Title+": ", ": ") + t.Note; about != "" {
		fmt.Fprintln(text, advise.Wrap("  "+about, "  ", width))
	}
}

// day writes a date as people do.
func day(t time.Time) string { return t.UTC().Format("2 January 2006") }
