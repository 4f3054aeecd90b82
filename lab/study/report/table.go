package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// table is one of any of the outputs.
type table struct {
	Title string
	Note  string // what is in it
	Head  []string
	Rows  [][]string
}

// section is an experiment on a kernel.
type section struct {
	study.Description
	Kernel   study.Kernel
	Sentence string
	Failures []string
	blocks   []block
}

// block is a figure of a case: a table, and a chart.
type block struct {
	place  // size 0
	figure study.Figure
	axis   string
	sizes  []int
	who    []study.Contender // that have it
}

// of are the blocks of a figure.
func (c section) of(f study.Figure) []block {
	return slices.DeleteFunc(slices.Clone(c.blocks), func(b block) bool { return b.figure.Name != f.Name })
}

// sections are all that the Result has rows of, in its order.
func (s *Statistics) sections() (all []section) {
	for _, d := range s.Experiments {
		for _, name := range s.kernels(d.Name) {
			all = append(all, s.section(d, s.kernel(name)))
		}
	}
	return all
}

// kernel is the one of a name.
func (s *Statistics) kernel(name string) study.Kernel {
	i := slices.IndexFunc(s.Kernels, func(k study.Kernel) bool { return k.Name == name })
	if i < 0 {
		return study.Kernel{Name: name}
	}
	return s.Kernels[i]
}

func (s *Statistics) section(d study.Description, k study.Kernel) section {
	c := section{Description: d, Kernel: k}
	for _, of := range s.cases(d.Name, k.Name) {
		for _, f := range d.Figures {
			b := block{
				place: place{experiment: d.Name, kernel: k.Name, of: of}, figure: f, axis: d.Axis,
				sizes: s.sizes(d.Name, k.Name, of),
			}
			if b.who = s.who(b); len(b.who) > 0 {
				c.blocks = append(c.blocks, b)
			}
		}
	}
	in := func(p place) bool { return p.experiment == d.Name && p.kernel == k.Name }
	for _, who := range s.contendersAt(in) {
		if failed, of, why := s.Failures(d.Name, k.Name, who.Name); failed > 0 {
			c.Failures = append(c.Failures,
				fmt.Sprintf("%s: %d of %s failed: %s", who.Name, failed, counted(of, "turns"), cut(why)))
		}
	}
	c.Sentence = s.sentence(c)
	return c
}

// cut keeps the beginning of what programs have said at length; the Result has all of it.
func cut(text string) string {
	const most = 240
	text = strings.Join(strings.Fields(text), " ")
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// who are the contenders that have a block's figure at some size.
func (s *Statistics) who(b block) (all []study.Contender) {
	in := func(p place) bool { p.size = 0; return p == b.place }
	for _, c := range s.contendersAt(in) {
		if slices.ContainsFunc(b.sizes, func(n int) bool { return len(s.values(b.at(n, c), b.figure.Name)) > 0 }) {
			all = append(all, c)
		}
	}
	return all
}

// relative reports whether any contender has a ratio to direct access.
func (s *Statistics) relative(b block) bool {
	for _, c := range b.who {
		for _, n := range b.sizes {
			if e, ok := s.estimate(b.at(n, c), b.figure.Name); ok && e.Direct != nil {
				return true
			}
		}
	}
	return false
}

// cell is a figure: its value for contenders without a proxy, and where there is no such control; else the ratio.
func (s *Statistics) cell(b block, size int, c study.Contender, both bool) string {
	e, ok := s.estimate(b.at(size, c), b.figure.Name)
	if !ok {
		return s.missing(b, size, c)
	}
	value := quantity(b.figure.Unit, e.Value)
	switch {
	case e.Direct == nil:
		return value
	case both:
		return value + " · " + e.Direct.String()
	}
	return e.Direct.String()
}

// missing says why there is no figure.
func (s *Statistics) missing(b block, size int, c study.Contender) string {
	rows := s.rows[b.at(size, c)]
	if slices.ContainsFunc(rows, func(r study.Row) bool { return r.Failed != "" }) {
		return "failed"
	}
	return "–"
}

// column is one of a table: a block at one of its sizes.
type column struct {
	block
	size int
	head string
}

// columns has a line for each contender that any of them has.
func (s *Statistics) columns(t table, all []column, both bool) table {
	t.Head = []string{""}
	var who []study.Contender
	for _, c := range all {
		t.Head = append(t.Head, c.head)
		for _, one := range c.who {
			if !slices.ContainsFunc(who, func(o study.Contender) bool { return o.Name == one.Name }) {
				who = append(who, one)
			}
		}
	}
	for _, one := range who {
		row := []string{one.Name}
		for _, c := range all {
			row = append(row, s.cell(c.block, c.size, one, both))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

const growthHead = "growth"

// bySize has a column for each size, and one for how the figure grows.
func (s *Statistics) bySize(b block, sizes []int, both bool) table {
	var all []column
	for _, n := range sizes {
		all = append(all, column{b, n, b.sized(n)})
	}
	t := s.columns(table{Title: b.title(), Note: s.note(b)}, all, both)
	if len(b.sizes) < 3 {
		return t
	}
	t.Head = append(t.Head, growthHead)
	for i, c := range b.who {
		exponent := "–"
		if g, ok := s.growth(b.place, c.Name, b.figure.Name); ok {
			exponent = g.String()
		}
		t.Rows[i] = append(t.Rows[i], exponent)
	}
	return t
}

// byFigure has a column for each figure of a case, at its largest size.
func (s *Statistics) byFigure(of []block, both bool) table {
	var all []column
	for _, b := range of {
		all = append(all, column{b, b.largest(), b.figure.Name})
	}
	return s.columns(table{Title: of[0].of, Note: s.note(of[0])}, all, both)
}

// byCase has a column for each case of a figure, at its largest size.
func (s *Statistics) byCase(of []block) table {
	var all []column
	for _, b := range of {
		head := b.of
		if n := b.largest(); n > 0 {
			head += ", " + b.sized(n)
		}
		all = append(all, column{b, b.largest(), head})
	}
	return s.columns(table{Title: of[0].figure.Name, Note: s.note(of[0])}, all, false)
}

// largest is the largest size.
func (b block) largest() int { return b.sizes[len(b.sizes)-1] }

// String is the exponent with its bounds.
func (g Growth) String() string {
	if math.IsInf(g.High, 1) { // there was one round
		return "n^" + signed(g.Exponent) + " (?)"
	}
	return "n^" + signed(g.Exponent) + " (" + signed(g.Low) + " to " + signed(g.High) + ")"
}

// sized is a size with what it counts.
func (b block) sized(n int) string {
	if n == 0 || b.axis == "" {
		return b.figure.Name
	}
	return counted(n, b.axis)
}

// title is the case and the figure.
func (b block) title() string {
	if b.of == "" {
		return b.figure.Name
	}
	return b.of + ": " + b.figure.Name
}

// note says what the figures of a table are.
func (s *Statistics) note(b block) string {
	text := b.figure.Does
	switch b.figure.Better {
	case study.Lower:
		text += "; lower is better"
	case study.Higher:
		text += "; higher is better"
	}
	if s.relative(b) {
		text += "; times that of direct access in the same rounds (bounds of 95 %)"
	}
	return text
}

// some are at most so many sizes, the first and the last among them.
func some(sizes []int, most int) (kept []int) {
	if len(sizes) <= most {
		return sizes
	}
	for i := range most {
		kept = append(kept, sizes[i*(len(sizes)-1)/(most-1)])
	}
	return kept
}
