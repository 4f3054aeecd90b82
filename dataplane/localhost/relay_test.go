package localhost

import (
	"math"
	"testing"

	"fairlead.dev/fairlead/model"
)

func TestPick_byWeight(t *testing.T) {
	backends := []model.Backend{{Weight: 1}, {Weight: 6}, {Weight: 3}}
	const n = 10000
	var got [3]float64
	for range n {
		got[pick(backends)]++
	}
	for i, b := range backends {
		share := float64(b.Weight) / 10
		if off := math.Abs(got[i] - n*share); off > 6*math.Sqrt(n*share*(1-share)) { // once in 10^8 runs
			t.Errorf("weight %d of 10: %v of %d", b.Weight, got[i], n)
		}
	}
}
