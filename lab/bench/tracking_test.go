package bench

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel flows bpf/flows.c -- -mcpu=v3 -O2 -Wall -Wextra -Wno-unused-parameter -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu

type pair struct{ name, own, conntrack string }

// trackings are what is compared: in each pair the kernel's connection tracking is the control.
func trackings() []pair {
	return []pair{
		{"a packet's flow is found", flowsProgOwnFind, flowsProgConntrackFind},
		{"a flow begins", flowsProgOwnAdd, flowsProgConntrackAdd},
		{"a flow begins, its client is hidden", flowsProgOwnAddHidden, flowsProgConntrackAddHidden},
	}
}

// BenchmarkTracking compares what flows cost that a program remembers in a table of its own with what they cost in the
// kernel's connection tracking.
func BenchmarkTracking(b *testing.B) {
	const times = 1000 // of each round
	bed := testbed.Need(b, testbed.Spec{})
	var variants []Variant
	for _, t := range trackings() {
		for _, program := range []string{t.own, t.conntrack} {
			f, err := newFlows(uint32(len(variants)) << 20)
			if errors.Is(err, ebpf.ErrNotSupported) {
				lack.Skip(b, lack.BPFConntrack, err)
			}
			if err != nil {
				b.Fatalf("%+v", err)
			}
			b.Cleanup(f.Close)
			run := func(program string, times int) (each time.Duration, err error) {
				err = bed.Do(testbed.Node, func() (err error) {
					each, err = f.run(program, times)
					return err
				})
				return each, err
			}
			add := map[string]string{t.own: flowsProgOwnAdd, t.conntrack: flowsProgConntrackAdd}[program]
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

// flows are the programs, with no flow yet. Those in the kernel's connection tracking belong to the network namespace
// of the thread that runs programs, and end with it.
type flows struct{ *ebpf.Collection }

// newFlows makes programs whose flows have clients of their own, from number first on. It fails with ebpf.ErrNotSupported
// where programs cannot use connection tracking.
func newFlows(first uint32) (flows, error) {
	spec, err := loadFlows()
	if err != nil {
		return flows{}, err
	}
	if err := spec.Variables[flowsVarPort].Set(first); err != nil {
		return flows{}, err
	}
	c, err := ebpf.NewCollection(spec)
	return flows{c}, err
}

// run has a program do its thing n times, and returns what each took.
func (f flows) run(program string, n int) (each time.Duration, err error) {
	_, each, err = f.Programs[program].Benchmark(make([]byte, 64), n, nil)
	if err != nil {
		return 0, err
	}
	var failed uint32
	if err := f.Variables[flowsVarFailed].Get(&failed); err != nil {
		return 0, err
	}
	if failed > 0 {
		err := fmt.Errorf("%s has failed %d times", program, failed)
		return 0, errors.Join(err, f.Variables[flowsVarFailed].Set(uint32(0)))
	}
	return each, nil
}
