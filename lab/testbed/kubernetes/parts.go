package kubernetes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/lack"
)

// Parts are the programs of a cluster, and the rival, in one directory: etcd, kube-apiserver,
// kube-controller-manager, kube-proxy and kubectl. They are built from the module in parts, as they are
// released, and kept in the user's cache until that module changes. Building them takes some ten
// minutes on two cores, and network where the module cache lacks them.
type Parts struct{ Dir string }

// PartsVariable names the environment variable that names a directory of parts, instead of the cache.
const PartsVariable = "FAIRLEAD_PARTS"

// Path is the file of a program.
func (p Parts) Path(program string) string { return filepath.Join(p.Dir, program) }

// part is a program and the package that it is built from.
type part struct{ name, pkg string }

func allParts() []part {
	return []part{
		{"etcd", "go.etcd.io/etcd/server/v3"},
		{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"},
		{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"},
		{"kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"},
		{"kubectl", "k8s.io/kubernetes/cmd/kubectl"},
	}
}

// NeedParts returns the parts, built if need be. Where they cannot be had the test is skipped, or fails in CI.
func NeedParts(t testing.TB) Parts {
	t.Helper()
	p, err := BuildParts(t.Context())
	if err != nil {
		lack.Skip(t, lack.Parts, err)
	}
	return p
}

// BuildParts returns the parts, which it builds if they are not in the cache. It reports work of minutes on the
// standard error. Any number of processes may call it: one builds, the others wait.
func BuildParts(ctx context.Context) (Parts, error) {
	if dir := os.Getenv(PartsVariable); dir != "" {
		return Parts{dir}, nil
	}
	b, err := newPartsBuild(os.Stderr)
	if err != nil {
		return Parts{}, fmt.Errorf("parts of a cluster: %w", err)
	}
	if err := b.ensure(ctx); err != nil {
		return Parts{}, fmt.Errorf("build the parts of a cluster (./dev parts): %w", err)
	}
	return Parts{b.dir}, nil
}

// partsBuild builds the module at source into dir.
type partsBuild struct {
	source, dir string
	parts       []part
	flags       []string
	progress    io.Writer
}

func newPartsBuild(progress io.Writer) (*partsBuild, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	source := filepath.Join(root, "lab", "testbed", "kubernetes", "parts")
	b := &partsBuild{source: source, parts: allParts(), progress: progress}
	hash := sha256.New()
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join(b.source, name))
		if err != nil {
			return nil, err
		}
		hash.Write(text)
		if name == "go.mod" {
			b.flags = buildFlags(string(text))
		}
	}
	fmt.Fprintln(hash, runtime.GOARCH, b.flags, b.parts)
	b.dir = filepath.Join(cache, "fairlead", "parts-"+hex.EncodeToString(hash.Sum(nil))[:16])
	return b, nil
}

// moduleRoot is the directory of this repository, in which tests run.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module fairlead.dev/fairlead\n") {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the working directory is not in Fairlead's repository: set " + PartsVariable)
		}
		dir = parent
	}
}

// buildFlags stamp the programs with their version, without which clients and feature gates take them
// for version 0.
func buildFlags(gomod string) []string {
	var version string
	for line := range strings.Lines(gomod) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "k8s.io/kubernetes" {
			version = f[1]
		}
	}
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	flags := []string{"-s", "-w"}
	for _, stamp := range []string{"gitVersion=" + version, "gitMajor=" + major, "gitMinor=" + minor} {
		flags = append(flags, "-X", "k8s.io/component-base/version."+stamp)
	}
	return flags
}

// ensure builds what is not there.
func (b *partsBuild) ensure(ctx context.Context) error {
	if b.done() {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(b.dir), 0o755); err != nil {
		return err
	}
	lock, err := b.lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	if b.done() {
		return nil
	}
	return b.build(ctx)
}

func (b *partsBuild) done() bool {
	_, err := os.Stat(b.dir)
	return err == nil
}

// lock waits for other builders.
func (b *partsBuild) lock(ctx context.Context) (*os.File, error) {
	for {
		lock, err := lockFile(b.dir + ".lock")
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return lock, err
		}
		select {
		case <-time.After(100 * time.Millisecond): // no event announces it
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another process that builds them: %w", ctx.Err())
		}
	}
}

// build builds one program after the other, so that it can say how far it is, and shows them all at
// once when they are complete.
func (b *partsBuild) build(ctx context.Context) error {
	start := time.Now()
	fmt.Fprintf(b.progress, "parts: building etcd, Kubernetes and kubectl, this once: some 10 minutes on 2 cores\n")
	fresh, err := os.MkdirTemp(filepath.Dir(b.dir), filepath.Base(b.dir)+".new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(fresh)
	for i, p := range b.parts {
		fmt.Fprintf(b.progress, "parts: %4.0fs  %s (%d of %d)\n", time.Since(start).Seconds(), p.name, i+1, len(b.parts))
		if err := b.buildOne(ctx, p, filepath.Join(fresh, p.name)); err != nil {
			return err
		}
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	fmt.Fprintf(b.progress, "parts: %4.0fs  done: %s\n", time.Since(start).Seconds(), b.dir)
	return os.Rename(fresh, b.dir)
}

func (b *partsBuild) buildOne(ctx context.Context, p part, to string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false",
		"-ldflags", strings.Join(b.flags, " "), "-o", to, p.pkg)
	build.Dir = b.source
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	// A test that runs out of time dies at once. Its build must not go on beside the next one.
	build.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	build.Cancel = func() error { return unix.Kill(-build.Process.Pid, unix.SIGKILL) }
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", p.name, err, out)
	}
	return nil
}
