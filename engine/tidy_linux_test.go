package engine

import (
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/service"
)

// Memory is given back after large changes, where that gains much, and neither for others nor all the time.
func TestEngine_givesMemoryBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		given, asked, size := 0, 0, uint64(100<<20)
		r.start(nil)
		r.engine.tidy.give = func() { given++; bubble.Work(100 * time.Millisecond) }
		r.engine.tidy.heap = func() uint64 { asked++; return size }
		expect := func(what string, wantGiven, wantAsked int) {
			t.Helper()
			if given != wantGiven || asked != wantAsked {
				t.Errorf("%s: given %d times, asked %d times; want %d, %d", what, given, asked, wantGiven, wantAsked)
			}
			given, asked = 0, 0
		}
		r.send(web(1, "10.244.1.2"))
		r.converged()
		bubble.Pass(10 * time.Second)
		expect("at first", 1, 1)
		for i := range 100 {
			r.send(web(1, fmt.Sprint("10.244.2.", i)))
			bubble.Pass(time.Second)
		}
		expect("small changes", 0, 0)
		size += minGrowth - 1
		r.send(large(0))
		bubble.Pass(10 * time.Second)
		expect("a large change that left little", 0, 1)
		size++
		r.send(large(1))
		bubble.Pass(10 * time.Second)
		expect("one that left much", 1, 2)
		r.engine.tidy.heap = func() uint64 { size += minGrowth; return size }
		for i := range 320 {
			r.send(large(i))
			bubble.Pass(100 * time.Millisecond)
		}
		if given < 5 || given > 11 {
			t.Errorf("given back %d times in 32 s, in which that takes 0.1 s", given)
		}
		r.stop()
	})
}

// large has many endpoints.
func large(number int) service.Batch {
	b := web(1)
	for i := range largeChange {
		b.Slices[0].Is.Endpoints = append(b.Slices[0].Is.Endpoints, service.Endpoint{
			Addr: netip.AddrFrom4([4]byte{10, 100 + byte(number%2), byte(i >> 8), byte(i)}), Ready: true, Serving: true, Weight: 1,
		})
	}
	return b
}

func TestHeap(t *testing.T) {
	debug.FreeOSMemory()
	before := heap()
	block := make([]byte, 2*minGrowth)
	if got := heap(); got < before+minGrowth {
		t.Errorf("%d bytes with a block of %d, and without it %d", got, len(block), before)
	}
	runtime.KeepAlive(block)
}
