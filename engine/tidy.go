package engine

import (
	"runtime/metrics"
	"time"

	"fairlead.dev/fairlead/model"
)

// To read and to program much takes several times the memory that remains. It is given back: at once after everything
// was programmed, and soon after a large change. The runtime takes minutes. After repairs and small changes it is left
// to the runtime, as giving back takes as long as some of them.

const (
	// largeChange is a number of rows and backends.
	largeChange = 1 << 12
	// tidyDelay is how long after a large change: others may follow.
	tidyDelay = time.Second
	// tidyShare is how many times as long as it took memory is not given back again.
	tidyShare = 32
	// minGrowth is how many bytes the heap must have grown by, unless many rows have gone.
	minGrowth = 32 << 20
)

// tidy says when memory is to be given back.
type tidy struct {
	at    time.Time     // zero: never
	free  time.Time     // not earlier
	must  bool          // much is to be gained
	floor uint64        // of the heap, when memory was last given back
	heap  func() uint64 // that of the process
	give  func()        // debug.FreeOSMemory
}

// synced notes that everything was programmed.
func (t *tidy) synced() { t.at, t.must = time.Now(), true }

// applied notes a change.
func (t *tidy) applied(c *model.Change) {
	fewer := dropped(c) >= largeChange
	if t.must = t.must || fewer; t.at.IsZero() && (fewer || added(c) >= largeChange) {
		t.at = later(time.Now().Add(tidyDelay), t.free)
	}
}

// run gives memory back if it is time to.
func (t *tidy) run() {
	now := time.Now()
	if t.at.IsZero() || now.Before(t.at) {
		return
	}
	if t.must || t.heap() >= t.floor+minGrowth {
		t.give()
		t.free, t.floor = time.Now().Add(tidyShare*time.Since(now)), t.heap()
	}
	t.at, t.must = time.Time{}, false
}

// added is how many rows and backends a change sets.
func added(c *model.Change) int {
	n := len(c.Frontends.Set) + len(c.Pools.Set) + len(c.Guards.Set)
	for _, p := range c.Pools.Set {
		n += len(p.Value.Backends)
	}
	return n
}

// dropped is how many rows a change deletes.
func dropped(c *model.Change) int {
	return len(c.Frontends.Delete) + len(c.Pools.Delete) + len(c.Guards.Delete)
}

// heap is how many bytes the heap has of the machine.
func heap() (n uint64) {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
	}
	metrics.Read(samples)
	for _, s := range samples {
		n += s.Value.Uint64()
	}
	return n
}
