package eventually

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	base      = 20 * time.Second      // far more than an idle machine needs for what tests wait for
	idle      = 12 * time.Millisecond // what work takes on an idle machine
	slowest   = 10                    // a slower machine counts as this slow, so that each wait ends
	remeasure = 2 * time.Second       // with the race detector work takes 0.1 s, which is 5% of a core
)

// patience is what is left of the time that a wait may take.
type patience struct {
	began, counted time.Time
	left           time.Duration // of an idle machine
	slowness       func() float64
}

// begin is a patience that nothing is taken from until so much time has passed.
func begin(takes time.Duration) *patience {
	now := time.Now()
	return &patience{began: now, counted: now.Add(takes), left: base, slowness: slowness}
}

func (p *patience) waited() time.Duration { return time.Since(p.began).Round(time.Millisecond) }

// over takes the time since the last measurement from what is left, and reports whether that is nothing.
func (p *patience) over() bool {
	if passed := time.Since(p.counted); passed >= remeasure {
		p.left -= time.Duration(float64(passed) / p.slowness())
		p.counted = time.Now()
	}
	return p.left <= 0
}

// slownessAtStart is measured once in a process.
//
//nolint:gochecknoglobals // the value never changes
var slownessAtStart = sync.OnceValue(slowness)

// slowness is how many times longer work takes now than on an idle machine, between 1 and slowest.
func slowness() float64 {
	began := time.Now()
	work()
	return min(max(float64(time.Since(began))/float64(idle), 1), slowest)
}

// work is computation that needs several of the scheduler's time slices, so that it waits for its turn as tests do. The
// race detector and an emulated processor slow it down as they do the tests.
func work() {
	random := rand.New(rand.NewPCG(1, 2))
	numbers := make([]int, 150_000)
	for i := range numbers {
		numbers[i] = random.Int()
	}
	slices.Sort(numbers)
}
