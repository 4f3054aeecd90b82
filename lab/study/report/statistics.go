package report

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/bench"
	"fairlead.dev/fairlead/lab/study"
)

// place is where contenders are compared: the same kernel, Services and load.
type place struct {
	experiment, kernel, of string
	size                   int
}

// turns are those of a contender in a place.
type turns struct {
	place
	contender string
}

// at are a contender's turns at a size.
func (p place) at(size int, c study.Contender) turns {
	p.size = size
	return turns{p, c.Name}
}

// Statistics answers questions about a Result. It never compares figures of different kernels.
type Statistics struct {
	*study.Result
	rows map[turns][]study.Row
	// Results that were computed before.
	estimates map[asked]Estimate
	margins   map[asked]float64
}

// asked is what a figure is computed for.
type asked struct {
	turns
	figure string
}

// NewStatistics sorts the rows of a Result.
func NewStatistics(r *study.Result) *Statistics {
	s := &Statistics{
		Result: r, rows: map[turns][]study.Row{}, estimates: map[asked]Estimate{}, margins: map[asked]float64{},
	}
	for _, row := range r.Rows {
		t := turns{place{row.Experiment, row.Kernel, row.Case, row.Size}, row.Contender}
		s.rows[t] = append(s.rows[t], row)
	}
	return s
}

// values are a figure's in the rounds that have it.
func (s *Statistics) values(t turns, figure string) map[int]float64 {
	all := map[int]float64{}
	for _, row := range s.rows[t] {
		v, ok := row.Figures[figure]
		if ok && row.Failed == "" && !math.IsNaN(v) && !math.IsInf(v, 0) {
			all[row.Round] = v
		}
	}
	return all
}

// series are values in the order of their rounds.
func series(values map[int]float64) (all bench.Series) {
	for _, round := range slices.Sorted(maps.Keys(values)) {
		all = append(all, values[round])
	}
	return all
}

// Failures is how many turns of a contender failed in an experiment on a kernel, of how many, and why one did.
func (s *Statistics) Failures(experiment, kernel, contender string) (failed, of int, why string) {
	for t, rows := range s.rows {
		if t.experiment != experiment || t.kernel != kernel || t.contender != contender {
			continue
		}
		of += len(rows)
		for _, row := range rows {
			if row.Failed == "" {
				continue
			}
			failed++
			if why == "" || row.Failed < why {
				why = row.Failed
			}
		}
	}
	return failed, of, why
}

// Contender is the one of a name. Cells may have others than those of the Result, such as schedulers: what is not said
// of them is what their names begin with.
func (s *Statistics) Contender(name string) study.Contender {
	for _, c := range s.Contenders {
		if c.Name == name {
			return c
		}
	}
	best := study.Contender{Name: name, Kind: study.Fairlead, Plane: strings.Fields(name + " ?")[0]}
	length := 0
	for _, c := range s.Contenders {
		if strings.HasPrefix(name, c.Name) && len(c.Name) > length {
			length, best.Kind, best.Plane = len(c.Name), c.Kind, c.Plane
		}
	}
	return best
}

// contendersAt are those with rows in some places, those without a proxy first, the others by whose they are and by
// name.
func (s *Statistics) contendersAt(in func(place) bool) (all []study.Contender) {
	seen := map[string]bool{}
	for t := range s.rows {
		if in(t.place) && !seen[t.contender] {
			seen[t.contender] = true
			all = append(all, s.Contender(t.contender))
		}
	}
	slices.SortFunc(all, inOrder)
	return all
}

func inOrder(a, b study.Contender) int {
	return cmp.Or(cmp.Compare(rank(a.Kind), rank(b.Kind)), cmp.Compare(planeRank(a.Plane), planeRank(b.Plane)),
		cmp.Compare(a.Name, b.Name))
}

func rank(k study.Kind) int {
	return slices.Index([]study.Kind{study.Direct, study.Again, study.Fairlead, study.Peer}, k)
}

// planes are those that are known, in the order of tables and charts.
func planes() []string { return []string{"nftables", "ebpf", "iptables", "ipvs", "userspace"} }

// family is the plane of which one is a variant: iptables of iptables-legacy.
func family(plane string) string {
	name, _, _ := strings.Cut(plane, "-")
	return name
}

func planeRank(plane string) int {
	if i := slices.Index(planes(), family(plane)); i >= 0 {
		return i
	}
	return len(planes())
}

