package bench

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"
)

func TestInterleave(t *testing.T) {
	var order []string
	variant := func(name string) Variant {
		return Variant{name, func() ([]time.Duration, error) {
			order = append(order, name)
			return []time.Duration{3, 1, 2}, nil
		}}
	}
	left := 3
	samples, err := Interleave([]Variant{variant("a"), variant("b"), variant("c")}, func() bool {
		left--
		return left >= 0
	})
	if err != nil {
		t.Fatal(err)
	}
	for round := range slices.Chunk(order, 3) {
		if slices.Sort(round); !slices.Equal(round, []string{"a", "b", "c"}) {
			t.Errorf("a round has the slices %v", round)
		}
	}
	if got, want := fmt.Sprint(samples["b"]), "[[1ns 2ns 3ns] [1ns 2ns 3ns] [1ns 2ns 3ns]]"; got != want {
		t.Errorf("samples are %s, want %s", got, want)
	}
}

// A machine that gets slower all the time, and stumbles once, does not disturb a ratio.
func TestRatio(t *testing.T) {
	var control, twice Series
	for i := range 15 {
		control, twice = append(control, float64(i+1)), append(twice, 2*float64(i+1))
	}
	twice[7] *= 100
	if got, want := twice.Ratio(control).String(), "2.00 (2.00–2.00)"; got != want {
		t.Errorf("ratio is %s, want %s", got, want)
	}
}

func TestExponent(t *testing.T) {
	x := []float64{1000, 2000, 5000, 50_000}
	for _, a := range []float64{0, 0.5, 1, 2} {
		var y []float64
		for _, x := range x {
			y = append(y, 7*math.Pow(x, a))
		}
		if got := Exponent(x, y); math.Abs(got-a) > 1e-9 {
			t.Errorf("exponent of 7x^%v is %v", a, got)
		}
	}
}
