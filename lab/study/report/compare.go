package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/lab/study"
)

// Changes are what two Results tell of the same figures.
type Changes struct {
	Before string `json:"before"` // when, and by which version
	After  string `json:"after"`
	// Notes say what was not compared, and why.
	Notes       []string     `json:"notes,omitempty"`
	Differences []Difference `json:"differences"` // of all figures that both have, those that are seen first
}

// Difference is a figure of a contender, before and after.
type Difference struct {
	Experiment string     `json:"experiment"`
	Kernel     string     `json:"kernel"`
	Case       string     `json:"case,omitempty"`
	Size       int        `json:"size,omitempty"`
	Contender  string     `json:"contender"`
	Figure     string     `json:"figure"`
	Unit       study.Unit `json:"unit"`
	Before     float64    `json:"before"` // medians
	After      float64    `json:"after"`
	// Ratio is After to Before, each relative to no proxy in the same rounds if Relative.
	Ratio    float64 `json:"ratio"`
	Relative bool    `json:"relative"`
	// Bounds are those of 95 %; nil: one round has none.
	Bounds *[2]float64 `json:"bounds,omitempty"`
	// Outcome is better, worse, other (of a figure of which nothing is better), same, or unknown: the bounds are too wide.
	Outcome string `json:"outcome"`

	main       bool
	comparison Comparison
}

// seen reports whether there is a difference.
func (d Difference) seen() bool {
	return slices.Contains([]string{"better", "worse", "other"}, d.Outcome)
}

// Compare holds a Result against an earlier one.
func Compare(a, b *study.Result) (*Changes, error) {
	before, after := NewStatistics(a), NewStatistics(b)
	c := &Changes{Before: run(a), After: run(b)}
	kernels, err := common(a, b)
	if err != nil {
		return nil, err
	}
	alone := map[string]int{}
	for t := range after.rows {
		if len(before.rows[t]) == 0 || !slices.Contains(kernels, t.kernel) {
			continue
		}
		d, _ := after.Experiment(t.experiment)
		main, _ := mainFigure(d)
		for _, f := range d.Figures {
			x, y := far{before, t, f.Name}, far{after, t, f.Name}
			if !sameMachine(before.kernel(t.kernel), after.kernel(t.kernel)) && !bothRelative(x, y) {
				alone[t.kernel]++
				continue
			}
			if diff, ok := difference(x, y, f); ok {
				diff.main = f.Name == main.Name
				c.Differences = append(c.Differences, diff)
			}
		}
	}
	for _, k := range slices.Sorted(maps.Keys(alone)) {
		c.Notes = append(c.Notes, fmt.Sprintf("%s differs (%s; %s): %d figures without direct access in the same rounds "+
			"were not compared", k, describe(before.kernel(k)), describe(after.kernel(k)), alone[k]))
	}
	if len(c.Differences) == 0 {
		none := "the two results have no figure in common that can be compared"
		return nil, errors.New(strings.Join(append([]string{none}, c.Notes...), "; "))
	}
	c.sort(b)
	return c, nil
}

// run says when and by what.
func run(r *study.Result) string {
	return fmt.Sprintf("%s, %s, Fairlead %s", r.Started.UTC().Format("2006-01-02 15:04"), r.Depth, r.Version)
}

// common are the kinds of kernel that both have rows of.
func common(a, b *study.Result) (names []string, err error) {
	of := func(r *study.Result) map[string]bool {
		all := map[string]bool{}
		for _, row := range r.Rows {
			all[row.Kernel] = true
		}
		return all
	}
	x, y := of(a), of(b)
	for _, k := range slices.Sorted(maps.Keys(x)) {
		if y[k] {
			names = append(names, k)
		}
	}
	if len(names) == 0 {
		const none = "no kernel (a result without rows)"
		return nil, fmt.Errorf("figures of %s and of %s are never compared: measure both on kernels of the same kind",
			cmp.Or(listed(slices.Sorted(maps.Keys(x))), none), cmp.Or(listed(slices.Sorted(maps.Keys(y))), none))
	}
	return names, nil
}

// sameMachine reports whether figures themselves can be compared, too.
func sameMachine(a, b study.Kernel) bool {
	return a.Release == b.Release && a.CPU == b.CPU && a.CPUs == b.CPUs
}

// bothRelative reports whether both are known relative to no proxy.
func bothRelative(x, y far) bool {
	_, a := x.relative()
	_, b := y.relative()
	return len(a) == 2 && len(b) == 2
}

// difference compares a figure; ok is false if one of the Results does not have it, or if it is the control.
func difference(x, y far, f study.Figure) (d Difference, ok bool) {
	who := y.s.Contender(y.at.contender)
	if who.Kind == study.Direct || who.Kind == study.Again {
		return d, false
	}
	before, after := series(x.s.values(x.at, f.Name)), series(y.s.values(y.at, f.Name))
	if len(before) == 0 || len(after) == 0 {
		return d, false
	}
	d = Difference{
		Experiment: y.at.experiment, Kernel: y.at.kernel, Case: y.at.of, Size: y.at.size, Contender: y.at.contender,
		Figure: f.Name, Unit: f.Unit, Before: before.Median(), After: after.Median(), Relative: bothRelative(x, y),
	}
	c, ok := compareFar(y, x)
	if !ok { // there is a 0 among them, and no ratio
		// Such figures, as losses, differ if each round of one is above all of the other.
		up, down := slices.Min(after) > slices.Max(before), slices.Max(after) < slices.Min(before)
		alike, better := before.Median() == after.Median(), down == (f.Better == study.Lower)
		d.Relative, d.Outcome = false, outcome(up || down, alike, better)
		return d.of(f), true
	}
	d.comparison, d.Ratio = c, c.Median
	d.Outcome = outcome(c.More() || c.Less(), c.Alike(), c.Less() == (f.Better == study.Lower))
	if !math.IsInf(c.High, 0) {
		d.Bounds = &[2]float64{c.Low, c.High}
	}
	return d.of(f), true
}

