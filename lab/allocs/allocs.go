// Package allocs bounds what a function allocates, for tests of parsers: an input must not cost more memory than in
// proportion to its size, whatever its length fields say.
//
//	input ─► parser, run between two readings of the runtime's counter ─► error if it allocates too much
package allocs

import (
	"runtime/metrics"
	"testing"
)

// The bound is generous: it is to find a length that an input claims and does not have.
const (
	base    = 4 << 20
	perByte = 2000
)

// Bound calls f, which parses so many bytes, and fails the test if f allocates too much. What is initialized at the
// first call does not count: f is called again before the test fails.
func Bound(t testing.TB, input int, f func()) {
	t.Helper()
	limit := uint64(base + perByte*input)
	if used(f) <= limit {
		return
	}
	if n := used(f); n > limit {
		t.Errorf("an input of %d bytes makes the parser allocate %d bytes, more than %d", input, n, limit)
	}
}

func used(f func()) uint64 {
	before := total()
	f()
	return total() - before
}

func total() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
