package outcomes_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/internal/outcomes"
	"fairlead.dev/fairlead/lab/bench"
	"fairlead.dev/fairlead/lab/testbed"
)

// BenchmarkWatch compares new connections of a pod with the watch and without, at so many Services.
func BenchmarkWatch(b *testing.B) {
	for _, services := range []int{10, 10_000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) { benchmarkWatch(b, services) })
	}
}

func benchmarkWatch(b *testing.B, services int) {
	bed := newBed(b, services)
	variant := func(name string, watch, answers bool, slice func() ([]time.Duration, error)) bench.Variant {
		return bench.Variant{Name: name, Slice: func() (took []time.Duration, err error) {
			err = bed.Do(testbed.Node, func() error {
				if !watch {
					return nil
				}
				w := outcomes.Watch{} // of this thread's namespace
				b.Cleanup(func() { _ = w.Close() })
				defer w.Close()
				if err := w.Take(answers, nil); err != nil {
					return err
				}
				took, err = slice()
				return err
			})
			if err == nil && !watch {
				took, err = slice()
			}
			return took, err
		}}
	}
	connect := func() (took []time.Duration, err error) {
		return took, bed.Do("client", func() error {
			for range 300 {
				start := time.Now()
				c, err := net.Dial("tcp4", "10.96.0.1:80")
				if err != nil {
					return err
				}
				took = append(took, time.Since(start))
				_ = c.(*net.TCPConn).SetLinger(0)
				c.Close()
			}
			return nil
		})
	}
	var variants []bench.Variant
	for _, v := range []struct {
		name           string
		watch, answers bool
	}{{"off", false, false}, {"off again", false, false}, {"observe", true, false}, {"suspect", true, true}} {
		variants = append(variants, variant(v.name, v.watch, v.answers, connect))
	}
	left := b.N
	samples, err := bench.Interleave(variants, func() bool { left--; return left >= 0 })
	if err != nil {
		b.Fatal(err)
	}
	control := samples.Series("off", 0.5)
	for _, v := range variants {
		series := samples.Series(v.Name, 0.5)
		b.Logf("%-10s %s %s", v.Name, series.Duration(), series.Ratio(control))
	}
}
