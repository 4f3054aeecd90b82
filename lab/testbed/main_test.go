package testbed

import (
	"os"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// helper makes the test binary a program of its own, see TestReexec.
const helper = "TESTBED_TEST_HELPER"

func TestMain(m *testing.M) {
	status, done, err := Reexec()
	switch {
	case err != nil:
		status = lack.SkipAll(lack.UserNamespaces, err)
	case done:
	case os.Getenv(helper) != "":
		status = helperMain()
	default:
		status = m.Run()
	}
	os.Exit(status)
}

// run runs a command in a place of the cluster.
func run(t testing.TB, b *Bed, place Place, args ...string) {
	t.Helper()
	out, err := b.Command(t.Context(), place, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %q: %v\n%s", place, args, err, out)
	}
}

// needSCTP runs the calling test in the test kernel if this one has no SCTP, and reports whether the
// caller shall go on here.
func needSCTP(t *testing.T) bool {
	t.Helper()
	if HasProtocol(model.SCTP) {
		return true
	}
	vm.Replay(t, "SCTP")
	return false
}
