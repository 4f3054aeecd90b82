package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// Garbage may take half as much as what lives: most memory is taken once, while all objects are read and programmed for
// the first time. A fifth more processor time then saves a seventh of the peak, which is what counts on a full node. On
// nodes that are not large it may take less, but a quarter. When very much changes at once, such a node grows by that
// change and not much more. To collect what is small costs little. Where there are hundreds of thousands of endpoints,
// garbage may take no more than what lives where there are tens of thousands, or a quarter.
const (
	ordinary = 50 // percent, of what lives
	least    = 25
	most     = 8 << 20
	large    = 96 << 20 // from here on processor time counts more
)

// boundGarbage sets how much garbage there may be, now and after each collection, unless the environment does.
func boundGarbage() {
	if os.Getenv("GOGC") != "" {
		return
	}
	c := &collector{percent: ordinary}
	debug.SetGCPercent(ordinary)
	c.await()
}

// collector follows the size of the heap.
type collector struct{ percent int }

// await has adjust called when the next collection finds an object that nothing refers to.
func (c *collector) await() {
	runtime.AddCleanup(new([64]byte), (*collector).adjust, c)
}

func (c *collector) adjust() {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	if percent := garbagePercent(live[0].Value.Uint64()); percent != c.percent {
		c.percent = percent
		debug.SetGCPercent(percent)
	}
	c.await()
}

// garbagePercent is how much garbage there may be beside so much that lives.
func garbagePercent(live uint64) int {
	of := uint64(most)
	if live >= large {
		of = large
	}
	return min(ordinary, max(least, int(100*of/max(live, 1))))
}
