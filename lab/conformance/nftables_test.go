package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// plane is nftables with all its wrappers, as the daemon runs it.
func plane(c dataplane.Config) (dataplane.Dataplane, error) {
	return localhost.Wrap(conntrack.Wrap(nftables.New))(c)
}

func TestNFTables(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "nftables", plane)
}

// flowtableCases are those in which a node forwards a connection that stays open, or changes what is served meanwhile.
const flowtableCases = "^(affinity|cluster-ip|dual-stack|external-local|hairpin|load-balancer|masquerade-all|multi-port|" +
	"node-port|tcp-lives|terminating|udp|udp-draining|udp-forgotten|udp-last|udp-service-gone)$"

func TestNFTables_flowtable(t *testing.T) {
	t.Parallel()
	if !testbed.HasFlowtables() {
		vm.Replay(t, "flowtables", "^TestNFTables_flowtable$/^cases$/"+flowtableCases)
		return
	}
	conformance.Run(t, "nftables", func(c dataplane.Config) (dataplane.Dataplane, error) {
		c.Flowtable = dataplane.FlowtableAlways
		return plane(c)
	})
}

func TestNFTables_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, plane)
}

func TestNFTables_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaults(t, plane)
}
