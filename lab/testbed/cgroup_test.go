package testbed

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
)

// Cgroups of a killed process go when the next one needs a cgroup; those of other processes stay.
func TestNewCgroup_sweeps(t *testing.T) {
	others, err := newCgroup()
	skipDenied(t, lack.Cgroup, err)
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(filepath.Dir(others.dir), cgroupPrefix+"left")
	if err := os.Mkdir(left, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	ours, err := newCgroup()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was left is there: %v", err)
	}
	for _, c := range []*cgroup{others, ours} {
		if _, err := os.Stat(c.dir); err != nil {
			t.Error(err)
		}
		if err := c.close(); err != nil {
			t.Error(err)
		}
	}
}