// kernels are those on which an experiment was made, in the order of the Result.
func (s *Statistics) kernels(experiment string) (all []string) {
	for t := range s.rows {
		if t.experiment == experiment && !slices.Contains(all, t.kernel) {
			all = append(all, t.kernel)
		}
	}
	at := func(name string) int {
		if i := slices.IndexFunc(s.Kernels, func(k study.Kernel) bool { return k.Name == name }); i >= 0 {
			return i
		}
		return len(s.Kernels)
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(at(a)-at(b), cmp.Compare(a, b)) })
	return all
}

// cases are those of an experiment on a kernel, in the order in which they were measured first.
func (s *Statistics) cases(experiment, kernel string) (all []string) {
	for _, row := range s.Rows {
		if row.Experiment == experiment && row.Kernel == kernel && !slices.Contains(all, row.Case) {
			all = append(all, row.Case)
		}
	}
	return all
}

// sizes are those of a case, ascending.
func (s *Statistics) sizes(experiment, kernel, of string) (all []int) {
	for t := range s.rows {
		if t.experiment == experiment && t.kernel == kernel && t.of == of && !slices.Contains(all, t.size) {
			all = append(all, t.size)
		}
	}
	slices.Sort(all)
	return all
}

// Experiment is the description of one; ok is false if the Result has none of that name.
func (s *Statistics) Experiment(name string) (d study.Description, ok bool) {
	i := slices.IndexFunc(s.Experiments, func(d study.Description) bool { return d.Name == name })
	if i < 0 {
		return d, false
	}
	return s.Experiments[i], true
}

// mainFigure is what an experiment's contenders are ranked by.
func mainFigure(d study.Description) (study.Figure, bool) {
	for _, f := range d.Figures {
		if f.Main {
			return f, true
		}
	}
	if len(d.Figures) == 0 {
		return study.Figure{}, false
	}
	return d.Figures[0], true
}

// control is the contender of a kind in a place.
func (s *Statistics) control(p place, kind study.Kind) (turns, bool) {
	for _, c := range s.Contenders {
		t := turns{p, c.Name}
		if c.Kind == kind && len(s.rows[t]) > 0 {
			return t, true
		}
	}
	return turns{}, false
}

// Estimate is what is known of a contender's figure in a place.
type Estimate struct {
	Rounds int
	Value  float64 // the median of the rounds
	// Direct compares with no proxy in the same rounds; nil: there was no such contender, or one of the figures is 0.
	Direct *Comparison
}

// estimate is of a figure; ok is false if no round has it.
func (s *Statistics) estimate(t turns, figure string) (Estimate, bool) {
	e := known(s.estimates, asked{t, figure}, func() Estimate { return s.newEstimate(t, figure) })
	return e, e.Rounds > 0
}

// known computes a value once.
func known[V any](all map[asked]V, of asked, compute func() V) V {
	v, ok := all[of]
	if !ok {
		v = compute()
		all[of] = v
	}
	return v
}

func (s *Statistics) newEstimate(t turns, figure string) (e Estimate) {
	values := series(s.values(t, figure))
	if len(values) == 0 {
		return e
	}
	e = Estimate{Rounds: len(values), Value: values.Median()}
	if direct, ok := s.control(t.place, study.Direct); ok && direct != t {
		if c, ok := s.compare(t, direct, figure); ok {
			e.Direct = &c
		}
	}
	return e
}

// compare compares two contenders: in the same rounds of a place, or, in different ones, relative to no proxy in each.
func (s *Statistics) compare(a, b turns, figure string) (Comparison, bool) {
	if a.place != b.place {
		return compareFar(far{s, a, figure}, far{s, b, figure})
	}
	x, y := paired(s.values(a, figure), s.values(b, figure))
	if !positive(x) || !positive(y) {
		return Comparison{}, false
	}
	sides := []side{{a, len(x)}, {b, len(x)}}
	return comparison(logRatios(x, y), s.margin(a.place, figure), sides...), true
}

// paired are the values of rounds that both have.
func paired(a, b map[int]float64) (x, y bench.Series) {
	for _, round := range slices.Sorted(maps.Keys(a)) {
		if other, ok := b[round]; ok {
			x, y = append(x, a[round]), append(y, other)
		}
	}
	return x, y
}

// positive reports whether there are values, and ratios of them.
func positive(all bench.Series) bool {
	return len(all) > 0 && slices.Min(all) > 0
}

