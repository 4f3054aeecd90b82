package bench

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
)

// way is how a client outside reaches a backend.
type way struct {
	name    string
	at      netip.AddrPort // empty address: that of the node
	backend func(*testbed.Bed) netip.AddrPort
	snat    string
}

func ways() []way {
	node, balancer := netip.Addr{}, nth(testbed.LoadBalancerCIDRs()[0].Addr(), 7)
	return []way{
		{"NodePort, pod on the node", netip.AddrPortFrom(node, 30080), local, "always"},
		{"NodePort, pod on another node", netip.AddrPortFrom(node, 30081), remote, "always"},
		{"load balancer's address, policy Local", netip.AddrPortFrom(balancer, 80), local, "never"},
		{"load balancer's address, pod on another node", netip.AddrPortFrom(balancer, 81), remote, "always"},
	}
}

func (w way) address(bed *testbed.Bed) netip.AddrPort {
	if w.at.IsValid() {
		return w.at
	}
	return netip.AddrPortFrom(bed.Addr(testbed.Node, false), w.at.Port())
}

// outsideRows are those of all ways.
func outsideRows(bed *testbed.Bed) (rows string) {
	for i, w := range ways() {
		rows += forward(fmt.Sprint("s", i), w.address(bed), w.backend(bed), w.snat)
	}
	return rows
}

// BenchmarkOutside compares connect() of a client outside of the cluster through NodePorts and load balancers' addresses
// with connect() to the pod, where it is routed through the same node.
func BenchmarkOutside(b *testing.B) {
	var variants []Variant
	for _, c := range contendersOutside() {
		a := c.arenaFor(b, outsideRows)
		command(b, a.bed, testbed.Outside, "ip", "route", "replace", testbed.PodCIDRs(testbed.NodeB)[0].String(),
			"via", a.bed.Addr(testbed.Node, false).String())
		for _, w := range ways() {
			address := w.address(a.bed)
			if c.plane == nil && c.ebpf == nil {
				address = w.backend(a.bed)
			}
			variants = append(variants, Variant{w.name + c.name, a.to(testbed.Outside, address).slice})
		}
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, roundsOf(b, 30)))
	if err != nil {
		b.Fatal(err)
	}
	reportOutside(b, samples)
}

func reportOutside(b *testing.B, samples Samples) {
	b.Helper()
	head := []string{"client outside, TCP"}
	for _, c := range contendersOutside() {
		head = append(head, c.name)
	}
	rows := [][]string{head}
	for _, w := range ways() {
		control := samples.Series(w.name+direct, 0.5)
		row := []string{w.name, show(control.Duration())}
		for _, c := range contendersOutside()[1:] {
			ratio := samples.Series(w.name+c.name, 0.5).Ratio(control)
			row = append(row, ratio.String())
			b.ReportMetric(ratio.Median, compact(w.name+":"+c.name))
		}
		rows = append(rows, row)
	}
	printTable(fmt.Sprintf("connect() from outside: median of %d rounds of %d each; ratios to direct",
		len(samples[ways()[0].name+direct]), batches*perBatch), rows...)
}
