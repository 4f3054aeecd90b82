package conformance_test

import (
	"errors"
	"testing"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/testbed/vm"
)

// ipvsPlane is IPVS with all the wrappers, as the daemon runs it.
func ipvsPlane() dataplane.New {
	return localhost.WrapBoth(conntrack.Wrap(ipvs.New(ipvs.Options{})))
}

// hasIPVS reports whether this kernel has what the plane needs; opening it changes nothing.
func hasIPVS(t *testing.T) bool {
	p, err := ipvs.New(ipvs.Options{})(dataplane.Config{})
	switch {
	case errors.Is(err, dataplane.ErrUnsupported):
		return false
	case err != nil:
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestIPVS(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		// In what order rows come does not depend on the family. The cases from which the plane deviates are
		// skipped, which is no reason to complain.
		vm.Replay(t, "IPVS", "^TestIPVS$/^cases$/./^(ipv4|dual)$|^TestIPVS$/^cases$/././^restarts$")
		return
	}
	conformance.Run(t, "ipvs", ipvsPlane())
}

func TestIPVS_random(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	conformance.RunRandom(t, ipvsPlane())
}

func TestIPVS_faults(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	conformance.RunFaults(t, ipvsPlane())
}