// of has a figure of which nothing is better be neither.
func (d Difference) of(f study.Figure) Difference {
	if d.seen() && f.Better == "" {
		d.Outcome = "other"
	}
	return d
}

// outcome is what becomes of a figure in which a difference is seen, or which is alike.
func outcome(seen, alike, better bool) string {
	switch {
	case alike && !seen:
		return "same"
	case !seen:
		return "unknown"
	case better:
		return "better"
	}
	return "worse"
}

// sort puts first what differs, then main figures, then in the order of the Result.
func (c *Changes) sort(b *study.Result) {
	order := func(name string) int {
		return slices.IndexFunc(b.Experiments, func(d study.Description) bool { return d.Name == name })
	}
	slices.SortFunc(c.Differences, func(x, y Difference) int {
		return cmp.Or(one(y.seen())-one(x.seen()), one(y.main)-one(x.main), order(x.Experiment)-order(y.Experiment),
			cmp.Compare(x.Kernel, y.Kernel), cmp.Compare(x.Figure, y.Figure), cmp.Compare(x.Case, y.Case),
			x.Size-y.Size, cmp.Compare(x.Contender, y.Contender))
	})
}

// summary counts the outcomes.
func (c *Changes) summary() string {
	counts := map[string]int{}
	for _, d := range c.Differences {
		counts[d.Outcome]++
	}
	return fmt.Sprintf("Of %s: %s. At most 5 %% of figures that are the same lie beyond their bounds by chance.",
		counted(len(c.Differences), "figures"), tally(counts, "%d %s", "better", "worse", "other", "same", "unknown"))
}

// table has a line for each of some differences.
func (c *Changes) table(all []Difference) table {
	t := table{Head: []string{"experiment", "figure", "contender", "before", "after", "ratio", ""}}
	for _, d := range all {
		t.Rows = append(t.Rows, []string{
			d.place(), d.Figure, d.Contender, quantity(d.Unit, d.Before), quantity(d.Unit, d.After), d.ratio(), d.Outcome,
		})
	}
	return t
}

// place is where it was measured.
func (d Difference) place() string {
	text := study.PlaceOf(d.Experiment, d.Case, d.Size)
	if d.Kernel != study.This {
		text += " (" + d.Kernel + ")"
	}
	return text
}

// ratio is that with its bounds; what is relative to no proxy has a star.
func (d Difference) ratio() string {
	if d.Ratio == 0 {
		return "–"
	}
	text := d.comparison.String()
	if d.Relative {
		text += " *"
	}
	return text
}

const compareLegend = "Ratio: after to before, with bounds of 95 %. * of times that of direct access in the same " +
	"rounds, so that machines and days compare. = no difference that matters; ? undecided."

// changed are those with a difference.
func (c *Changes) changed() []Difference {
	n := slices.IndexFunc(c.Differences, func(d Difference) bool { return !d.seen() })
	if n < 0 {
		n = len(c.Differences)
	}
	return c.Differences[:n]
}

// Text writes what differs, for a terminal.
func (c *Changes) Text(w io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, "before: %s\nafter:  %s\n\n%s\n", c.Before, c.After, advise.Wrap(c.summary(), "", width))
	for _, note := range c.Notes {
		fmt.Fprintln(&text, advise.Wrap("! "+note, "  ", width))
	}
	if all := c.changed(); len(all) > 0 {
		t := c.table(all)
		t.Note = compareLegend
		t.text(&text)
	} else {
		fmt.Fprintln(&text, "\nNothing differs by more than chance.")
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// Markdown writes what differs, and then all that was compared.
func (c *Changes) Markdown(w io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, "# fairlead bench compare\n\n* before: %s\n* after: %s\n", escaped(c.Before), escaped(c.After))
	for _, note := range c.Notes {
		fmt.Fprintf(&text, "* %s\n", escaped(note))
	}
	fmt.Fprintf(&text, "\n%s\n\n## What differs\n\n", escaped(c.summary()))
	if all := c.changed(); len(all) > 0 {
		c.table(all).markdown(&text)
	} else {
		fmt.Fprintln(&text, "Nothing, by more than chance.")
	}
	if rest := c.Differences[len(c.changed()):]; len(rest) > 0 {
		fmt.Fprint(&text, "\n## What does not\n\n")
		c.table(rest).markdown(&text)
	}
	fmt.Fprintf(&text, "\n%s\n", escaped(compareLegend))
	_, err := io.WriteString(w, text.String())
	return err
}

// JSON writes all of it.
func (c *Changes) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(c)
}
