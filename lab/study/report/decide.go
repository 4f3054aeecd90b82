package report

import (
	"fmt"
	"math"
	"slices"

	"fairlead.dev/fairlead/lab/bench"
	"fairlead.dev/fairlead/lab/study"
)

// doubt is the probability with which the bounds of a comparison ever miss the true ratio while rounds are added.
const doubt = 0.05

// misses reports whether, of n rounds, so few lie on one side of a value that it is not the median.
//
// A round is like a coin: it lies below the true median with a probability of 1/2, whatever its noise is. A gambler who
// bets on an unfair coin divides the stake evenly over all biases. After k of n rounds lay on one side, there is
// 2^n / ((n+1) · C(n,k)) times the stake.
//
// With a fair coin, that ever exceeds 1/doubt with a probability below doubt (Ville's inequality). So it rules a value
// out, and one may look after each round and stop at will. See H. Robbins, Statistical methods related to the law of
// the iterated logarithm (1970), or S. Howard and A. Ramdas, Sequential estimation of quantiles (Bernoulli, 2022).
func misses(n, k int) bool {
	all, _ := math.Lgamma(float64(n + 1))
	in, _ := math.Lgamma(float64(k + 1))
	out, _ := math.Lgamma(float64(n - k + 1))
	return float64(n)*math.Ln2-math.Log(float64(n+1))-(all-in-out) > math.Log(1/doubt)
}

// outside is how many of n rounds lie beyond a bound of the median; -1: there are too few rounds for bounds.
func outside(n int) int {
	low, high := -1, n/2 // misses is true up to low, and false at high
	for high-low > 1 {
		if k := (low + high) / 2; misses(n, k) {
			low = k
		} else {
			high = k
		}
	}
	return low
}

// interval are the bounds of the median of sorted values.
func interval(sorted []float64) (low, high float64) {
	n := len(sorted)
	k := outside(n)
	if k < 0 {
		return math.Inf(-1), math.Inf(1)
	}
	return sorted[k], sorted[n-1-k]
}

// Comparison is how many times as much of a figure one contender has as another: the median of rounds in which both had
// a turn.
type Comparison struct {
	bench.Ratio
	Rounds int
	// Margin is the factor from which on a difference matters.
	Margin float64

	logs []float64 // the logarithms of the ratios, sorted
	of   []side
}

// side are turns that a comparison is made of, and how many rounds it has of them.
type side struct {
	turns
	rounds int
}

// comparison is that of the logarithms of ratios.
func comparison(logs []float64, margin float64, of ...side) Comparison {
	slices.Sort(logs)
	low, high := interval(logs)
	return Comparison{
		Ratio:  bench.Ratio{Median: math.Exp(bench.Series(logs).Median()), Low: math.Exp(low), High: math.Exp(high)},
		Rounds: len(logs), Margin: margin, logs: logs, of: of,
	}
}

// More and Less are differences that are decided: 1 is not within the bounds, and the median is beyond the margin.
func (c Comparison) More() bool { return c.Low > 1 && c.Median > c.Margin }

// Less is the other one.
func (c Comparison) Less() bool { return c.High < 1 && c.Median < 1/c.Margin }

// Alike reports whether there is no difference that matters: the bounds lie within the margin.
func (c Comparison) Alike() bool { return c.High < c.Margin && c.Low > 1/c.Margin }

// Vague reports whether nothing is decided yet.
func (c Comparison) Vague() bool { return !c.More() && !c.Less() && !c.Alike() }

// asPublished is the comparison with the margin of published conclusions, or a larger one.
func (c Comparison) asPublished() Comparison {
	c.Margin = max(c.Margin, alike)
	return c
}

// inverse is the comparison the other way around.
func (c Comparison) inverse() Comparison {
	c.Median, c.Low, c.High = 1/c.Median, 1/c.High, 1/c.Low
	c.logs = slices.Clone(c.logs)
	for i := range c.logs {
		c.logs[i] = -c.logs[i]
	}
	slices.Reverse(c.logs)
	return c
}

// endless is the number of rounds that is too large to wait for.
const endless = 20_000

