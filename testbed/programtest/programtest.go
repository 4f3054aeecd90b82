// Package programtest compiles the program fairlead for tests that run it as a user does.
package programtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// With compiles the program, to where everybody may run it, and has run test it. It returns the exit status for
// os.Exit, and leaves nothing.
func With(run func(program string) int) (status int) {
	dir, err := os.MkdirTemp("", "fairlead-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "fairlead")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", program, "fairlead.dev/fairlead/cmd/fairlead")
	out, err := build.CombinedOutput()
	if err = errors.Join(err, os.Chmod(dir, 0o755)); err != nil { //nolint:gosec // everybody may run it
		fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
		return 1
	}
	return run(program)
}
