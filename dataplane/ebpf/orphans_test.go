package ebpf_test

import (
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
)

// The sockets of the node and of a pod are aborted whose backend is dead.
func TestOrphans(t *testing.T) { testOrphans(t, outcomestest.Orphans.Run) }

// Those are aborted that are idle.
func TestCloseIdle(t *testing.T) { testOrphans(t, outcomestest.Orphans.RunIdle) }

func testOrphans(t *testing.T, run func(outcomestest.Orphans, dataplane.Dataplane)) {
	t.Parallel()
	bed := cluster{outcomestest.NewOrphansBed(t, true), t, filepath.Join(testbed.NeedBPFFS(t), "fairlead")}
	p := bed.openAs(ebpf.Options{})
	t.Cleanup(func() { check(t, p.Close()) })
	run(outcomestest.Orphans{TB: t, Bed: bed.Bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client"}}, p)
}
