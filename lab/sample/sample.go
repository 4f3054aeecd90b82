// Package sample draws the part of a large test matrix that a run of the tests takes. A matrix is a list of cells, such
// as the ordered pairs of data planes, whose tests together take longer than a change should wait.
//
//	cells  0 1 2 3 4 5 6 7 8 9   of a matrix in five parts
//	run 1    ×         ×         the seed says which part
//	run 2  ×         ×           the next run has another seed, and takes another part
//	…                            after five runs each cell has been drawn
//
// ./dev test sets the seed, which it prints, and increases it by Stride from run to run. With ./dev test --all each run
// takes all cells.
package sample

import (
	"os"
	"strconv"
	"testing"
	"time"
)

const (
	// SeedVariable names the environment variable with the seed: of the parts, and of tests with random input.
	SeedVariable = "FAIRLEAD_SEED"
	// SeedsVariable names the one that says how many seeds a random test takes, from the first one on.
	SeedsVariable = "FAIRLEAD_SEEDS"
	// casesVariable names the one that says "all" where all cells are to be taken.
	casesVariable = "FAIRLEAD_CASES"
	// Runs is within how many runs in turn each cell of each matrix is drawn.
	Runs = 10
	// Stride lies between the seeds of two runs in turn. It is a prime above Runs, so that it leads through all parts
	// of each matrix. It is large to keep the seeds apart that a random test takes, which begins with the run's and
	// counts on.
	Stride = 1009
)

// Of returns the cells that this run takes: one of so many parts of all of them, at most Runs. Two tests with the same
// cells and parts draw the same ones.
func Of[T any](t testing.TB, parts int, cells []T) []T {
	t.Helper()
	if parts > len(cells) {
		t.Fatalf("%d parts of %d cells: no part may be without a cell", parts, len(cells))
	}
	first, step := Every(t, parts)
	return every(first, step, cells)
}

// Every is Of for cells that are counted from 0 on, and whose number is not known before. The run takes the first and
// each one that is a multiple of step after it.
func Every(t testing.TB, parts int) (first, step int) {
	t.Helper()
	if parts < 1 || parts > Runs {
		t.Fatalf("a matrix in %d parts: want 1 to %d", parts, Runs)
	}
	if All() {
		return 0, 1
	}
	seed := seed()
	first = partOf(seed, parts)
	t.Logf("part %d of %d, drawn by %s=%d; ./dev test --all takes all", first+1, parts, SeedVariable, seed)
	return first, parts
}

func partOf(seed uint64, parts int) int { return int(seed % uint64(parts)) }

func every[T any](first, step int, cells []T) (drawn []T) {
	for i := first; i < len(cells); i += step {
		drawn = append(drawn, cells[i])
	}
	return drawn
}

// All reports whether a run takes everything that there is.
func All() bool { return os.Getenv(casesVariable) == "all" }

// Seed is where a test with random input begins; the test's log says how to repeat it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := seed()
	t.Logf("%s=%d repeats it", SeedVariable, seed)
	return seed
}

// Seeds is how many seeds a random test takes: as many as usual, or as the environment says.
func Seeds(usual int) int {
	if n, err := strconv.Atoi(os.Getenv(SeedsVariable)); err == nil {
		return n
	}
	return usual
}

// seed is the run's; the time where none is set.
func seed() uint64 {
	if n, err := strconv.ParseUint(os.Getenv(SeedVariable), 10, 64); err == nil {
		return n
	}
	return uint64(time.Now().UnixMilli())
}
