package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// Decision is the advice in at most three sentences: the choice, the next one, and what would change the choice. They
// have the scoreboard's figures, of this kernel, and name nothing that was not measured but to say so.
func (s *Statistics) Decision() []string {
	a := s.Advice()
	if a.Plane == "" {
		return []string{a.Why}
	}
	b := s.scoreboard()
	text := []string{"Use " + a.Plane + s.decided(b, a.Plane, ": ", true) + "."}
	if len(a.Next) > 0 {
		text = append(text, s.runnerUp(b, a)+".")
	}
	return append(text, s.changes(a)+".")
}

// told is a column of the scoreboard as the advice tells it.
type told struct{ title, says string }

// decisive are the columns that the choice goes by.
func decisive() []told {
	return []told{
		{"New connection", "%sa new connection takes %s times as long as without a proxy"},
		{"Open connection", "%sa request on an open one %s times"},
		{"Follows a change", "%sa changed endpoint is followed in %s"},
	}
}

// decided are a plane's figures on this kernel, in words or, of a second plane, alone.
func (s *Statistics) decided(b board, plane, before string, words bool) string {
	row, ok := b.of(plane)
	if !ok {
		return ""
	}
	var parts []string
	last := ""
	for _, column := range decisive() {
		c, ok := b.cell(row, column.title)
		if !ok || c.place.experiment == "http" && !s.requestsTold() {
			continue
		}
		figure := c.Text
		if c.Bounds != "" && c.relative {
			figure += " (" + c.Bounds + ")"
		} else if !c.relative {
			figure = quantity(c.figure.Unit, c.value)
		}
		if words {
			d, _ := s.Experiment(c.place.experiment)
			at := "at " + counted(c.place.size, d.Axis) + " "
			if c.place.size == 0 || at == last {
				at = ""
			}
			last = cmp.Or(at, last)
			figure = fmt.Sprintf(column.says, at, figure)
		}
		parts = append(parts, figure)
	}
	if len(parts) == 0 {
		return ""
	}
	return before + listed(parts)
}

// cell is that of a column, if it has the kind of figure that the column is named for.
func (b board) cell(row boardRow, column string) (c score, ok bool) {
	i := slices.IndexFunc(b.Columns, func(c boardColumn) bool { return c.Title == column })
	if i < 0 || len(row.Cells) == 0 || !row.Cells[i].measured() {
		return c, false
	}
	return row.Cells[i], row.Cells[i].relative == (column != "Follows a change")
}

// of is the row of one of Fairlead's planes on this kernel.
func (b board) of(plane string) (boardRow, bool) {
	for _, k := range b.Kernels {
		i := slices.IndexFunc(k.Rows, func(r boardRow) bool { return r.Kind == study.Fairlead && r.Plane == plane })
		if i >= 0 && k.Name == study.This {
			return k.Rows[i], true
		}
	}
	return boardRow{}, false
}

// runnerUp says who comes next, and whether that one is behind by more than chance.
func (s *Statistics) runnerUp(b board, a Advice) string {
	next := a.Next[0]
	text := "Next comes " + next + s.decided(b, next, " with ", false)
	sizes := s.advisable()
	switch ahead, behind := s.aheadAt(sizes, a.Plane, next), s.aheadAt(sizes, next, a.Plane); {
	case behind:
		text += ", which is ahead in some of it"
	case !ahead:
		text += ", and no difference between the two was seen"
	}
	if len(a.Against) > 0 {
		text += "; against " + a.Plane + " counts that " + strings.Join(a.Against, ", and that ")
	}
	return text
}

// aheadAt reports whether a plane is better than another one at any of some sizes.
func (s *Statistics) aheadAt(sizes []int, plane, other string) bool {
	return slices.ContainsFunc(sizes, func(services int) bool { return s.ahead(plane, other, services) })
}

// changes says for which sizes the choice holds, which one holds for others, and what was left out.
func (s *Statistics) changes(a Advice) string {
	sizes := s.advisable()
	text := fmt.Sprintf("That holds at each measured size, up to %s", counted(a.Services, "Services"))
	switch {
	case len(a.Changes) > 1:
		var parts []string
		for _, c := range a.Changes {
			parts = append(parts, fmt.Sprintf("%s from %s on", c.Plane, counted(c.Services, "Services")))
		}
		text = "By size: " + listed(parts)
	case len(sizes) == 1:
		text = fmt.Sprintf("Only %s were measured", counted(a.Services, "Services"))
	}
	if len(a.AsGood) > 0 {
		text += "; " + listed(a.AsGood) + " would come first at some, but is ahead in nothing that was measured"
	}
	var without []string
	for _, m := range s.Missing {
		if c := s.Contender(m.Contender); m.Kernel == study.This && c.Kind == study.Fairlead {
			without = append(without, m.Contender+" cannot run on this kernel")
		}
	}
	if without = append(without, a.Without...); len(without) > 0 {
		text += "; not considered: " + strings.Join(without, ", ")
	}
	return text
}
