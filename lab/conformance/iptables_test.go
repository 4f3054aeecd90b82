package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/lab/conformance"
)

// iptablesPlane is a back end of iptables with all the wrappers, as the daemon runs it.
func iptablesPlane(b iptables.Backend) dataplane.New {
	return localhost.Wrap(conntrack.Wrap(iptables.New(iptables.Options{Backend: b})))
}

func TestIPTablesLegacy(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "iptables", iptablesPlane(iptables.Legacy))
}

func TestIPTablesLegacy_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, iptablesPlane(iptables.Legacy))
}

func TestIPTablesLegacy_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaults(t, iptablesPlane(iptables.Legacy))
}

func TestIPTablesNFT(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "iptables", iptablesPlane(iptables.NFTables))
}

func TestIPTablesNFT_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, iptablesPlane(iptables.NFTables))
}

func TestIPTablesNFT_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaults(t, iptablesPlane(iptables.NFTables))
}
