//go:build defects

package defect_test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var binaries = flag.String("binaries", "", "directory of the test binaries that ./dev defects has built")

// TestNoticed runs the tests of the table: all pass without a defect, and each fails with its own.
func TestNoticed(t *testing.T) {
	if *binaries == "" {
		t.Fatal("-binaries names no directory; run ./dev defects")
	}
	rows := table(t)
	t.Run("none", func(t *testing.T) {
		known := map[string]bool{}
		for _, r := range rows {
			if test := r.dir + " " + r.tests; !known[test] {
				known[test] = true
				t.Run(test, func(t *testing.T) { t.Parallel(); r.passes(t) })
			}
		}
	})
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) { t.Parallel(); r.fails(t) })
	}
}

func (r row) passes(t *testing.T) {
	out, status := r.run(t, "")
	if status != 0 || !r.ended("PASS", out) || strings.Contains(out, "--- SKIP: ") {
		t.Errorf("without a defect the test fails, is skipped or does not exist: exit status %d\n%s", status, out)
	}
}

// fails demands that the test itself says what is wrong. Status 2 is that of a panic, or that the time is over.
func (r row) fails(t *testing.T) {
	out, status := r.run(t, r.name)
	switch {
	case status == 0:
		t.Errorf("%s %s does not notice: %s", r.dir, r.tests, r.sentence)
	case status != 1 || !r.ended("FAIL", out) || strings.Contains(out, "panic: "):
		t.Errorf("the test ends by something else than an assertion: exit status %d\n%s", status, out)
	}
}

// ended reports whether the output has the named test, or a subtest of it, end so.
func (r row) ended(how, out string) bool {
	name := strings.NewReplacer("^", "", "$", "").Replace(r.tests)
	return regexp.MustCompile(`(?m)^ *--- ` + how + ": " + name + "[ /]").MatchString(out)
}

// run runs the test with a defect, and returns what it printed and its exit status.
func (r row) run(t *testing.T, defect string) (string, int) {
	binary, err := filepath.Abs(filepath.Join(*binaries, filepath.Base(r.dir)+".test"))
	if err != nil {
		t.Fatal(err)
	}
	const limit = 2 * time.Minute
	cmd := exec.CommandContext(t.Context(), binary, "-test.v", "-test.timeout", limit.String(), "-test.run", "^"+r.tests)
	cmd.Dir = filepath.Join(root, r.dir)
	cmd.Env = append(os.Environ(), "FAIRLEAD_DEFECT="+defect)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}