// more is about how many more rounds are needed until something is decided, if they are spread like these.
func (c Comparison) more(decided func(Comparison) bool) int {
	have := len(c.logs)
	if have == 0 {
		return study.FirstRounds
	}
	for n := max(have+1, study.FirstRounds); n < endless; n += 1 + n/10 {
		share := float64(outside(n)) / float64(n-1)
		later := c
		later.Low, later.High = math.Exp(quantile(c.logs, share)), math.Exp(quantile(c.logs, 1-share))
		if decided(later) {
			return n - have
		}
	}
	return endless
}

// quantile of sorted values, between two of them if need be.
func quantile(sorted []float64, share float64) float64 {
	at := share * float64(len(sorted)-1)
	i := min(int(at), len(sorted)-1)
	next := sorted[min(i+1, len(sorted)-1)]
	if next == sorted[i] { // both may be infinite
		return next
	}
	return sorted[i] + (at-float64(i))*(next-sorted[i])
}

// question is a comparison that is not decided, and what would be an answer.
type question struct {
	Comparison
	decided func(Comparison) bool
}

// settled is what decides a comparison of which nothing else was published.
func settled(c Comparison) bool { return !c.Vague() }

// needs are the turns that would decide it.
func (q question) needs() study.Needs {
	all, rounds := study.Needs{}, len(q.logs)+q.more(q.decided)
	for _, of := range q.of {
		all.Add(of.key(), study.Need{Rounds: rounds - of.rounds})
	}
	return all
}

func (t turns) key() study.Turns {
	return study.Turns{Experiment: t.experiment, Kernel: t.kernel, Case: t.of, Size: t.size, Contender: t.contender}
}

// remedy says what would decide questions.
func (s *Statistics) remedy(all []question) string {
	rounds, seconds := 0, 0.0
	needs := study.Needs{}
	for _, q := range all {
		for t, n := range q.needs() {
			needs.Add(t, n)
		}
	}
	for t, n := range needs {
		rounds = max(rounds, n.Rounds)
		at := s.rows[turns{place{t.Experiment, t.Kernel, t.Case, t.Size}, t.Contender}]
		for _, row := range at {
			seconds += float64(n.Rounds) * row.Took / float64(len(at))
		}
	}
	if rounds >= endless {
		return fmt.Sprintf("more than %s rounds would decide it", study.Number(endless))
	}
	return fmt.Sprintf("%s (%s) would decide it", counted(rounds, "more rounds"), quantity(study.Seconds, seconds))
}

// seldom is how many rounds there are of figures that cannot be compared: of failures, or counts that may be 0.
const seldom = 3

// Needs are the turns that would decide what is undecided of published conclusions, and of main figures. Each contender
// is beside direct access there, or where there is none, beside the first contender.
func Needs(r *study.Result) study.Needs {
	s, needs := NewStatistics(r), study.Needs{}
	for _, v := range s.Verdicts() {
		for _, q := range v.open {
			for t, n := range q.needs() {
				needs.Add(t, study.Need{Rounds: n.Rounds, Published: true})
			}
		}
	}
	contenders := map[place][]study.Contender{}
	for t := range s.rows {
		contenders[t.place] = append(contenders[t.place], s.Contender(t.contender))
	}
	for p, all := range contenders {
		d, _ := s.Experiment(p.experiment)
		f, _ := mainFigure(d)
		base, direct := s.control(p, study.Direct)
		if !direct {
			base = p.at(p.size, slices.MinFunc(all, inOrder))
		}
		for _, c := range all {
			s.ask(p.at(p.size, c), base, f.Name, needs)
		}
	}
	return needs
}

// ask adds what would decide how turns differ from others.
func (s *Statistics) ask(t, base turns, figure string, needs study.Needs) {
	c, ok := s.compare(t, base, figure)
	switch {
	case !ok:
		n := study.Need{Rounds: seldom - len(s.rows[t])}
		needs.Add(t.key(), n)
		needs.Add(base.key(), n)
	case t != base && c.Vague():
		q := question{c, settled}
		for of, n := range q.needs() {
			needs.Add(of, n)
		}
	}
}
