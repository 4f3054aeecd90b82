// Package bench compares speeds on a machine that is busy with other things. Variants run in short slices, one of each
// variant per round, in random order. A result is the median over all rounds of the ratio to a control in the same
// round. A disturbance of a whole round cancels out, and one of a slice is one ratio among many.
//
//	Interleave ─► Samples (by variant and round) ─► Series (a quantile of each round) ─► Ratio, Exponent
//
// The benchmarks themselves are this package's tests; docs/performance.md has their results.
package bench

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Variant is one of the things to compare.
type Variant struct {
	Name string
	// Slice does the thing some times in a row and returns what each time took.
	Slice func() ([]time.Duration, error)
}

// Samples are what the slices of each variant returned, by round, sorted.
type Samples map[string][][]time.Duration

// Interleave runs a slice of each variant in every round. Next says whether there is one more round.
func Interleave(variants []Variant, next func() bool) (Samples, error) {
	all := Samples{}
	for next() {
		rand.Shuffle(len(variants), func(i, j int) { variants[i], variants[j] = variants[j], variants[i] })
		for _, v := range variants {
			took, err := v.Slice()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", v.Name, err)
			}
			slices.Sort(took)
			all[v.Name] = append(all[v.Name], took)
		}
	}
	return all, nil
}

// Series is one figure of each round, in seconds.
type Series []float64

// Series is a quantile of each round's samples of a variant: 0.5 is the median.
func (s Samples) Series(variant string, quantile float64) Series {
	var series Series
	for _, took := range s[variant] {
		series = append(series, took[int(quantile*float64(len(took)-1))].Seconds())
	}
	return series
}

// All are the samples of a variant in all rounds, sorted, in seconds.
func (s Samples) All(variant string) Series {
	var series Series
	for _, took := range slices.Concat(s[variant]...) {
		series = append(series, took.Seconds())
	}
	slices.Sort(series)
	return series
}

// Duration is the median of a series.
func (s Series) Duration() time.Duration { return time.Duration(s.Median() * 1e9) }

// Median is the value in the middle.
func (s Series) Median() float64 {
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Ratio is how many times as long as its control something takes, with the bounds between which that
// lies with a probability of 95 %.
type Ratio struct{ Median, Low, High float64 }

func (r Ratio) String() string { return fmt.Sprintf("%.2f (%.2f–%.2f)", r.Median, r.Low, r.High) }

// Ratio compares two series of the same rounds. The bounds come from a bootstrap, which is always the same.
func (s Series) Ratio(control Series) Ratio {
	const draws = 2000
	ratios, drawn, medians := make(Series, len(s)), make(Series, len(s)), make(Series, draws)
	for i := range s {
		ratios[i] = s[i] / control[i]
	}
	random := rand.New(rand.NewPCG(1, 1))
	for i := range medians {
		for j := range drawn {
			drawn[j] = ratios[random.IntN(len(ratios))]
		}
		medians[i] = drawn.Median()
	}
	slices.Sort(medians)
	return Ratio{ratios.Median(), medians[draws*25/1000], medians[draws*975/1000]}
}

// Exponent is the a in y ~ x^a that fits the points best: the slope of log(y) over log(x). It is 0 for
// what takes the same time at every size, and 1 for what takes time in proportion.
func Exponent(x, y []float64) float64 {
	var mx, my, xx, xy float64
	for i := range x {
		mx += math.Log(x[i]) / float64(len(x))
		my += math.Log(y[i]) / float64(len(x))
	}
	for i := range x {
		dx := math.Log(x[i]) - mx
		xx += dx * dx
		xy += dx * (math.Log(y[i]) - my)
	}
	return xy / xx
}
