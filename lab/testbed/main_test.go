package testbed

import (
	"fmt"
	"os"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// helper makes the test binary a program of its own, see TestReexec.
const helper = "TESTBED_TEST_HELPER"

func TestMain(m *testing.M) {
	status, done, err := Reexec()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "ALL TESTS SKIPPED:", err)
	case done:
	case os.Getenv(helper) != "":
		status = helperMain()
	default:
		status = m.Run()
	}
	os.Exit(status)
}

// newBed is a cluster that ends with the test.
func newBed(t testing.TB, s Spec) *Bed {
	t.Helper()
	b, err := New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
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
