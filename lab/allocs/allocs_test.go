package allocs

import (
	"runtime"
	"testing"
)

type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(string, ...any) { r.failed = true }

// TestBound: memory in proportion to the input passes, and so does memory that only the first call takes. Memory for a
// length that the input only claims fails.
func TestBound(t *testing.T) {
	var kept []byte
	for name, c := range map[string]struct {
		input, first, then int
		failed             bool
	}{
		"little":         {100, base / 2, base / 2, false},
		"much of much":   {8192, 3 << 20, 3 << 20, false},
		"initialization": {100, 2 * base, 1, false},
		"a claim":        {100, 2 * base, 2 * base, true},
	} {
		r, size := &recorder{}, c.first
		Bound(r, c.input, func() { kept, size = make([]byte, size), c.then })
		if r.failed != c.failed {
			t.Errorf("%s: failed is %v", name, r.failed)
		}
	}
	_ = kept
}

// TestLive: memory counts while it is referenced, and garbage does not.
func TestLive(t *testing.T) {
	var kept [][]byte
	for name, c := range map[string]struct {
		keep   bool
		failed bool
	}{"garbage": {false, false}, "in use": {true, true}} {
		r := &recorder{}
		Live(r, 4<<20, func() {
			kept = nil
			for range 100 {
				b := make([]byte, 1<<20)
				if c.keep {
					kept = append(kept, b)
				}
				runtime.GC()
			}
		})
		if r.failed != c.failed {
			t.Errorf("%s: failed is %v", name, r.failed)
		}
	}
	kept = nil
}
