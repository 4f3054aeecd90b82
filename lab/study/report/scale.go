package report

import (
	"math"
	"slices"

	"fairlead.dev/fairlead/lab/study"
)

// axis maps values to pixels.
type axis struct {
	low, high float64 // of what is shown
	from, to  float64 // pixels
	log       bool
	bytes     bool
}

// at is where a value is.
func (a axis) at(v float64) float64 {
	if a.log {
		v, a.low, a.high = math.Log(v), math.Log(a.low), math.Log(a.high)
	}
	if a.high == a.low {
		return (a.from + a.to) / 2
	}
	return a.from + (v-a.low)/(a.high-a.low)*(a.to-a.from)
}

// newAxis shows values. It begins at 0, or is logarithmic if they are far apart.
func newAxis(domain []float64, unit study.Unit, from, to float64) axis {
	a := axis{low: slices.Min(domain), high: slices.Max(domain), from: from, to: to, bytes: unit == study.Bytes}
	if a.log = a.low > 0 && a.high > 8*a.low; a.log {
		margin := math.Pow(a.high/a.low, 0.05)
		a.low, a.high = a.low/margin, a.high*margin
		return a
	}
	a.low = min(0, a.low)
	if a.high = a.high * 1.06; a.high == 0 {
		a.high = 1
	}
	return a
}

// ticks are round values, some five of them. Those of a logarithmic axis are 1, 2 and 5 times powers of ten, or only
// these if there are many; of small ranges they are as linear ones.
func (a axis) ticks() (all []float64) {
	decades := math.Log10(a.high / a.low)
	if !a.log || decades < 0.7 {
		step := a.step()
		for v := math.Ceil(a.low/step) * step; v <= a.high*1.0001; v += step {
			all = append(all, math.Round(v/step)*step)
		}
		return all
	}
	of := []float64{1, 2, 5}
	if decades > 2 {
		of = of[:1]
	}
	for e := math.Floor(math.Log10(a.low)); e <= math.Log10(a.high); e++ {
		for _, m := range of {
			if v := m * math.Pow(10, e); v >= a.low && v <= a.high && (decades <= 7 || int(e)%3 == 0) {
				all = append(all, v)
			}
		}
	}
	return all
}

// step is a round distance of ticks; bytes are round in powers of 1024.
func (a axis) step() float64 {
	about := (a.high - a.low) / 5
	if !a.bytes || about < 1024 {
		return niceStep(about)
	}
	unit := math.Pow(1024, math.Floor(math.Log2(about)/10))
	return niceStep(about/unit) * unit
}

// niceStep is 1, 2 or 5 times a power of ten.
func niceStep(about float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(about)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= about {
			return m * power
		}
	}
	return 10 * power
}

// brief writes sizes of an axis.
func brief(n int) string {
	switch {
	case n >= 1_000_000 && n%100_000 == 0:
		return digits(float64(n)/1e6) + "M"
	case n >= 10_000 && n%100 == 0:
		return digits(float64(n)/1e3) + "k"
	}
	return study.Number(n)
}
