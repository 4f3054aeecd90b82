package ebpf_test

import (
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
)

// The sockets of the node and of a pod are aborted whose backend is dead.
func TestOrphans(t *testing.T) {
	t.Parallel()
	bed := cluster{outcomestest.NewOrphansBed(t, true), t, filepath.Join(testbed.NeedBPFFS(t), "fairlead")}
	p := bed.openAs(ebpf.Options{})
	t.Cleanup(func() { check(t, p.Close()) })
	outcomestest.Orphans{TB: t, Bed: bed.Bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client"}}.Run(p)
}
