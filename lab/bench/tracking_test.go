package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/lab/bench/tracking"
	"fairlead.dev/fairlead/lab/testbed"
)

type pair struct{ name, own, conntrack string }

// trackings are what is compared: in each pair the kernel's connection tracking is the control.
func trackings() []pair {
	return []pair{
		{"a packet's flow is found", tracking.OwnFind, tracking.ConntrackFind},
		{"a flow begins", tracking.OwnAdd, tracking.ConntrackAdd},
		{"a flow begins, its client is hidden", tracking.OwnAddHidden, tracking.ConntrackAddHidden},
	}
}

// BenchmarkTracking compares what flows cost that a program remembers in a table of its own with what they cost in the
// kernel's connection tracking.
func BenchmarkTracking(b *testing.B) {
	const times = 1000 // of each round
	bed, err := testbed.New(b.Context(), testbed.Spec{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { bed.Close() })
	var variants []Variant
	for _, t := range trackings() {
		for _, program := range []string{t.own, t.conntrack} {
			flows, err := tracking.Load(uint32(len(variants)) << 20)
			if errors.Is(err, ebpf.ErrNotSupported) {
				b.Skipf("programs cannot use connection tracking here: %v", err)
			}
			if err != nil {
				b.Fatalf("%+v", err)
			}
			b.Cleanup(flows.Close)
			run := func(program string, times int) (each time.Duration, err error) {
				err = bed.Do(testbed.Node, func() (err error) {
					each, err = flows.Run(program, times)
					return err
				})
				return each, err
			}
			add := map[string]string{t.own: tracking.OwnAdd, t.conntrack: tracking.ConntrackAdd}[program]
			if _, err := run(add, 1); err != nil { // so that there is one to be found
				b.Fatal(err)
			}
			variants = append(variants, Variant{program, func() ([]time.Duration, error) {
				each, err := run(program, times)
				return []time.Duration{each}, err
			}})
		}
	}
	samples, err := Interleave(variants, rounds(b, roundsOf(b, 30)))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{"", "conntrack", "own table"}}
	for _, t := range trackings() {
		own, conntrack := samples.Series(t.own, 0.5), samples.Series(t.conntrack, 0.5)
		ratio := own.Ratio(conntrack)
		rows = append(rows, []string{t.name, conntrack.Duration().String(), own.Duration().String() + ": " + ratio.String()})
		b.ReportMetric(ratio.Median, compact(t.name))
	}
	printTable("flows remembered by programs at devices: median of 30 rounds of 1000 each", rows...)
}
