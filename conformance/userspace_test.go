package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane/userspace"
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
