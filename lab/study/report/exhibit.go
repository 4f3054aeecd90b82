package report

import (
	"cmp"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// exhibit is a table and its charts: what others have published of a figure, then what was measured here, by kernel and
// case.
type exhibit struct {
	Title, Note string
	Columns     []string
	Groups      []group
	Also        []Published // figures of a size of their own
}

// Span is how many columns a heading crosses.
func (e exhibit) Span() int { return len(e.Columns) + 1 }

// group are rows of one origin, with a chart if there is something to draw.
type group struct {
	Label   string
	Rows    []exhibitRow
	Picture picture
	// Kernel is empty for what others have published.
	Kernel string
}

const publishedLabel = "published, on other machines"

// orNone says that no figure was published, as far as is known, if there is none.
func (g group) orNone(columns int) group {
	if len(g.Rows) == 0 {
		g.Rows = []exhibitRow{{Name: "no figure is known", Cells: slices.Repeat([]exhibitCell{{Value: noFigure}}, columns)}}
	}
	return g
}

// known reports whether it has figures.
func (g group) known() bool { return g.here() || len(g.Rows[0].values) > 0 }

// exhibitRow is a mode. Class is for its colour and line; Source says where others have published it.
type exhibitRow struct {
	Name, Class, Source string
	Cells               []exhibitCell

	values []float64 // by column; NaN: none
	who    study.Contender
}

// noFigure is in a cell that has none.
const noFigure = "–"

// exhibitCell is a figure, and what it is times that of direct access.
type exhibitCell struct{ Value, Ratio string }

// String is the cell in one line.
func (c exhibitCell) String() string {
	if c.Ratio == "" {
		return c.Value
	}
	return c.Value + " · " + c.Ratio
}

// also are figures that are shown beside the main one, and those that others have published.
func also(experiment string) []string {
	return map[string][]string{
		"footprint": {"start", "cpu"}, "jitter": {"throughput", "worst interval", "proxy"},
	}[experiment]
}

// exhibits are those of an experiment: one for each figure if something grows, else one of all figures.
func (s *Statistics) exhibits(d study.Description) (all []exhibit) {
	main, ok := mainFigure(d)
	if !ok {
		return nil
	}
	if !s.grows(d.Name) {
		return append(all, s.unsized(d, main))
	}
	for _, f := range d.Figures {
		published := slices.ContainsFunc(PublishedFigures(), func(p Published) bool { return p.about(d, f) })
		if f.Name == main.Name || published || slices.Contains(also(d.Name), f.Name) {
			all = append(all, s.sized(d, f))
		}
	}
	slices.SortStableFunc(all, func(a, b exhibit) int { return one(b.Title == main.Name) - one(a.Title == main.Name) })
	if d.Name == "bandwidth" {
		all = append(all, s.beside())
	}
	return slices.DeleteFunc(all, func(e exhibit) bool { return !slices.ContainsFunc(e.Groups, group.here) })
}

// here reports whether it was measured here.
func (g group) here() bool { return g.Kernel != "" }

// grows reports whether an experiment has sizes.
func (s *Statistics) grows(experiment string) bool {
	return slices.ContainsFunc(s.Rows, func(r study.Row) bool { return r.Experiment == experiment && r.Size > 0 })
}

// places are the kernels and cases of an experiment.
func (s *Statistics) places(experiment string) (all []place) {
	for _, k := range s.kernels(experiment) {
		for _, of := range s.cases(experiment, k) {
			all = append(all, place{experiment: experiment, kernel: k, of: of})
		}
	}
	return all
}

// label names the kernel, the machine and the case of a place.
func (s *Statistics) label(p place) string {
	k, of := s.kernel(p.kernel), ""
	if p.of != "" {
		of = ": " + p.of
	}
	k.Note, k.Memory = "", 0
	return describe(k) + of
}

// sized is a figure by size.
func (s *Statistics) sized(d study.Description, f study.Figure) exhibit {
	e := exhibit{Title: f.Name, Note: noteOf(f)}
	var sizes []int
	add := func(n int) {
		if !slices.Contains(sizes, n) {
			sizes = append(sizes, n)
		}
	}
	tables, singles := publishedOf(d, f)
	e.Also = singles
	for _, t := range tables {
		for _, p := range t {
			add(p.Size)
		}
	}
	places := s.places(d.Name)
	for _, p := range places {
		for _, n := range s.sizes(p.experiment, p.kernel, p.of) {
			add(n)
		}
	}
	slices.Sort(sizes)
	for _, n := range sizes {
		e.Columns = append(e.Columns, study.Number(n))
	}
	g := group{Label: publishedLabel}
	for _, t := range tables {
		g.Rows = append(g.Rows, publishedRow(t, sizes))
	}
	if main, _ := mainFigure(d); len(tables) > 0 || f.Name == main.Name {
		e.Groups = append(e.Groups, g.orNone(len(sizes)))
	}
	for _, p := range places {
		b := block{place: p, figure: f, sizes: sizes}
		g := group{Label: s.label(p), Kernel: p.kernel}
		for _, c := range s.compared(b) {
			row := exhibitRow{Name: c.Name, Class: class(c), who: c}
			for _, n := range sizes {
				row.add(s.exhibitCell(b.at(n, c), f))
			}
			g.Rows = append(g.Rows, row)
		}
		if len(g.Rows) > 0 {
			e.Groups = append(e.Groups, g)
		}
	}
	e.drawLines(d.Axis, f.Unit, sizes)
	return e
}

// compared are the contenders of a block, without copies of the control or of a proxy, which only show chance.
func (s *Statistics) compared(b block) []study.Contender {
	return slices.DeleteFunc(s.who(b), func(c study.Contender) bool {
		return c.Kind == study.Again || strings.HasSuffix(c.Name, " again")
	})
}

// publishedOf are the tables of a figure, each of one source and plane, and the other figures.
func publishedOf(d study.Description, f study.Figure) (tables [][]Published, singles []Published) {
	for _, p := range publishedTables() {
		if !p.about(d, f) {
			continue
		}
		n := len(tables)
		if n > 0 && tables[n-1][0].whose() == p.whose() && tables[n-1][0].origin() == p.origin() {
			tables[n-1] = append(tables[n-1], p)
			continue
		}
		tables = append(tables, []Published{p})
	}
	for _, p := range publishedSingles() {
		if p.about(d, f) && p.Unit == f.Unit {
			singles = append(singles, p)
		}
	}
	return tables, singles
}

func publishedRow(t []Published, sizes []int) exhibitRow {
	who := t[0].contender()
	row := exhibitRow{Name: who.Name, Class: class(who), Source: t[0].origin(), who: who}
	for _, n := range sizes {
		i := slices.IndexFunc(t, func(p Published) bool { return p.Size == n })
		if i < 0 {
			row.add(exhibitCell{Value: noFigure}, 0, false)
			continue
		}
		row.add(exhibitCell{Value: quantity(t[i].Unit, t[i].Value)}, t[i].Value, true)
	}
	return row
}

func (r *exhibitRow) add(c exhibitCell, value float64, ok bool) {
	if !ok {
		value = none()
	}
	r.Cells, r.values = append(r.Cells, c), append(r.values, value)
}

// exhibitCell is a figure of a contender in a place.
func (s *Statistics) exhibitCell(t turns, f study.Figure) (c exhibitCell, value float64, ok bool) {
	e, ok := s.estimate(t, f.Name)
	if !ok {
		return exhibitCell{Value: s.missing(t)}, 0, false
	}
	c.Value = quantity(f.Unit, e.Value)
	if e.Direct != nil {
		c.Ratio = e.Direct.String()
	}
	return c, e.Value, true
}

// missing says why there is no figure.
func (s *Statistics) missing(t turns) string {
	if slices.ContainsFunc(s.rows[t], func(r study.Row) bool { return r.Failed != "" }) {
		return "failed"
	}
	return noFigure
}

// unsized has a column for each figure that can be better or worse.
func (s *Statistics) unsized(d study.Description, main study.Figure) exhibit {
	const most = 6
	e := exhibit{Title: main.Name, Note: noteOf(main)}
	figures := []study.Figure{main}
	for _, f := range d.Figures {
		cost := strings.HasPrefix(f.Name, "cpu.") || f.Name == "failed"
		if f.Name != main.Name && f.Better != "" && !cost && len(figures) < most {
			figures = append(figures, f)
		}
	}
	for _, f := range figures {
		e.Columns = append(e.Columns, f.Name)
	}
	g := group{Label: publishedLabel}
	for i, f := range figures {
		_, singles := publishedOf(d, f)
		for _, p := range singles {
			cells := slices.Repeat([]exhibitCell{{Value: noFigure}}, len(figures))
			cells[i].Value = quantity(p.Unit, p.Value)
			g.Rows = append(g.Rows, exhibitRow{
				Name: p.whose(), Class: class(p.contender()), Source: p.origin(), Cells: cells, values: []float64{p.Value},
			})
		}
	}
	e.Groups = append(e.Groups, g.orNone(len(figures)))
	for _, p := range s.places(d.Name) {
		b := block{place: p, figure: main, sizes: []int{0}}
		g := group{Label: s.label(p), Kernel: p.kernel}
		for _, c := range s.compared(b) {
			row := exhibitRow{Name: c.Name, Class: class(c), who: c}
			for _, f := range figures {
				row.add(s.exhibitCell(b.at(0, c), f))
			}
			g.Rows = append(g.Rows, row)
		}
		if len(g.Rows) > 0 {
			g.Picture = g.bars(main.Unit)
			e.Groups = append(e.Groups, g)
		}
	}
	return e
}

// beside compares userspace with iptables and IPVS, as was published when the modes of the kernel were new. Its charts
// are of bandwidth.
func (s *Statistics) beside() exhibit {
	e := exhibit{Title: "userspace beside iptables and IPVS", Note: "times that of direct access; charts: bandwidth"}
	b := s.scoreboard()
	var columns []int
	for i, c := range b.Columns {
		if c.Unit == "× direct" {
			columns, e.Columns = append(columns, i), append(e.Columns, c.Title)
		}
	}
	of := slices.IndexFunc(e.Columns, func(c string) bool { return c == "Bandwidth" })
	published := group{Label: publishedLabel}
	for _, p := range publishedSingles() {
		if p.Experiment != "bandwidth" {
			continue
		}
		row := exhibitRow{
			Name: p.whose(), Class: class(p.contender()), Source: p.origin(), values: []float64{p.Value},
		}
		for i := range columns {
			row.Cells = append(row.Cells, exhibitCell{Value: map[bool]string{true: times(p.Value), false: noFigure}[i == of]})
		}
		published.Rows = append(published.Rows, row)
	}
	published.Picture = published.bars(study.Share)
	e.Groups = append(e.Groups, published)
	for _, k := range b.Kernels {
		g := group{Label: k.Says, Kernel: k.Says}
		for _, r := range k.Rows {
			if !slices.Contains([]string{"userspace", "iptables", "ipvs"}, family(r.Plane)) {
				continue
			}
			row := exhibitRow{Name: r.Name, Class: class(r.Contender), values: []float64{none()}}
			for n, i := range columns {
				row.Cells = append(row.Cells, exhibitCell{Value: r.Cells[i].Text, Ratio: r.Cells[i].Bounds})
				if n == of && r.Cells[i].measured() {
					row.values[0] = r.Cells[i].value
				}
			}
			g.Rows = append(g.Rows, row)
		}
		if len(g.Rows) > 0 {
			g.Picture = g.bars(study.Share)
			e.Groups = append(e.Groups, g)
		}
	}
	return e
}

// noteOf says what a figure is.
func noteOf(f study.Figure) string {
	text := cmp.Or(f.Does, f.Name)
	if f.Better != "" {
		text += "; " + string(f.Better) + " is better"
	}
	return text
}

// short is the ratio, or the figure if there is none.
func (c exhibitCell) short() string { return cmp.Or(c.Ratio, c.Value) }

// table is an exhibit for Markdown and terminals: of some groups, and of some of the columns that have figures there.
func (e exhibit) table(groups func(group) bool, most int, cell func(exhibitCell) string) table {
	t := table{Title: e.Title, Note: e.Note, Head: []string{""}}
	var columns []int
	for i := range e.Columns {
		has := func(r exhibitRow) bool { return r.Cells[i].Value != noFigure }
		if slices.ContainsFunc(e.Groups, func(g group) bool { return groups(g) && slices.ContainsFunc(g.Rows, has) }) {
			columns = append(columns, i)
		}
	}
	columns = some(columns, most)
	for _, i := range columns {
		t.Head = append(t.Head, e.Columns[i])
	}
	for _, g := range e.Groups {
		if !groups(g) {
			continue
		}
		t.Rows = append(t.Rows, []string{g.Label})
		for _, r := range g.Rows {
			row := []string{strings.TrimSpace(r.Name + " " + r.Source)}
			for _, i := range columns {
				row = append(row, cell(r.Cells[i]))
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

// some are at most so many of all, the first and the last among them.
func some(all []int, most int) (kept []int) {
	n := len(all)
	for i := range min(n, most) {
		kept = append(kept, all[i*max(n-1, 1)/max(min(n, most)-1, 1)])
	}
	return kept
}
