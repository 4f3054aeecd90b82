package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// aspect is a column of the scoreboard: something that matters to who chooses a data plane.
type aspect struct {
	Title, Does string
	// sources are where it is measured; the first one that a kernel has figures of is taken.
	sources []source
	// all is that the worst of all cases counts, and of a change of the data plane the worst of all that begin with it.
	all bool
}

// source is a figure of an experiment; the case has these words, and an empty figure is the main one.
type source struct{ experiment, of, figure string }

func aspects() []aspect {
	return []aspect{
		{"New connection", "time of connect(2) to the last Service", []source{
			{"lookup", "last", ""}, {"connect", "", ""}}, false},
		{"Open connection", "time of a request on a connection that is kept", []source{{"http", "kept", ""}}, false},
		{"Bandwidth", "bulk data through the last Service", []source{{"bandwidth", "last", ""}}, false},
		{"Follows a change", "from a changed EndpointSlice to the first connection to the new endpoint", []source{
			{"update", "", ""}}, false},
		{"CPU", "of one processor, at the highest rate of changes; else until all Services answer", []source{
			{"jitter", "", "proxy"}, {"footprint", "", "cpu"}}, false},
		{"Memory", "of the process", []source{{"footprint", "", "memory"}}, false},
		{"Lost in a rollout", "connections, in the worst case", []source{{"rolling", "", ""}}, true},
		{"Lost in a switch", "connections, in the worst change from this mode to another one", []source{
			{"switch", "", ""}}, true},
	}
}

// reference is the size that the scoreboard is about: the most Services with which Kubernetes is tested.
const reference = 10_000

// board has what matters of each mode, on one kernel after the other.
type board struct {
	Columns []boardColumn
	Kernels []boardKernel
}

// Span is how many columns a heading crosses.
func (b board) Span() int { return len(b.Columns) + 1 }

type boardColumn struct{ Title, Does, Unit string }

// boardKernel are the modes on a kernel; Says what the kernel is and at which sizes was measured.
type boardKernel struct {
	Name, Says string
	Rows       []boardRow
}

type boardRow struct {
	study.Contender
	Cells []score
}

// Program is the name of a peer, with a space.
func (r boardRow) Program() string {
	return strings.TrimSuffix(strings.TrimSuffix(r.Name, r.Plane), " ") + " "
}

// score is a cell. Mark is best, worst or empty.
type score struct {
	Text, Bounds, Mark string

	value, low, high float64
	relative         bool
	place            place
	figure           study.Figure
}

// String is the cell without marks by colour.
func (c score) String() string {
	text := c.Text
	if c.Bounds != "" {
		text += " (" + c.Bounds + ")"
	}
	return text + c.sign()
}

// short is the cell without bounds.
func (c score) short() string { return c.Text + c.sign() }

func (c score) sign() string { return map[string]string{"best": " ▲", "worst": " ▼"}[c.Mark] }

// measured reports whether there is a figure.
func (c score) measured() bool { return c.figure.Name != "" }

// scoreboard is what was measured of what matters. Columns without any figure are left out.
func (s *Statistics) scoreboard() (b board) {
	b.Kernels = make([]boardKernel, len(s.Kernels))
	for i, k := range s.Kernels {
		for _, c := range s.Contenders {
			if c.Kind == study.Fairlead || c.Kind == study.Peer {
				b.Kernels[i].Rows = append(b.Kernels[i].Rows, boardRow{Contender: c})
			}
		}
		b.Kernels[i].Name = k.Name
	}
	for _, a := range aspects() {
		b.column(s, a)
	}
	for i := range b.Kernels {
		k := &b.Kernels[i]
		k.Rows = slices.DeleteFunc(k.Rows, func(r boardRow) bool { return !slices.ContainsFunc(r.Cells, score.measured) })
		slices.SortStableFunc(k.Rows, func(x, y boardRow) int {
			return cmp.Or(cmp.Compare(rank(x.Kind), rank(y.Kind)), cmp.Compare(planeRank(x.Plane), planeRank(y.Plane)))
		})
		k.Says = s.boardPlace(s.Kernels[i], k.Rows)
	}
	b.Kernels = slices.DeleteFunc(b.Kernels, func(k boardKernel) bool { return len(k.Rows) == 0 })
	return b
}

