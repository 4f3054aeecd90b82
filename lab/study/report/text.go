package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

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
	fmt.Fprintf(&text, "\nADVICE\n%s\n", advise.Wrap(s.Advice().String(), "", width))
	fmt.Fprintln(&text, "\nWHAT OTHERS HAVE PUBLISHED, AND WHAT IS SEEN HERE")
	textVerdicts(&text, s.Verdicts())
	for _, c := range s.sections() {
		s.textSection(&text, c)
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
		fmt.Fprintln(text, advise.Wrap("  "+v.Answer.sign()+" "+string(v.Answer)+who+": "+v.Says, "      ", width))
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

func (s *Statistics) textSection(text *strings.Builder, c section) {
	title := c.Name
	if len(s.kernels(c.Name)) > 1 || c.Kernel.Name != study.This {
		title += " (" + c.Kernel.Name + ")"
	}
	fmt.Fprintf(text, "\n%s: %s\n%s\n", strings.ToUpper(title), c.Does, advise.Wrap(c.Sentence, "", width))
	for _, t := range s.small(c) {
		t.text(text)
	}
	for _, f := range c.Failures {
		fmt.Fprintln(text, advise.Wrap("! "+f, "  ", width))
	}
}

// The most columns of a terminal's table.
const (
	mostSizes   = 4
	mostColumns = 5
)

// small is what of an experiment fits a terminal: its main figure by size, by case, or all figures of one place.
func (s *Statistics) small(c section) (all []table) {
	main, _ := mainFigure(c.Description)
	of := c.of(main)
	switch {
	case len(of) == 0:
		return nil
	case len(of) == 1 && len(of[0].sizes) == 1:
		return []table{s.byFigure(c.blocks[:min(len(c.blocks), mostColumns)], false)}
	case len(of) <= 2 && len(of[0].sizes) > 1:
		for _, b := range of {
			all = append(all, s.bySize(b, some(b.sizes, mostSizes), false))
		}
		return all
	}
	return []table{s.byCase(of[:min(len(of), mostColumns)])}
}

// text writes a table for a terminal.
func (t table) text(text *strings.Builder) {
	fmt.Fprintln(text)
	w := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{t.Head}, t.Rows...) {
		fmt.Fprintln(w, "  "+strings.Join(row, "\t"))
	}
	_ = w.Flush() // a Builder takes everything
	fmt.Fprintln(text, advise.Wrap("  "+strings.TrimPrefix(t.Title+": ", ": ")+t.Note, "  ", width))
}

// day writes a date as people do.
func day(t time.Time) string { return t.UTC().Format("2 January 2006") }
