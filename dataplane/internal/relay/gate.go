package relay

import (
	"math"
	"runtime"
	"sync"

	"fairlead.dev/fairlead/internal/share"
)

// A Gate is passed by connections that have come, a few at a time until these have asked their backends. A client may
// connect faster than the process can; if all that have come went on at once, the last one would wait for all others,
// whosever it is.
//
//	accept ─► a place ─► gate: are many about to ask? ─ no ─► dial ─ has asked ─┬─► wait for the backend ─► copy
//	                                └ yes ─► wait for the turn of the owner ◄───┘
type Gate struct {
	mu      sync.Mutex
	free    int
	waiting *share.Pool
}

// NewGate has so many pass at once.
func NewGate(free int) *Gate { return &Gate{free: free, waiting: share.New(math.MaxInt)} }

// dialers are how many connections may pass: some for each processor or, where each waits for the kernel, many.
func dialers(sideBySide bool) int {
	const ofProcessor, ofKernel = 8, 256
	if sideBySide {
		return ofKernel
	}
	return ofProcessor * runtime.GOMAXPROCS(0)
}

// waiter is what is to be done when it is its turn.
type waiter func()

// Used implements share.Holder.
func (waiter) Used() int64 { return 0 }

// Yield implements share.Holder. There is room for all.
func (waiter) Yield() {}

// Enter reports whether one may go on; else it waits, and then is called when it may.
func (g *Gate) Enter(q *share.Place, o share.Owner, then func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.free > 0 {
		g.free--
		return true
	}
	g.waiting.Enter(q, o, 1, waiter(then))
	return false
}

// Pass is called when one that could go on has asked: the next one may.
func (g *Gate) Pass() {
	g.mu.Lock()
	next, ok := g.waiting.Next().(waiter)
	if !ok {
		g.free++
	}
	g.mu.Unlock()
	if ok {
		next()
	}
}

// Leave has one not wait any more.
func (g *Gate) Leave(q *share.Place) { g.waiting.Leave(q) }
