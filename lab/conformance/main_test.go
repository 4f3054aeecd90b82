package conformance_test

import (
	"os"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/vm"
)

func TestMain(m *testing.M) {
	vm.Guest()
	os.Exit(m.Run())
}
