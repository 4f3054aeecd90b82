package main

import (
	"os/exec"
	"strings"
	"testing"
)

// The agent carries no laboratory, and no test framework.
func TestDependencies(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "fairlead.dev/fairlead/cmd/fairlead").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range strings.Fields(string(out)) {
		if strings.HasPrefix(pkg, "fairlead.dev/fairlead/lab") || pkg == "testing" {
			t.Errorf("the agent depends on %s", pkg)
		}
	}
}
