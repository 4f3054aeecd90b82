package conformance

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/vm"
)

// runInTestKernel plays the cases that this kernel cannot.
func runInTestKernel(t *testing.T) {
	top, _, _ := strings.Cut(t.Name(), "/")
	output := vm.Replay(t, "SCTP", "^"+top+"$/^cases$/^sctp$")
	if !strings.Contains(output, "--- PASS: "+top+"/cases/sctp/") {
		t.Errorf("no case was played in the test kernel:\n%s", output)
	}
}
