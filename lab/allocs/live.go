package allocs

import (
	"runtime"
	"runtime/metrics"
	"testing"
)

// Live calls f and fails the test if what is in use meanwhile, on the heap and on stacks, ever exceeds the limit in
// bytes. It collects garbage without pause, so that only what is referenced counts. Nothing else may run beside it:
// a test that calls it is not parallel.
func Live(t testing.TB, limit int, f func()) {
	t.Helper()
	runtime.GC()
	before, most := live(), 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	for running := true; running; {
		runtime.GC()
		most = max(most, live()-before)
		select {
		case <-done:
			running = false
		default:
		}
	}
	if most > limit {
		t.Errorf("%d bytes are in use at the same time, more than %d", most, limit)
	}
}

func live() int {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(samples)
	return int(samples[0].Value.Uint64() + samples[1].Value.Uint64())
}
