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
func ipvsPlane(o ipvs.Options) dataplane.New {
	return localhost.WrapBoth(conntrack.Wrap(ipvs.New(o)))
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
	conformance.Run(t, "ipvs", ipvsPlane(ipvs.Options{}))
}

// TestIPVS_dummy is where addresses on an interface could make a difference.
func TestIPVS_dummy(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		const some = "^(affinity-shared|cluster-ip|external-local|guards|hairpin|host-endpoint|source-ranges-node)$"
		vm.Replay(t, "IPVS", "^TestIPVS_dummy$/^cases$/"+some+"/./^restarts$")
		return
	}
	conformance.Run(t, "ipvs", ipvsPlane(ipvs.Options{AddressMode: ipvs.Dummy}))
}

func TestIPVS_random(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	conformance.RunRandom(t, ipvsPlane(ipvs.Options{}))
}

func TestIPVS_faults(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	conformance.RunFaults(t, ipvsPlane(ipvs.Options{}))
}
