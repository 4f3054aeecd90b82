// Package deploy tests what is installed: the program, the image, the chart and the kustomize base, each
// with the real thing that takes it.
//
//	chart ── helm template ──► types of k8s.io/api, strictly            (objects_test.go)
//	  │                   └──► kustomize/base ── kubectl kustomize
//	  └── helm install ──► kube-apiserver: rights, pods                 (install_test.go)
//	                              │ the DaemonSet's container
//	./dev image ── layers ── bubblewrap, with what that container may ──► a testbed's node
//	  (image_test.go)          (container_test.go)                          (pod_test.go)
package deploy

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// scratch is a directory for what several tests share.
var scratch string

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(func() int { return runIn(m) })) }

func runIn(m *testing.M) int {
	var err error
	if scratch, err = os.MkdirTemp("", "fairlead-deploy-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	return m.Run()
}

// findHelm finds the helm that ./dev test names, or has it compiled, at most once in a run.
var findHelm = sync.OnceValues(func() (string, error) {
	if program := os.Getenv("FAIRLEAD_HELM"); program != "" {
		return program, nil
	}
	cmd := exec.Command("../dev", "tool", "helm")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// helm runs helm and returns its output; an error has what it complained about.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program, err := findHelm()
	if err != nil {
		lack.Skip(t, lack.Helm, err)
	}
	return output(t.Context(), program, args...)
}

// output runs a program and returns what it wrote to its standard output; an error has the rest.
func output(ctx context.Context, program string, args ...string) (string, error) {
	return outputOf(exec.CommandContext(ctx, program, args...))
}

func outputOf(cmd *exec.Cmd) (string, error) {
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return out.String(), &programError{filepath.Base(cmd.Path), err, complaints.String()}
	}
	return out.String(), nil
}

type programError struct {
	program    string
	err        error
	complaints string
}

func (e *programError) Error() string { return e.program + ": " + e.err.Error() + ": " + e.complaints }
func (e *programError) Unwrap() error { return e.err }

// cluster is a control plane without controllers, and the programs to use it.
type cluster struct {
	*kubernetes.ControlPlane
	parts kubernetes.Parts
	admin string // kubeconfig
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	parts := kubernetes.NeedParts(t)
	plane, err := kubernetes.Start(t.Context(), kubernetes.Options{Parts: parts, Controllers: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plane.Close(); err != nil {
			t.Error(err)
		}
	})
	admin, err := plane.Kubeconfig(t.TempDir(), kubernetes.Admin())
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{plane, parts, admin}
}

// kubectl runs kubectl as the user of a kubeconfig, with a standard input.
func (c *cluster) kubectl(t *testing.T, kubeconfig, stdin string, args ...string) (string, error) {
	t.Helper()
	args = append([]string{"--kubeconfig", kubeconfig, "--cache-dir", t.TempDir()}, args...)
	cmd := exec.CommandContext(t.Context(), c.parts.Path("kubectl"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	return outputOf(cmd)
}

// must is kubectl for an administrator, who does not fail.
func (c *cluster) must(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	return must(t)(c.kubectl(t, c.admin, stdin, args...))
}

// helm is helm for an administrator, who does not fail.
func (c *cluster) helm(t *testing.T, args ...string) string {
	t.Helper()
	return must(t)(helm(t, append(args, "--kubeconfig", c.admin)...))
}

func must(t *testing.T) func(out string, err error) string {
	return func(out string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
}

// equal compares two texts and shows both if they differ.
func equal(t *testing.T, got, want string) {
	t.Helper()
	if got, want = strings.TrimSpace(got), strings.TrimSpace(want); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
