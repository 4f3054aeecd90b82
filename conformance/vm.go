package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// runInTestKernel plays the cases that this kernel cannot: it runs the test binary again, in the test
// kernel, if vm-run of that is where FAIRLEAD_VM_RUN says, or beside the repository.
func runInTestKernel(t *testing.T) {
	vm, err := vmRun()
	if err != nil {
		t.Skipf("NOT TESTED: this kernel has no SCTP, and there is no test kernel: %v (set FAIRLEAD_VM_RUN)", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	top, _, _ := strings.Cut(t.Name(), "/")
	out, err := exec.CommandContext(t.Context(), vm, "-t", "120", "--",
		self, "-test.v", "-test.run", "^"+top+"$/^cases$/^sctp$").CombinedOutput()
	played := strings.Count(string(out), "--- PASS: "+top+"/cases/sctp/")
	if err != nil || played == 0 || strings.Contains(string(out), "--- SKIP") {
		t.Errorf("in the test kernel: %v\n%s", err, out)
	}
}

// vmRun finds the program that runs another one in the test kernel.
func vmRun() (string, error) {
	if path := os.Getenv("FAIRLEAD_VM_RUN"); path != "" {
		return exec.LookPath(path)
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
	}
	return exec.LookPath(filepath.Join(dir, "../shared/test-kernel/vm-run"))
}