// logRatios are the logarithms of ratios, as many as both have.
func logRatios(x, y bench.Series) (logs []float64) {
	for i := range min(len(x), len(y)) {
		logs = append(logs, math.Log(x[i]/y[i]))
	}
	return logs
}

// margin is the factor from which on a difference of a figure matters: what the figure's description says, or more
// where direct access differs by more from its copy.
func (s *Statistics) margin(p place, figure string) float64 {
	return known(s.margins, asked{turns{place: p}, figure}, func() float64 {
		d, _ := s.Experiment(p.experiment)
		m := study.Figure{}.Matters()
		if i := slices.IndexFunc(d.Figures, func(f study.Figure) bool { return f.Name == figure }); i >= 0 {
			m = d.Figures[i].Matters()
		}
		again, _ := s.control(p, study.Again)
		direct, _ := s.control(p, study.Direct)
		x, y := paired(s.values(again, figure), s.values(direct, figure))
		if !positive(x) || !positive(y) {
			return m
		}
		return widened(m, logRatios(x, y))
	})
}

// widened is a margin, or how much direct access differs from its copy if that is more. It has the logarithms of their
// ratios.
func widened(margin float64, logs []float64) float64 {
	if c := comparison(logs, margin); c.More() || c.Less() {
		return max(c.Median, 1/c.Median)
	}
	return margin
}

// far is one side of a comparison of different places, or different Results.
type far struct {
	s      *Statistics
	at     turns
	figure string
}

// relative are the figures relative to no proxy in the same rounds if there was none. Turns of that come second in of.
func (f far) relative() (all bench.Series, of []turns) {
	values := f.s.values(f.at, f.figure)
	if control, ok := f.s.control(f.at.place, study.Direct); ok && control != f.at {
		x, y := paired(values, f.s.values(control, f.figure))
		if positive(x) && positive(y) {
			for i := range x {
				all = append(all, x[i]/y[i])
			}
			return all, []turns{f.at, control}
		}
	}
	return series(values), []turns{f.at}
}

// plain are the figures as they are.
func (f far) plain() (bench.Series, []turns) {
	return series(f.s.values(f.at, f.figure)), []turns{f.at}
}

// compareFar compares what was not measured in the same rounds: the first round of one with the first of the other, and
// so on.
func compareFar(a, b far) (Comparison, bool) {
	x, ofX := a.relative()
	y, ofY := b.relative()
	if len(ofX) != len(ofY) {
		x, ofX = a.plain()
		y, ofY = b.plain()
	}
	if !positive(x) || !positive(y) {
		return Comparison{}, false
	}
	var sides []side
	for i := range ofX {
		sides = append(sides, side{ofX[i], len(x)}, side{ofY[i], len(y)})
	}
	margin := max(a.s.margin(a.at.place, a.figure), b.s.margin(b.at.place, b.figure))
	return comparison(logRatios(x, y), margin, sides...), true
}

// Growth is how a figure grows with the size.
type Growth struct {
	From, To int     // the smallest and the largest size
	Times    float64 // how many times as much the largest has
	// Exponent is the a in figure ~ size^a between these two, with its bounds.
	Exponent, Low, High float64

	ratio Comparison
}

// flat is the exponent up to which nothing grows.
const flat = 0.1

// Flat reports whether the figure is the same at each size, as far as is known.
func (g Growth) Flat() bool { return g.High <= flat }

// Grows reports whether the figure does.
func (g Growth) Grows() bool { return g.Low > flat }

// growth is that of a contender's figure in a case, relative to no proxy if there was none.
func (s *Statistics) growth(p place, contender, figure string) (g Growth, ok bool) {
	var at []turns
	for _, size := range s.sizes(p.experiment, p.kernel, p.of) {
		p.size = size
		if t := (turns{p, contender}); size > 0 && positive(series(s.values(t, figure))) {
			at = append(at, t)
		}
	}
	if len(at) < 2 {
		return g, false
	}
	first, last := at[0], at[len(at)-1]
	c, ok := s.compare(last, first, figure)
	return c.growth(first.size, last.size), ok
}

// growth turns the ratio of two sizes' figures into an exponent.
func (c Comparison) growth(from, to int) Growth {
	apart := math.Log(float64(to) / float64(from))
	return Growth{
		From: from, To: to, Times: c.Median, ratio: c,
		Exponent: math.Log(c.Median) / apart, Low: math.Log(c.Low) / apart, High: math.Log(c.High) / apart,
	}
}
