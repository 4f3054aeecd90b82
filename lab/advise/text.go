package advise

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"
)

// why is the paragraph about a choice: the first of all, which are sorted.
func (c Case) why(all []contender) string {
	chosen := all[0]
	sentences := []string{"Use " + chosen.Plane + " for " + services(c.Rows.Services)}
	switch {
	case len(all) == 1:
		sentences[0] += ": no other data plane can run here"
	case chosen.Figures == nil:
		sentences[0] += ", by published figures, as nothing was measured here"
		if chosen.Unmeasured != "" {
			sentences[0] += " (" + chosen.Unmeasured + ")"
		}
	}
	if missing := c.missing(); missing != "" {
		sentences = append(sentences, "Not possible here: "+missing)
	}
	sentences = append(sentences, chosen.said(true))
	if len(all) > 1 {
		sentences = append(sentences, "Next comes "+all[1].Plane+c.behind(all[0], all[1])+": "+all[1].said(false))
	}
	if len(chosen.notes) > 0 {
		sentences = append(sentences, "For "+chosen.Plane+" 10 % is added "+drawbacks(chosen.notes))
	}
	if chosen.Unserved != "" {
		sentences = append(sentences, "It does not serve all rows: "+chosen.Unserved)
	}
	if len(all) > 1 {
		sentences = append(sentences, c.otherwise(chosen.Plane))
	}
	return strings.Join(sentences, ". ") + "."
}

// otherwise says what would change the choice.
func (c Case) otherwise(chosen string) string {
	var changes, same []string
	for _, v := range []struct {
		when    string
		applies bool
		change  func(*Case)
	}{
		{"if most connections were short", c.Traffic != Short, func(c *Case) { c.Traffic = Short }},
		{"if most connections stayed open", c.Traffic != Long, func(c *Case) { c.Traffic = Long }},
		{"without session affinity", c.Rows.Affine > 0, func(c *Case) { c.Rows.Affine = 0 }},
		{"without schedulers", len(c.Rows.Scheduled) > 0, func(c *Case) { c.Rows.Scheduled = nil }},
		{"with 100 times the Services", c.Rows.Services > 0, func(c *Case) { c.Rows.Services *= 100 }},
	} {
		if !v.applies {
			continue
		}
		other := c
		v.change(&other)
		if best := other.ranked()[0].Plane; best != chosen {
			changes = append(changes, best+" "+v.when)
		} else {
			same = append(same, v.when)
		}
	}
	if len(changes) > 0 {
		return "It would be " + strings.Join(changes, ", and ")
	}
	return "It would be the same " + strings.Join(same, ", and ")
}

// behind says why one plane comes after another, if it is not by its figures.
func (c Case) behind(first, second contender) string {
	switch {
	case second.Unserved != "" && first.Unserved == "":
		return ", which does not serve all rows (" + second.Unserved + ")"
	case second.Plane == userspace:
		return ", whose connections end with the process"
	case second.Figures == nil && first.Figures != nil:
		return ", which could not be measured (" + second.Unmeasured + ")"
	case len(second.notes) > len(first.notes):
		return ", with 10 % added " + drawbacks(second.notes)
	case second.effort < first.effort:
		return ", which is hardly faster"
	}
	return ""
}

// drawbacks say for what 10 % is added, once each.
func drawbacks(notes []string) string {
	return "because " + strings.Join(notes, ", and as much because ")
}

// said are the figures of a plane, as a sentence or as the rest of one.
func (o contender) said(sentence bool) string {
	text := fmt.Sprintf("a connection with one request takes %.2f times as long as without a proxy, "+
		"a request on an open one %.2f times", o.connection, o.request)
	if !sentence {
		text = fmt.Sprintf("%.2f times, %.2f times", o.connection, o.request)
	}
	switch {
	case o.change == 0: // it was not measured
	case sentence:
		text += ", a change of an endpoint " + short(o.change)
	default:
		text += ", " + short(o.change)
	}
	if !sentence {
		return text
	}
	if o.Figures == nil {
		return "As published, " + text
	}
	return fmt.Sprintf("Measured here with %s, %s", services(o.Figures.Services), text)
}

