package programtest

import (
	"os"
	"path/filepath"
	"testing"
)

// Tests whose processes have raced fail, though each of them has passed.
func TestWith_races(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{Variable, "PATH", "GORACE"} {
		t.Setenv(name, os.Getenv(name))
	}
	t.Setenv(Variable, dir)
	reports := filepath.Join(dir, races)
	if err := os.Mkdir(reports, 0o700); err != nil {
		t.Fatal(err)
	}
	passed := func(string) int { return 0 }
	if status := With(passed); status != 0 {
		t.Errorf("status %d without a report", status)
	}
	if status := With(func(string) int { return 3 }); status != 3 {
		t.Errorf("status %d of tests that fail with status 3", status)
	}
	raced := func(string) int {
		if err := os.WriteFile(filepath.Join(reports, "report.1"), []byte("WARNING: DATA RACE\n"), 0o600); err != nil {
			t.Error(err)
		}
		return 0
	}
	if status := With(raced); status != 1 {
		t.Errorf("status %d where a process has reported a race", status)
	}
}
