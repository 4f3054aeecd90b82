// Package allocs bounds what a function allocates, for tests of parsers: an input must not cost more memory than in
// proportion to its size, whatever its length fields say.
//
//	input ─► parser, run between two cheap readings of the runtime's counter ─► too much? again, between two exact ones
//	                                                                               └► still too much: error
//
// Live bounds what is in use at the same time.
package allocs

import (
	"runtime"
	"runtime/metrics"
	"testing"
)

// The parsers of this repository need 1.4 MB at most for any input: nftables makes chains in advance. Those of YAML
// need 180 bytes for a byte of input. The bound is some twice as much.
const (
	base    = 3 << 20
	perByte = 400
)

// Bound calls f, which parses so many bytes, and fails the test if f allocates too much. Initialization at the first
// call does not count: f is called again before the test fails.
func Bound(t testing.TB, input int, f func()) {
	t.Helper()
	limit := uint64(base + perByte*input)
	if used(f, cheaply) <= limit {
		return
	}
	if n := used(f, exactly); n > limit {
		t.Errorf("an input of %d bytes makes the parser allocate %d bytes, more than %d", input, n, limit)
	}
}

func used(f func(), total func() uint64) uint64 {
	before := total()
	f()
	return total() - before
}

// exactly stops the world.
func exactly() uint64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.TotalAlloc
}

// cheaply counts a small object late: when the runtime allocates the next span of its size.
func cheaply() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