// missing says which planes are not possible, and why.
func (c Case) missing() string {
	var all []string
	for _, f := range c.Findings {
		if f.Missing != "" {
			all = append(all, f.Plane+" ("+f.Missing+")")
		}
	}
	return strings.Join(all, ", ")
}

func services(n int) string {
	switch n {
	case 0:
		return "a node without Services"
	case 1:
		return "one Service"
	}
	return fmt.Sprintf("%d Services", n)
}

// short rounds to two digits, about.
func short(d time.Duration) string {
	unit := time.Nanosecond
	for d >= 100*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}

// Report is what is said to people: a Choice, and what it is founded on.
type Report struct {
	Choice
	Current   string        `json:"current,omitempty"` // the plane that has rules in the kernel now
	Rows      Rows          `json:"rows"`
	Findings  []Finding     `json:"planes"`
	Published []string      `json:"published"`
	Took      time.Duration `json:"tookNanoseconds"`
}

// NewReport makes the choice.
func NewReport(c Case, current string, took time.Duration) Report {
	r := Report{Choice: Choose(c), Current: current, Rows: c.Rows, Findings: c.Findings, Took: took}
	for _, p := range Published() {
		if p.about(c.Rows.Services) {
			r.Published = append(r.Published, p.String())
		}
	}
	return r
}

// Text is the Report for a terminal of so many columns; 0: as wide as it likes.
func (r Report) Text(columns int) string {
	var text strings.Builder
	fmt.Fprintln(&text, Wrap(r.Why, "", columns))
	if r.Current != "" {
		fmt.Fprintln(&text, Wrap("\n"+r.current(), "", columns))
	}
	r.table(&text)
	for _, line := range r.remarks() {
		fmt.Fprintln(&text, Wrap(line, "  ", columns))
	}
	if len(r.Published) > 0 {
		fmt.Fprintln(&text, "\nOthers have published, of as many Services:")
	}
	for _, p := range r.Published {
		fmt.Fprintln(&text, Wrap("- "+p, "  ", columns))
	}
	return text.String()
}

// remarks are about planes of which not all is known, those with the same reason in one line.
func (r Report) remarks() (lines []string) {
	about := func(of func(Finding) string, says string) {
		names := map[string][]string{}
		for _, f := range r.Findings {
			if reason := of(f); reason != "" {
				names[reason] = append(names[reason], f.Plane)
			}
		}
		for _, reason := range slices.Sorted(maps.Keys(names)) {
			lines = append(lines, says+strings.Join(names[reason], ", ")+": "+reason)
		}
	}
	about(func(f Finding) string { return f.Missing }, "not possible here: ")
	about(func(f Finding) string { return f.Unmeasured }, "not measured: ")
	about(func(f Finding) string { return f.Unserved }, "not all rows are served by ")
	return lines
}

// current says what is there, and how to change it.
func (r Report) current() string {
	if r.Current == r.Plane {
		return "It is what serves now."
	}
	text := "The data plane " + r.Current + " serves now."
	if r.Plane != "" {
		text += " fairlead switch " + r.Plane + " changes that."
	}
	return text
}

// table has a line for each plane that was measured.
func (r Report) table(text *strings.Builder) {
	head := "\nplane\tconnection\trequest\tchange\tfill\n"
	w := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	for _, f := range r.Findings {
		if m := f.Figures; m != nil {
			fmt.Fprint(w, head)
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", f.Plane, m.Connection, m.Request, short(m.Change), short(m.Fill))
			head = ""
		}
	}
	_ = w.Flush() // a Builder takes everything
	if head == "" {
		fmt.Fprintln(text, "times as long as without a proxy (bounds of 95 %), and what one endpoint and all rows take")
	}
}

// Wrap breaks lines between words; those after the first are indented.
func Wrap(text, indent string, columns int) string {
	if columns <= 0 {
		return text
	}
	var lines []string
	for paragraph := range strings.SplitSeq(text, "\n") {
		line, before := "", paragraph[:len(paragraph)-len(strings.TrimLeft(paragraph, " "))]
		for _, word := range strings.Fields(paragraph) {
			if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns {
				lines, line, before = append(lines, line), "", indent
			}
			line, before = line+before+word, " "
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}
