// Package programtest compiles the programs fairlead and fairlead-lab for tests that run them as a user does.
package programtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"fairlead.dev/fairlead/programs"
)

// Variable names the environment variable that names a directory with the programs, which are not compiled then. With
// sets it for the processes of the tests: a test that is run again in the test kernel could not compile there.
const Variable = "FAIRLEAD_TEST_PROGRAMS"

// With compiles the programs, to where everybody may run them, puts them first in PATH, and has run test the agent, beside
// which the laboratory is. It returns the exit status for os.Exit, and leaves nothing.
func With(run func(agent string) int) (status int) {
	dir := os.Getenv(Variable)
	if dir == "" {
		var err error
		if dir, err = compile(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
	}
	err := errors.Join(os.Setenv(Variable, dir), os.Setenv("PATH", dir+":"+os.Getenv("PATH")))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return run(filepath.Join(dir, programs.Agent))
}

// compile makes a directory with the programs.
func compile() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "fairlead-test-"); err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/",
		"fairlead.dev/fairlead/cmd/fairlead", "fairlead.dev/fairlead/cmd/fairlead-lab")
	out, err := build.CombinedOutput()
	if err = errors.Join(err, os.Chmod(dir, 0o755)); err != nil { //nolint:gosec // everybody may run them
		return "", errors.Join(fmt.Errorf("compile the programs: %w\n%s", err, out), os.RemoveAll(dir))
	}
	return dir, nil
}
