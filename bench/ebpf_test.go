package bench

import (
	"net/netip"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/testbed"
)

// newSocketArena makes a cluster in which the ebpf plane serves n Services to the sockets on the node, and nobody else
// serves anything.
func newSocketArena(b *testing.B, n int) *arena {
	b.Helper()
	bed, err := testbed.New(b.Context(), testbed.Spec{Pods: arenaPods(), Cgroup: true})
	if err != nil {
		b.Skip(err)
	}
	pins, path, err := testbed.BPFFS()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := bed.Close(); err != nil {
			b.Error(err)
		}
		pins.Close()
	})
	a := newArenaOn(b, bed)
	var plane dataplane.Dataplane
	err = bed.Do(testbed.Node, func() (err error) {
		o := ebpf.Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(path, "fairlead")}
		plane, err = ebpf.New(o)(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { plane.Close() })
	f := fleet{n, func(int) []netip.Addr { return a.pods() }, true}
	if err := plane.Sync(b.Context(), f.state(b, newTable(b), bed)); err != nil {
		b.Fatal(err)
	}
	return a
}

// BenchmarkConnectEBPF is BenchmarkConnect for the ebpf plane, beside nftables. What differs from "direct" there
// are programs that find nothing to do.
func BenchmarkConnectEBPF(b *testing.B) {
	const few, many = 10, 50_000
	bare, again := newArena(b, 0), newArena(b, 0)
	small, large, nft := newSocketArena(b, few), newSocketArena(b, many), newArena(b, 10_000)
	columns := []column{
		{direct, bare, 0},
		{"direct again (A/A)", again, 0},
		{"direct, beside 50,000 Services", large, 0},
		{"each of 10", small, few},
		{"one of 50,000", large, 1},
		{"each of 50,000", large, many},
		{"nftables: each of 10,000", nft, 10_000},
	}
	compareConnects(b, columns)
}
