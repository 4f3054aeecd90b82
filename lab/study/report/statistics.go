package report

import (
	"cmp"
	"maps"
	"math"
	"math/rand/v2"
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
	// Results that were computed before, as bounds take time.
	estimates map[asked]Estimate
	spreads   map[asked]float64
}

// asked is what a figure is computed for.
type asked struct {
	turns
	figure string
}

// NewStatistics sorts the rows of a Result.
func NewStatistics(r *study.Result) *Statistics {
	s := &Statistics{
		Result: r, rows: map[turns][]study.Row{}, estimates: map[asked]Estimate{}, spreads: map[asked]float64{},
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
	slices.SortFunc(all, func(a, b study.Contender) int {
		return cmp.Or(cmp.Compare(rank(a.Kind), rank(b.Kind)), cmp.Compare(planeRank(a.Plane), planeRank(b.Plane)),
			cmp.Compare(a.Name, b.Name))
	})
	return all
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

// Comparison is how many times as much of a figure one contender has as another.
type Comparison struct {
	bench.Ratio
	Rounds int
	// Spread is the factor within which chance is: what the A/A control differs by. 1: there was no such control.
	Spread float64
}

// Seen reports whether the two differ by more than chance: 1 is not within the bounds, and the median is not within the
// spread of the control.
func (c Comparison) Seen() bool {
	return (c.Low > 1 || c.High < 1) && math.Abs(math.Log(c.Median)) > math.Log(c.Spread)
}

// loose is the width of bounds from which on they say too little to call two contenders alike.
const loose = 1.5

// Alike reports whether no difference is seen, and the bounds leave no room for a large one.
func (c Comparison) Alike() bool { return !c.Seen() && c.High < loose && c.Low > 1/loose }

// Vague reports whether nothing can be said: neither a difference is seen, nor that there is none.
func (c Comparison) Vague() bool { return !c.Seen() && !c.Alike() }

// More and Less are differences that are seen.
func (c Comparison) More() bool { return c.Seen() && c.Median > 1 }

// Less is the other one.
func (c Comparison) Less() bool { return c.Seen() && c.Median < 1 }

// compare compares two contenders: in the same rounds of a place, or, in different ones, relative to no proxy in each.
func (s *Statistics) compare(a, b turns, figure string) (Comparison, bool) {
	if a.place != b.place {
		return compareFar(far{s, a, figure}, far{s, b, figure})
	}
	x, y := paired(s.values(a, figure), s.values(b, figure))
	if !positive(x) || !positive(y) {
		return Comparison{}, false
	}
	return Comparison{Ratio: ratio(x, y), Rounds: len(x), Spread: s.spread(a.place, figure)}, true
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

// spread is the factor by which the direct control and its copy differ, at most.
func (s *Statistics) spread(p place, figure string) float64 {
	return known(s.spreads, asked{turns{place: p}, figure}, func() float64 { return s.newSpread(p, figure) })
}

func (s *Statistics) newSpread(p place, figure string) float64 {
	again, _ := s.control(p, study.Again)
	direct, _ := s.control(p, study.Direct)
	x, y := paired(s.values(again, figure), s.values(direct, figure))
	if !positive(x) || !positive(y) {
		return 1
	}
	r := ratio(x, y)
	return max(1, r.High, 1/max(r.Low, math.SmallestNonzeroFloat64))
}

// few are rounds of which a bootstrap says too little: five values drawn of five hardly vary as much as five others
// would.
const few = 6

// draws are those of a bootstrap.
const draws = 1000

// margin is that of 95 % on either side of what a few rounds say, of the square of its standard error: Student's.
func margin(rounds int, squaredError float64) float64 {
	if rounds < 2 {
		return math.Inf(1)
	}
	return []float64{12.706, 4.303, 3.182, 2.776}[min(rounds, few-1)-2] * math.Sqrt(squaredError)
}

// within returns the ratio and its bounds, given the margin of its logarithm.
func within(middle, margin float64) bench.Ratio {
	return bench.Ratio{Median: middle, Low: middle / math.Exp(margin), High: middle * math.Exp(margin)}
}

// ratio compares series of the same rounds. The bounds of few rounds are Student's, of the logarithms.
func ratio(x, y bench.Series) bench.Ratio {
	if len(x) >= few {
		return x.Ratio(y)
	}
	ratios := make(bench.Series, len(x))
	for i := range x {
		ratios[i] = x[i] / y[i]
	}
	return within(math.Exp(logs(ratios).Median()), margin(len(x), squaredError(ratios)))
}

// squaredError is the square of the standard error of the mean of logarithms.
func squaredError(all bench.Series) float64 {
	_, squares := spreadOf(logs(all))
	n := float64(len(all))
	return squares / max(n-1, 1) / n
}

// spreadOf is the mean of values, and the sum of the squares of how far they are from it.
func spreadOf(all bench.Series) (mean, squares float64) {
	for _, v := range all {
		mean += v / float64(len(all))
	}
	for _, v := range all {
		squares += (v - mean) * (v - mean)
	}
	return mean, squares
}

// far is one side of a comparison of different places, or different Results.
type far struct {
	s      *Statistics
	at     turns
	figure string
}

// relative are the figures relative to no proxy in the same rounds if there was none, which says direct.
func (f far) relative() (all bench.Series, direct bool) {
	values := f.s.values(f.at, f.figure)
	if control, ok := f.s.control(f.at.place, study.Direct); ok && control != f.at {
		x, y := paired(values, f.s.values(control, f.figure))
		if positive(x) && positive(y) {
			for i := range x {
				all = append(all, x[i]/y[i])
			}
			return all, true
		}
	}
	return series(values), false
}

// compareFar compares what was not measured in the same rounds.
func compareFar(a, b far) (Comparison, bool) {
	x, relative := a.relative()
	y, too := b.relative()
	if relative != too {
		x, y = series(a.s.values(a.at, a.figure)), series(b.s.values(b.at, b.figure))
	}
	if !positive(x) || !positive(y) {
		return Comparison{}, false
	}
	return Comparison{
		Ratio: independent(x, y), Rounds: min(len(x), len(y)),
		Spread: max(a.s.spread(a.at.place, a.figure), b.s.spread(b.at.place, b.figure)),
	}, true
}

// independent is the ratio of the medians of two series, whose bounds come from drawing rounds of both.
func independent(x, y bench.Series) bench.Ratio {
	middle := x.Median() / y.Median()
	n := min(len(x), len(y))
	if n < few {
		return within(middle, margin(n, squaredError(x)+squaredError(y)))
	}
	low, high := bench.Bootstrap(draws, func(random *rand.Rand) float64 {
		return x.Draw(random).Median() / y.Draw(random).Median()
	})
	return bench.Ratio{Median: middle, Low: low, High: high}
}

func logs(all bench.Series) bench.Series {
	out := make(bench.Series, len(all))
	for i, v := range all {
		out[i] = math.Log(v)
	}
	return out
}

// Growth is how a figure grows with the size.
type Growth struct {
	From, To int     // the smallest and the largest size
	Times    float64 // how many times as much the largest has
	// Exponent is the a in figure ~ size^a, with its bounds of 95 %.
	Exponent, Low, High float64
}

// flat is the exponent up to which nothing grows.
const flat = 0.1

// Flat reports whether the figure is the same at each size, as far as is known.
func (g Growth) Flat() bool { return g.High <= flat }

// Grows reports whether the figure does.
func (g Growth) Grows() bool { return g.Low > flat }

// growth is that of a contender's figure in a case, relative to no proxy if there was none.
func (s *Statistics) growth(p place, contender, figure string) (g Growth, ok bool) {
	var at []float64
	var all, plain []bench.Series
	relative := true
	for _, size := range s.sizes(p.experiment, p.kernel, p.of) {
		p.size = size
		values, direct := far{s, turns{p, contender}, figure}.relative()
		if size <= 0 || !positive(values) {
			continue
		}
		at, all, relative = append(at, float64(size)), append(all, values), relative && direct
		plain = append(plain, series(s.values(turns{p, contender}, figure)))
	}
	if len(at) < 2 {
		return g, false
	}
	if !relative {
		all = plain
	}
	middle := medians(all, nil)
	g = Growth{From: int(at[0]), To: int(at[len(at)-1]), Times: middle[len(at)-1] / middle[0]}
	if at[len(at)-1] > at[0] {
		g.Exponent = bench.Exponent(at, middle)
		g.Low, g.High = exponents(at, all, g.Exponent)
	}
	return g, true
}

// exponents are the bounds of one. Those of few rounds are Student's: the slope is a weighted sum of the logarithms at
// each size, which vary by themselves.
func exponents(at []float64, all []bench.Series, middle float64) (low, high float64) {
	rounds := len(slices.MinFunc(all, func(a, b bench.Series) int { return cmp.Compare(len(a), len(b)) }))
	if rounds >= few {
		return bench.Bootstrap(draws, func(r *rand.Rand) float64 { return bench.Exponent(at, medians(all, r)) })
	}
	sizes := logs(at)
	mean, squares := spreadOf(sizes)
	variance := 0.0
	for i, x := range sizes {
		variance += (x - mean) * (x - mean) * squaredError(all[i])
	}
	half := margin(rounds, variance) / squares
	return middle - half, middle + half
}

// medians are those of each series, or of what is drawn of it.
func medians(all []bench.Series, random *rand.Rand) (out []float64) {
	for _, one := range all {
		if random != nil {
			one = one.Draw(random)
		}
		out = append(out, one.Median())
	}
	return out
}
