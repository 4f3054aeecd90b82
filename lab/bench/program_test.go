package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// node is the node of a virtual cluster that serves a fleet.
type node struct {
	fleet fleet
	plane dataplane.Dataplane
	table *service.Table
	state *model.State
}

func newNode(b *testing.B, f fleet) *node {
	b.Helper()
	bed := testbed.Need(b, testbed.Spec{})
	n := &node{fleet: f, plane: newPlane(b, bed), table: newTable(b)}
	n.state = f.state(b, n.table, bed)
	if err := n.plane.Sync(b.Context(), n.state); err != nil {
		b.Fatal(err)
	}
	return n
}

// empty fills the kernel after emptying it, as after a boot.
func (n *node) empty() ([]time.Duration, error) {
	if err := n.plane.Remove(context.Background()); err != nil {
		return nil, err
	}
	return n.filled()
}

// filled brings the kernel to what it holds already, as after a restart of the daemon.
func (n *node) filled() ([]time.Duration, error) {
	runtime.GC() // what is left of the last one would be paid for by this one
	start := time.Now()
	err := n.plane.Sync(context.Background(), n.state)
	return []time.Duration{time.Since(start)}, err
}

// BenchmarkProgram is the time that programming takes at the start of the daemon. The last two sizes
// are those with which kube-proxy's users report minutes.
func BenchmarkProgram(b *testing.B) {
	var variants []Variant
	var names []string
	for _, size := range [][2]int{{1000, 10}, {10_000, 10}, {44_000, 1}, {5000, 50}} {
		name := fmt.Sprintf("%d × %d", size[0], size[1])
		names = append(names, name)
		n := newNode(b, fleet{services: size[0], endpoints: apart(size[1])})
		variants = append(variants, Variant{name + "|empty", n.empty}, Variant{name + "|filled", n.filled})
	}
	samples, err := Interleave(variants, rounds(b, 15))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{"Services × endpoints", "empty kernel: median", "fastest", "nothing to do: median", "fastest"}}
	for _, name := range names {
		row := []string{name}
		for _, kernel := range []string{"|empty", "|filled"} {
			all := samples.All(name + kernel)
			row = append(row, show(all.Duration()), show(all[:1].Duration()))
			b.ReportMetric(all.Duration().Seconds(), "s:"+kernel[1:]+"-"+compact(name))
		}
		rows = append(rows, row)
	}
	printTable(fmt.Sprintf("Sync, %d rounds", len(samples[names[0]+"|empty"])), rows...)
}

// perChange is how many changes of one kind a slice makes.
const perChange = 20

// change is a kind of change that one Service suffers.
type change struct {
	name     string
	from, to func(n *node, i int) []netip.Addr // endpoints before and after; nil: there is no such Service
	times    int                               // in a slice
	computed bool                              // with the time that the Table takes
}

// slice does and undoes a change of random Services.
func (n *node) slice(c change) (took []time.Duration, err error) {
	for range c.times {
		i := rand.IntN(n.fleet.services)
		if err := n.set(i, c.from(n, i)); err != nil {
			return nil, err
		}
		before := n.batch(i, c.to(n, i))
		start := time.Now()
		state, diff, _ := n.table.Update(before)
		if !c.computed {
			start = time.Now()
		}
		if err := n.plane.Apply(context.Background(), state, diff); err != nil {
			return nil, err
		}
		took = append(took, time.Since(start))
		if err := n.set(i, n.fleet.endpoints(i)); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// batch gives a Service endpoints, or takes it away.
func (n *node) batch(i int, endpoints []netip.Addr) service.Batch {
	b := service.Batch{}
	f := n.fleet
	f.endpoints = func(int) []netip.Addr { return endpoints }
	f.add(&b, i)
	if endpoints == nil {
		for i := range b.Services {
			b.Services[i].Is = nil
		}
		for i := range b.Slices {
			b.Slices[i].Is = nil
		}
	}
	return b
}

func (n *node) set(i int, endpoints []netip.Addr) error {
	state, diff, _ := n.table.Update(n.batch(i, endpoints))
	return n.plane.Apply(context.Background(), state, diff)
}

// spare are endpoints that no Service of a fleet has.
func spare(m int) []netip.Addr { return apart(m)(-1) }

// BenchmarkChange is the time that the plane takes for one change at different numbers of Services
// with ten endpoints each.
func BenchmarkChange(b *testing.B) {
	none := func(*node, int) []netip.Addr { return nil }
	all := func(n *node, i int) []netip.Addr { return n.fleet.endpoints(i) }
	more := func(m int) func(*node, int) []netip.Addr {
		return func(n *node, i int) []netip.Addr { return append(spare(m), n.fleet.endpoints(i)...) }
	}
	replaced := func(n *node, i int) []netip.Addr { return append(spare(1), n.fleet.endpoints(i)[1:]...) }
	largest := map[*node]int{}
	unseen := func(n *node, i int) []netip.Addr {
		largest[n] = max(largest[n], 2*len(n.fleet.endpoints(i))) + 1
		return spare(largest[n])
	}
	changes := []change{
		{"one endpoint replaced", all, replaced, perChange, false},
		{"the same, with the computation", all, replaced, perChange, true},
		{"one endpoint added", all, more(1), perChange, false},
		{"one endpoint removed", more(1), all, perChange, false},
		{"as many endpoints again", all, more(10), perChange, false},
		{"more than double that, for the first time", all, unseen, 1, false},
		{"one Service added", none, all, perChange, false},
		{"one Service removed", all, none, perChange, false},
	}
	sizes := []int{1000, 2000, 5000, 10_000, 20_000, 50_000}
	var variants []Variant
	var first *node
	for _, size := range sizes {
		n := newNode(b, fleet{services: size, endpoints: apart(10)})
		if first == nil {
			first = n
		}
		for _, c := range changes {
			variants = append(variants, Variant{fmt.Sprint(c.name, size), func() ([]time.Duration, error) { return n.slice(c) }})
		}
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, 15))
	if err != nil {
		b.Fatal(err)
	}
	if report, err := first.plane.Audit(b.Context(), first.state, dataplane.Quick); err != nil || len(report.Drifts) > 0 {
		b.Fatal(err, report.Drifts) // what was measured did not happen
	}
	reportChange(b, sizes, changes, samples)
}

func reportChange(b *testing.B, sizes []int, changes []change, samples Samples) {
	b.Helper()
	head := []string{"change, p50 (p99)"}
	for _, size := range sizes {
		head = append(head, fmt.Sprint(size))
	}
	rows := [][]string{append(head, "exponent")}
	for _, c := range changes {
		row, x, y := []string{c.name}, []float64{}, []float64{}
		for _, size := range sizes {
			took := samples.All(fmt.Sprint(c.name, size))
			p50, p99 := took.Duration(), took[len(took)*99/100:][:1].Duration()
			row = append(row, fmt.Sprintf("%s (%s)", show(p50), show(p99)))
			x, y = append(x, float64(size)), append(y, p50.Seconds())
		}
		exponent := Exponent(x, y)
		rows = append(rows, append(row, fmt.Sprintf("%.3f", exponent)))
		b.ReportMetric(exponent, "exponent:"+compact(c.name))
	}
	printTable(fmt.Sprintf("Apply at so many Services × 10, %d rounds of %d changes",
		len(samples[fmt.Sprint(changes[0].name, sizes[0])]), perChange), rows...)
}
