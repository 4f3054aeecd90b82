package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/nftables"
)

func TestNFTables(t *testing.T) { conformance.Run(t, "nftables", conntrack.Wrap(nftables.New)) }

func TestNFTables_random(t *testing.T) { conformance.RunRandom(t, conntrack.Wrap(nftables.New)) }

func TestNFTables_faults(t *testing.T) { conformance.RunFaults(t, conntrack.Wrap(nftables.New)) }
