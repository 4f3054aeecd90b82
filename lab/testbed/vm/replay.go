package vm

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/lack"
)

// Need returns the file of the test kernel. Without one the test is skipped, or fails in CI.
func Need(t testing.TB) string {
	t.Helper()
	file, err := Find()
	if err != nil {
		lack.Skip(t, lack.TestKernel, err)
	}
	return file
}

// Replay runs the calling test again, or what of it the pattern selects (of -test.run, instead of the
// test's name), in the test kernel, for this one lacks something. It fails where that fails, runs
// nothing or skips anything, and returns what it printed. The program's TestMain must call Guest.
func Replay(t *testing.T, lack string, pattern ...string) (output string) {
	t.Helper()
	if _, inside := os.LookupEnv(requestVariable); inside {
		t.Fatal("the test kernel, too, has no " + lack)
	}
	t.Logf("this kernel has no %s", lack)
	file := Need(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	selected := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	if len(pattern) > 0 {
		selected = pattern[0]
	}
	ctx, limit, cancel := deadline(t)
	defer cancel()
	var out bytes.Buffer
	m := Machine{Kernel: file, Stdout: &out, Stderr: &out,
		Args: []string{self, "-test.v", "-test.timeout", limit.String(), "-test.run", selected}}
	status, err := m.Run(ctx)
	output = out.String()
	if err != nil || status != 0 || !strings.Contains(output, "--- PASS: ") || strings.Contains(output, "--- SKIP: ") {
		t.Errorf("in the test kernel: status %d, %v\n%s", status, err, output)
	}
	return output
}

// deadline leaves the test some time to say what happened. The inner one has the shorter limit, for it
// can say more.
func deadline(t *testing.T) (ctx context.Context, inner time.Duration, cancel context.CancelFunc) {
	left := 10 * time.Minute
	if end, limited := t.Deadline(); limited {
		left = time.Until(end)
	}
	ctx, cancel = context.WithTimeout(t.Context(), left-left/20)
	return ctx, (left - left/10).Round(time.Millisecond), cancel
}
