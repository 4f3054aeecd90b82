package conformance_test

import (
	"errors"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed/vm"
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
		vm.Replay(t, "IPVS", "^TestIPVS$/^cases$")
		return
	}
	conformance.Run(t, "ipvs", ipvsPlane(ipvs.Options{}))
}

// The address modes differ in what is local, and in whose addresses they are.
const addressCases = "^(affinity-shared|cluster-ip|conflict|external-ip-node|external-ips|external-local|" +
	"external-other-ports|guards|guards-node|hairpin|host-endpoint|load-balancer|no-endpoints|node-port-all|" +
	"source-ranges-node|udp-large|udp-large-node)$"

func TestIPVS_route(t *testing.T) { runAddressMode(t, "TestIPVS_route", ipvs.Route) }

func TestIPVS_dummy(t *testing.T) { runAddressMode(t, "TestIPVS_dummy", ipvs.Dummy) }

func runAddressMode(t *testing.T, name string, mode ipvs.AddressMode) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS", "^"+name+"$/^cases$/"+addressCases)
		return
	}
	conformance.Run(t, "ipvs-"+string(mode), ipvsPlane(ipvs.Options{AddressMode: mode}))
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
