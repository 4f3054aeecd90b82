package kubernetes

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/lab/testbed"
)

// newTinyBuild builds a module with one program.
func newTinyBuild(t *testing.T, progress *testbed.Output, program string) *partsBuild {
	t.Helper()
	source := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module tiny\n\ngo 1.26\n", "main.go": program} {
		if err := os.WriteFile(filepath.Join(source, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &partsBuild{
		source: source, dir: filepath.Join(t.TempDir(), "cache", "parts"), progress: progress,
		parts: []part{{"tiny", "tiny"}}, flags: []string{"-X", "main.version=v1.2.3"},
	}
}

// Of several builders one builds, and the others find what it has built.
func TestParts(t *testing.T) {
	t.Parallel()
	var progress testbed.Output
	b := newTinyBuild(t, &progress, "package main\nvar version string\nfunc main() { print(version) }\n")
	var builders errgroup.Group
	for range 5 {
		builders.Go(func() error { return b.ensure(t.Context()) })
	}
	if err := builders.Wait(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(Parts{b.dir}.Path("tiny")).CombinedOutput()
	if err != nil || string(out) != "v1.2.3" {
		t.Errorf("the program says %q, %v", out, err)
	}
	if n := strings.Count(progress.String(), "tiny (1 of 1)"); n != 1 {
		t.Errorf("it was built %d times:\n%s", n, progress.String())
	}
}

// A build that fails says why and leaves nothing that could be taken for parts.
func TestParts_broken(t *testing.T) {
	t.Parallel()
	var progress testbed.Output
	b := newTinyBuild(t, &progress, "package main\nfunc main() { nonsense }\n")
	if err := b.ensure(t.Context()); err == nil || !strings.Contains(err.Error(), "undefined: nonsense") {
		t.Errorf("the error is %v", err)
	}
	left, err := filepath.Glob(b.dir + "*")
	if err != nil || len(left) != 1 || left[0] != b.dir+".lock" {
		t.Errorf("there is %v, %v", left, err)
	}
}

func TestParts_wait(t *testing.T) {
	t.Parallel()
	b := newTinyBuild(t, &testbed.Output{}, "package main\nfunc main() {}\n")
	if err := os.MkdirAll(filepath.Dir(b.dir), 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := b.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.ensure(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "another process") {
		t.Errorf("the error is %v", err)
	}
}

// The module of the parts is where the build looks for it: otherwise every test that needs parts is skipped.
func TestParts_source(t *testing.T) {
	t.Parallel()
	b, err := newPartsBuild(new(testbed.Output))
	if err != nil {
		t.Fatal(err)
	}
	if flags := strings.Join(b.flags, " "); !strings.Contains(flags, "version.gitVersion=v1.") {
		t.Errorf("%s names no version of Kubernetes to stamp the programs with: flags %s", b.source, flags)
	}
}
