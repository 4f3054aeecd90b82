package ipvs_test

import (
	"errors"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

func TestOrphans(t *testing.T) {
	if _, err := ipvs.New(ipvs.Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	bed := outcomestest.NewOrphansBed(t, false)
	var p dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = conntrack.Wrap(ipvs.New(ipvs.Options{}))(dataplane.Config{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	outcomestest.Orphans{
		TB: t, Bed: bed, SNAT: "never", From: []testbed.Place{testbed.Node, "client", testbed.Outside},
	}.Run(p)
}
