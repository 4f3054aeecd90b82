package bench

import (
	"fmt"
	"net/netip"
	"os"
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

// connectSizes are the numbers of Services of BenchmarkConnectEBPF; sizesVariable names others.
const connectSizes = "10,10000,100000"

// BenchmarkConnectEBPF is BenchmarkConnect for the ebpf plane. "Beside" are connections to the pods themselves, for which
// the programs find nothing to do. Beside nftables stands, unless rivalsVariable is "none".
func BenchmarkConnectEBPF(b *testing.B) {
	columns := []column{{direct, newArena(b, 0), 0}, {"direct again (A/A)", newArena(b, 0), 0}}
	sizes := sizesOf(b, connectSizes)
	for i, n := range sizes {
		a := newSocketArena(b, n)
		if i == len(sizes)-1 {
			columns = append(columns, column{fmt.Sprintf("direct, beside %d Services", n), a, 0})
		}
		columns = append(columns, column{fmt.Sprintf("one of %d", n), a, 1}, column{fmt.Sprintf("each of %d", n), a, n})
	}
	if os.Getenv(rivalsVariable) != "none" {
		columns = append(columns, column{"nftables: each of 10000", newArena(b, 10_000), 10_000})
	}
	compareConnects(b, columns)
}
