package testbed

import (
	"errors"
	"os"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
)

// Need is a Bed that ends with the test. The test is skipped where the machine does not allow one, and fails where
// something else is in the way.
func Need(t testing.TB, s Spec) *Bed {
	t.Helper()
	b, err := New(t.Context(), s)
	skipDenied(t, map[bool]lack.Lack{true: lack.Cgroup, false: lack.Root}[s.Cgroup], err)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// NeedBPFFS is the path of a file system as BPFFS makes it, which ends with the test. Where the machine does not allow
// one, the test is skipped.
func NeedBPFFS(t testing.TB) (path string) {
	t.Helper()
	f, path, err := BPFFS()
	skipDenied(t, lack.BPFFS, err)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return path
}

func skipDenied(t testing.TB, l lack.Lack, err error) {
	t.Helper()
	if errors.Is(err, os.ErrPermission) || errors.Is(err, errors.ErrUnsupported) {
		lack.Skip(t, l, err)
	}
}
