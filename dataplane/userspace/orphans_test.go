package userspace_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestOrphans(t *testing.T) { testOrphans(t, outcomestest.Orphans.Run) }

func TestCloseIdle(t *testing.T) { testOrphans(t, outcomestest.Orphans.RunIdle) }

func testOrphans(t *testing.T, run func(outcomestest.Orphans, dataplane.Dataplane)) {
	byEachWay(t, func(t *testing.T, way userspace.Redirect) { testOrphansBy(t, way, run) })
}

func testOrphansBy(t *testing.T, way userspace.Redirect, run func(outcomestest.Orphans, dataplane.Dataplane)) {
	t.Parallel()
	n := &node{TB: t, bed: outcomestest.NewOrphansBed(t, false)}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.Driver(userspace.Options{Redirect: way}, legacyTables(), nil).Open(dataplane.Config{})
		return err
	})
	t.Cleanup(func() { n.plane.Close() })
	run(outcomestest.Orphans{
		TB: t, Bed: n.bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client", testbed.Outside},
	}, n.plane)
}
