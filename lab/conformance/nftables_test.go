package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/conformance"
)

// plane is nftables with all its wrappers, as the daemon runs it.
func plane(c dataplane.Config) (dataplane.Dataplane, error) {
	return localhost.Wrap(conntrack.Wrap(nftables.New))(c)
}

func TestNFTables(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "nftables", plane)
}

func TestNFTables_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, plane)
}

func TestNFTables_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaults(t, plane)
}