// column adds one, if any kernel has it.
func (b *board) column(s *Statistics, a aspect) {
	cells := make([][]score, len(b.Kernels))
	var all []score
	for i, k := range b.Kernels {
		cells[i] = s.scores(a, k.Name, k.Rows)
		all = append(all, cells[i]...)
	}
	first := slices.IndexFunc(all, score.measured)
	if first < 0 {
		return
	}
	unit, write := scoreUnit(all, all[first])
	b.Columns = append(b.Columns, boardColumn{a.Title, a.Does, unit})
	for i := range b.Kernels {
		for j, c := range cells[i] {
			if c.relative != all[first].relative {
				c = score{Text: noFigure} // the other cells are relative to direct access
			}
			c.write(write)
			b.Kernels[i].Rows[j].Cells = append(b.Kernels[i].Rows[j].Cells, c)
		}
	}
}

// scores are the cells of an aspect on a kernel, with the best and the worst marked.
func (s *Statistics) scores(a aspect, kernel string, rows []boardRow) []score {
	cells := make([]score, len(rows))
	for _, from := range a.sources {
		for _, of := range s.boardCases(a, from, kernel) {
			for i, r := range rows {
				for _, t := range s.boardTurns(a, of, r.Contender) {
					if c, ok := s.score(t, from.figure); ok && (!cells[i].measured() || cells[i].before(c)) {
						cells[i] = c
					}
				}
				if cells[i].Text == "" && !cells[i].measured() {
					cells[i].Text = s.missing(turns{of, r.Name})
				}
			}
		}
		if slices.ContainsFunc(cells, score.measured) {
			mark(cells)
			return cells
		}
	}
	return cells
}

// boardCases are the places that count: the first case with the words of a source, or all. Of each it is the size that
// most have figures of, and of these the one that is nearest to the reference.
func (s *Statistics) boardCases(a aspect, from source, kernel string) (all []place) {
	for _, of := range s.cases(from.experiment, kernel) {
		if from.of != "" && !has(of, from.of) {
			continue
		}
		p := place{experiment: from.experiment, kernel: kernel, of: of}
		most := -1
		for _, n := range s.sizes(p.experiment, p.kernel, of) {
			at, here := p, 0
			at.size = n
			for _, c := range s.contendersAt(func(o place) bool { return o == at }) {
				_, ok := s.score(turns{at, c.Name}, from.figure)
				here += one(ok)
			}
			if here > most || here == most && apart(n, reference) <= apart(p.size, reference) {
				p.size, most = n, here
			}
		}
		all = append(all, p)
		if !a.all {
			break
		}
	}
	return all
}

// boardTurns are those of a mode: its own, or those of changes from it.
func (s *Statistics) boardTurns(a aspect, p place, c study.Contender) (all []turns) {
	all = append(all, turns{p, c.Name})
	if a.all {
		for _, o := range s.contendersAt(func(at place) bool { return at == p }) {
			if strings.HasPrefix(o.Name, c.Name+" → ") {
				all = append(all, turns{p, o.Name})
			}
		}
	}
	return all
}

// score is a figure with its bounds, as times that of direct access if there was such.
func (s *Statistics) score(t turns, figure string) (c score, ok bool) {
	d, _ := s.Experiment(t.experiment)
	f, _ := mainFigure(d)
	if i := slices.IndexFunc(d.Figures, func(o study.Figure) bool { return o.Name == figure }); i >= 0 {
		f = d.Figures[i]
	} else if figure != "" {
		return c, false
	}
	e, ok := s.estimate(t, f.Name)
	if !ok {
		return c, false
	}
	c = score{value: e.Value, place: t.place, figure: f}
	c.low, c.high = interval(slices.Sorted(maps.Values(s.values(t, f.Name))))
	if e.Direct != nil {
		c.value, c.low, c.high, c.relative = e.Direct.Median, e.Direct.Low, e.Direct.High, true
	}
	return c, true
}

// before reports whether a score is better than another one.
func (c score) before(o score) bool {
	if c.figure.Better == study.Higher {
		return c.value > o.value
	}
	return c.value < o.value
}

