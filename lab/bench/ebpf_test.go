package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/testbed"
)

// newBareArena makes a cluster without a proxy. As everywhere in a cluster, sockets belong to a cgroup; they take a
// little longer than those that belong to none.
func newBareArena(b *testing.B) *arena {
	b.Helper()
	return newArenaOn(b, testbed.Need(b, testbed.Spec{Pods: arenaPods(), Cgroup: true}))
}

// newSocketArena makes a cluster in which the ebpf plane serves n Services to the sockets on the node, and no other
// plane serves.
func newSocketArena(b *testing.B, n int) *arena {
	b.Helper()
	path := testbed.NeedBPFFS(b)
	a := newBareArena(b)
	bed := a.bed
	var plane dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		o := ebpf.Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(path, "fairlead")}
		plane, err = ebpf.New(o)(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { plane.Close() })
	if err := plane.Sync(b.Context(), a.fleet(n).state(b, newTable(b), bed)); err != nil {
		b.Fatal(err)
	}
	return a
}

// connectSizes are the numbers of Services of BenchmarkConnectEBPF; sizesVariable names others.
const connectSizes = "10,10000,100000"

// BenchmarkConnectEBPF is BenchmarkConnect for the ebpf plane. "Beside" are connections to the pods themselves, for which
// the programs find nothing to do; those that do nothing tell what the kernel's way to programs takes. Beside nftables
// stands, unless rivalsVariable is "none".
func BenchmarkConnectEBPF(b *testing.B) {
	floor := newBareArena(b)
	b.Cleanup(attachIdle(b, floor.bed))
	columns := []column{
		{direct, newBareArena(b), 0},
		{directAgain, newBareArena(b), 0},
		{idlePrograms, floor, 0},
	}
	sizes := sizesOf(b, connectSizes)
	for i, n := range sizes {
		a := newSocketArena(b, n)
		if i == len(sizes)-1 {
			columns = append(columns, column{fmt.Sprintf("direct, beside %d Services", n), a, 0})
		}
		columns = append(columns, column{fmt.Sprintf("one of %d", n), a, 1}, column{fmt.Sprintf("each of %d", n), a, n})
	}
	if os.Getenv(rivalsVariable) != "none" {
		rival := newBareArena(b)
		rival.fleet(10_000).install(b, rival.bed)
		columns = append(columns, column{"nftables: each of 10000", rival, 10_000})
	}
	compareConnects(b, columns)
}
