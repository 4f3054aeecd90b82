package sample

import (
	"fmt"
	"testing"
)

// Whatever the first seed, the size of a matrix and its parts: ten runs in turn draw each cell, and no run draws two
// parts.
func TestEvery(t *testing.T) {
	first := Seed(t)
	for cells := 1; cells <= 60; cells++ {
		for parts := 1; parts <= min(cells, Runs); parts++ {
			t.Run(fmt.Sprintf("%d cells in %d parts", cells, parts), func(t *testing.T) {
				all := make([]int, cells)
				for i := range all {
					all[i] = i
				}
				times := make([]int, cells)
				for run := range uint64(Runs) {
					drawn := every(partOf(first+run*Stride, parts), parts, all)
					if len(drawn) < cells/parts || len(drawn) > cells/parts+1 {
						t.Errorf("run %d draws %d cells", run, len(drawn))
					}
					for _, cell := range drawn {
						times[cell]++
					}
				}
				for cell, n := range times {
					if n == 0 {
						t.Errorf("no run draws cell %d", cell)
					}
				}
			})
		}
	}
}

// The environment decides: a seed draws the same cells each time, and all are all.
func TestOf(t *testing.T) {
	cells := []string{"a", "b", "c", "d", "e"}
	for _, c := range []struct{ seed, cases, want string }{
		{"0", "", "[a c e]"}, {"1", "", "[b d]"}, {"1010", "", "[a c e]"}, {"1", "all", "[a b c d e]"},
	} {
		t.Setenv(SeedVariable, c.seed)
		t.Setenv(casesVariable, c.cases)
		if got := fmt.Sprint(Of(t, 2, cells)); got != c.want {
			t.Errorf("seed %s %s: %s, want %s", c.seed, c.cases, got, c.want)
		}
	}
}