// near reports whether the bounds of two overlap.
func (c score) near(o score) bool { return c.low <= o.high && o.low <= c.high }

// certain are the values that a score surely reaches, and that it surely does not exceed, the smaller the better.
func (c score) certain() (best, worst float64) {
	if c.figure.Better == study.Higher {
		return -c.high, -c.low
	}
	return c.low, c.high
}

// mark marks what is surely best and worst. The best one has the best of the worse bounds. All that overlap with it but
// not with the worst one are marked alike. Where one was measured too seldom for bounds, nothing is sure.
func mark(cells []score) {
	if slices.ContainsFunc(cells, func(c score) bool { return c.measured() && math.IsInf(c.high, 0) }) {
		return
	}
	top, last := -1, -1
	for i, c := range cells {
		if !c.measured() {
			continue
		}
		low, high := c.certain()
		if _, best := cells[max(top, 0)].certain(); top < 0 || high < best {
			top = i
		}
		if worst, _ := cells[max(last, 0)].certain(); last < 0 || low > worst {
			last = i
		}
	}
	if top < 0 || cells[top].near(cells[last]) {
		return
	}
	best, worst := cells[top], cells[last]
	for i, c := range cells {
		switch {
		case !c.measured() || c.near(best) && c.near(worst):
		case c.near(best):
			cells[i].Mark = "best"
		case c.near(worst):
			cells[i].Mark = "worst"
		}
	}
}

// scoreUnit is the unit of a column, and how its numbers are written.
func scoreUnit(all []score, one score) (unit string, write func(float64) string) {
	if one.relative {
		return "× direct", times
	}
	low, high := math.Inf(1), 0.0
	for _, c := range all {
		if c.measured() && c.value > 0 {
			low, high = min(low, c.value), max(high, c.value)
		}
	}
	best := unitScale(one.figure.Unit, math.Sqrt(low*high))
	return strings.TrimSpace(best.name), func(v float64) string { return brevity(v * best.times) }
}

// brevity writes two digits, or whole numbers.
func brevity(v float64) string {
	if v >= 10 || v == math.Trunc(v) {
		return study.Number(int(math.Round(v)))
	}
	return fmt.Sprintf("%.2g", v)
}

// write makes the texts of a cell.
func (c *score) write(number func(float64) string) {
	if !c.measured() {
		return
	}
	c.Text = number(c.value)
	telling := c.high <= tellable*c.low || c.low == 0 && !math.IsInf(c.high, 0)
	if low, high := number(c.low), number(c.high); telling && low != high {
		c.Bounds = low + "–" + high
	}
}

// boardPlace says what a kernel is, and the sizes of what was measured there.
func (s *Statistics) boardPlace(k study.Kernel, rows []boardRow) string {
	var sizes []string
	for _, r := range rows {
		for _, c := range r.Cells {
			d, _ := s.Experiment(c.place.experiment)
			if at := counted(c.place.size, d.Axis); c.place.size > 0 && !slices.Contains(sizes, at) {
				sizes = append(sizes, at)
			}
		}
	}
	text := k.Name
	if k.Release != "" {
		text += ", Linux " + k.Release
	}
	if k.CPUs > 0 {
		text += ", " + counted(k.CPUs, "CPUs")
	}
	if len(sizes) > 0 {
		text += ": at " + listed(sizes)
	}
	return text
}

// table is the scoreboard of all kernels. Heads are broken where a terminal breaks them.
func (b board) table(cell func(score) string) (t table) {
	t.Head = []string{""}
	for _, c := range b.Columns {
		head := c.Title
		if i := strings.LastIndex(head, " "); i > 0 {
			head = head[:i] + "\n" + head[i+1:]
		}
		if c.Unit != "" {
			head += ",\n" + c.Unit
		}
		t.Head = append(t.Head, head)
	}
	for _, k := range b.Kernels {
		if len(b.Kernels) > 1 {
			t.Rows = append(t.Rows, []string{k.Says})
		}
		for _, r := range k.Rows {
			row := []string{r.Name}
			for _, c := range r.Cells {
				row = append(row, cell(c))
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}
