package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/conformance"
)

func TestUserspace(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "userspace", userspace.New(userspace.Options{}))
}

func TestUserspace_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, userspace.New(userspace.Options{}))
}

func TestUserspace_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaults(t, userspace.New(userspace.Options{}))
}

// TestUserspace_nat has a kernel without TPROXY.
func TestUserspace_nat(t *testing.T) {
	t.Parallel()
	conformance.Run(t, "userspace", userspace.New(userspace.Options{Redirect: userspace.ByNAT}))
}

func TestUserspace_nat_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandom(t, userspace.New(userspace.Options{Redirect: userspace.ByNAT}))
}

func TestUserspace_nat_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaultsRedirected(t, userspace.New(userspace.Options{Redirect: userspace.ByNAT}))
}

// TestUserspace_iptables has a kernel without nf_tables.
func TestUserspace_iptables(t *testing.T) {
	t.Parallel()
	conformance.RunHiding(t, "userspace-iptables", overIPTables())
}

func overIPTables() dataplane.New {
	return userspace.Driver(userspace.Options{Redirect: userspace.ByPlane},
		conntrack.Wrap(iptables.New(iptables.Options{Backend: iptables.Legacy})), nil).Open
}
