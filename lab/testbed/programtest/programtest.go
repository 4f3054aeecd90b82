// Package programtest compiles the programs fairlead and fairlead-lab for tests that run them as a user does. A test
// with the race detector gets programs with the race detector, and fails if one of their processes reports a data race,
// whatever has become of that process.
//
//	TestMain ─► With ─► go build [-race] ─► the tests ─► processes ─┐
//	              └── fails if there is a report ◄── races/report.PID
package programtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"

	"fairlead.dev/fairlead/programs"
)

// Variable names the environment variable that names a directory with the programs, which are not compiled then. With
// sets it for the processes of the tests: a test that is run again in the test kernel could not compile there.
const Variable = "FAIRLEAD_TEST_PROGRAMS"

// With compiles the programs, to where all users may run them, puts them first in PATH, and has run test the agent. The
// laboratory is beside it. It returns the exit status for os.Exit, and leaves nothing.
func With(run func(agent string) int) (status int) {
	return with(run, programs.Agent, programs.Lab)
}

// WithAgent is With for tests that need no laboratory.
func WithAgent(run func(agent string) int) (status int) { return with(run, programs.Agent) }

func with(run func(agent string) int, names ...string) (status int) {
	dir := os.Getenv(Variable)
	if dir == "" {
		var err error
		if dir, err = compile(names); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
	}
	err := errors.Join(os.Setenv(Variable, dir), os.Setenv("PATH", dir+":"+os.Getenv("PATH")),
		os.Setenv("GORACE", os.Getenv("GORACE")+" log_path="+filepath.Join(dir, races, "report")))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	status = run(filepath.Join(dir, programs.Agent))
	if err := raced(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return status
}

// races is the directory beside the programs in which their processes report data races.
const races = "races"

// packageOf is where a program is.
func packageOf(name string) string {
	if name == programs.Lab {
		return "fairlead.dev/fairlead/lab/cmd/" + name
	}
	return "fairlead.dev/fairlead/cmd/" + name
}

// compile makes a directory with programs.
func compile(names []string) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "fairlead-test-"); err != nil {
		return "", err
	}
	args := []string{"build", "-buildvcs=false", fmt.Sprintf("-race=%t", detectsRaces()), "-o", dir + "/"}
	for _, name := range names {
		args = append(args, packageOf(name))
	}
	if out, failed := exec.Command("go", args...).CombinedOutput(); failed != nil {
		err = fmt.Errorf("compile the programs: %w\n%s", failed, out)
	}
	reports := filepath.Join(dir, races)
	err = errors.Join(err, os.Mkdir(reports, 0o700), os.Chmod(reports, 0o777|os.ModeSticky), // also for other users
		os.Chmod(dir, 0o755)) //nolint:gosec // all users may run them
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// detectsRaces reports whether this process was compiled with -race.
func detectsRaces() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// raced is an error with what processes have reported.
func raced(dir string) error {
	reports, err := filepath.Glob(filepath.Join(dir, races, "*"))
	errs := []error{err}
	for _, file := range reports {
		text, err := os.ReadFile(file)
		errs = append(errs, err, fmt.Errorf("a process of these tests has a data race:\n%s", text))
	}
	return errors.Join(errs...)
}
