package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// BenchmarkRestartEBPF is the time that a new process takes until its programs serve everything that the process before
// it has served. There are 250,000 and 500,000 slots, each for a backend, of Services with ten backends and of one
// Service. The ratios tell whether it grows faster than the slots do.
func BenchmarkRestartEBPF(b *testing.B) {
	const few, many = 250_000, 500_000
	var variants []Variant
	kinds := []int{10, 0} // backends of each Service; 0: all
	name := func(slots, backends int) string { return fmt.Sprintf("%d slots|%d", slots, backends) }
	for _, backends := range kinds {
		for _, slots := range []int{few, many} {
			n := backends
			if n == 0 {
				n = slots
			}
			restart := newRestart(b, fleet{services: slots / n, endpoints: apart(n)})
			variants = append(variants, Variant{name(slots, backends), restart})
		}
	}
	samples, err := Interleave(variants, rounds(b, 5))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{"backends of a Service", "250,000 slots", "500,000 slots", "ratio"}}
	for _, backends := range kinds {
		one, two := samples.All(name(few, backends)), samples.All(name(many, backends))
		ratio, label := two.Ratio(one), fmt.Sprint(backends)
		if backends == 0 {
			label = "all"
		}
		rows = append(rows, []string{label, show(one.Duration()), show(two.Duration()), ratio.String()})
		b.ReportMetric(ratio.Median, "ratio:"+label)
	}
	printTable(fmt.Sprintf("ebpf, restart to programs in force, %d rounds", len(samples.All(name(few, 0)))), rows...)
}

// newRestart has a node of its own, whose kernel holds what a first process has left.
func newRestart(b *testing.B, f fleet) func() ([]time.Duration, error) {
	b.Helper()
	bed, pins := testbed.Need(b, testbed.Spec{Cgroup: true}), filepath.Join(testbed.NeedBPFFS(b), "fairlead")
	var probed ebpf.Probed
	state := f.state(b, newTable(b), bed)
	restart := func() ([]time.Duration, error) {
		runtime.GC() // what is left of the last one would be paid for by this one
		start := time.Now()
		took, err := syncOnce(bed, state, ebpf.Options{Cgroup: bed.Cgroup(), Pins: pins, Serve: ebpf.TC, Probed: &probed}, start)
		return []time.Duration{took}, err
	}
	if _, err := restart(); err != nil {
		b.Fatal(err)
	}
	return restart
}

func syncOnce(bed *testbed.Bed, s *model.State, o ebpf.Options, start time.Time) (took time.Duration, err error) {
	var p dataplane.Dataplane
	err = bed.Do(testbed.Node, func() (err error) {
		p, err = ebpf.New(o)(dataplane.Config{})
		return err
	})
	if err != nil {
		return 0, err
	}
	err = p.Sync(context.Background(), s)
	took = time.Since(start)
	if closed := p.Close(); err == nil {
		err = closed
	}
	return took, err
}
