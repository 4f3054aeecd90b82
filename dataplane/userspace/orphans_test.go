package userspace_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestOrphans(t *testing.T) { byEachWay(t, testOrphans) }

func testOrphans(t *testing.T, way userspace.Redirect) {
	t.Parallel()
	n := &node{TB: t, bed: outcomestest.NewOrphansBed(t, false)}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.Driver(userspace.Options{Redirect: way}, legacyTables(), nil).Open(dataplane.Config{})
		return err
	})
	t.Cleanup(func() { n.plane.Close() })
	outcomestest.Orphans{
		TB: t, Bed: n.bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client", testbed.Outside},
	}.Run(n.plane)
}
