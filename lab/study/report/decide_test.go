package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestErrorRates has many runs look after each round, and stop at the first decision. Of runs with the same contender
// twice, at most 5 % may see a difference. Of runs with a difference, at most 5 % may see none, or one in the other
// direction. As in a report, the margin is wider where the copy of direct access differs by more.
func TestErrorRates(t *testing.T) {
	t.Parallel()
	const seed, runs, rounds, margin = 11, 300, 300, 1.05
	random := rand.New(rand.NewPCG(seed, seed))
	normal := func(int) float64 { return 0.1 * random.NormFloat64() }
	noises := []struct {
		name string
		of   func(round int) float64 // of the logarithm of a turn's figure
	}{
		{"normal", normal},
		{"heavy tails, without a variance", func(int) float64 { return 0.05 * math.Tan(math.Pi*(random.Float64()-0.5)) }},
		{"one turn of ten takes much longer", func(int) float64 {
			if random.IntN(10) == 0 {
				return 0.1*random.NormFloat64() + 3*random.ExpFloat64()
			}
			return 0.1 * random.NormFloat64()
		}},
		{"it grows with time", func(round int) float64 { return 0.05 * (1 + float64(round)/50) * random.NormFloat64() }},
	}
	// The machine becomes slower all the time, within rounds, too: whose turn comes first is faster.
	const drift = 0.02
	table := []string{fmt.Sprintf("seed %d: wrong decisions of %d runs, rounds until one (median), undecided after %d", seed, runs,
		rounds)}
	for _, noise := range noises {
		for _, effect := range []float64{1, 1.06, 1.2, 1 / 1.2} {
			wrong, undecided, took := 0, 0, []int(nil)
			for range runs {
				var logs, copies []float64 // of a contender, and of the copy of direct access
				c := Comparison{}
				for round := 0; round < rounds && (round == 0 || c.Vague()); round++ {
					direct, late := noise.of(round), drift*float64(1-2*random.IntN(2))
					logs = append(logs, math.Log(effect)+noise.of(round)-direct+late)
					copies = append(copies, noise.of(round)-direct-late)
					c = comparison(logs, widened(margin, copies))
				}
				took = append(took, len(logs))
				switch {
				case c.Vague():
					undecided++
				case effect == 1 && !c.Alike(), effect > 1 && c.Less(), effect < 1 && c.More(),
					c.Alike() && max(effect, 1/effect) > margin:
					wrong++
				}
			}
			slices.Sort(took)
			table = append(table, fmt.Sprintf("%-34s ratio %.2f: %.1f %%, %d, %d", noise.name, effect, 100*float64(wrong)/runs,
				took[runs/2], undecided))
			if float64(wrong) > doubt*runs {
				t.Errorf("%s: more than %.0f %% are wrong", table[len(table)-1], 100*doubt)
			}
		}
	}
	t.Log(strings.Join(table, "\n"))
}

// Bounds begin with as many rounds as can be, and become narrower with more.
func TestInterval(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int{0: -1, 7: -1, 8: 0, 11: 0, 12: 1, 20: 3, 100: 34, 1000: 444} {
		if got := outside(n); got != want {
			t.Errorf("%d of %d rounds lie beyond a bound, want %d", got, n, want)
		}
	}
}

// The number of rounds that is said to decide a comparison does so if more rounds are spread like those that there are.
func TestMore(t *testing.T) {
	t.Parallel()
	var logs []float64
	for i := range 40 {
		logs = append(logs, 0.3*math.Sqrt2*math.Erfinv(float64(2*i+1)/40-1)) // of a normal distribution
	}
	c := comparison(slices.Clone(logs), 1.1)
	need := c.more(settled)
	if need < 100 || need > 250 || !c.Vague() {
		t.Fatalf("%v needs %d more rounds", c, need)
	}
	for range need/len(logs) + 1 {
		c = comparison(slices.Concat(c.logs, logs), 1.1)
	}
	if c.Vague() {
		t.Errorf("with %d more rounds it is %v", need, c)
	}
}
