package verify_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/lab/verify"
	"fairlead.dev/fairlead/programs"
)

// lab is the program that verifies, beside the agent. Both are static: a guest has no libraries.
var lab string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "fairlead-verify-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	lab = filepath.Join(dir, "fairlead-lab")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "../../cmd/fairlead", "../cmd/fairlead-lab")
	cases := exec.Command("go", "test", "-c", "-o", filepath.Join(dir, programs.Cases), "../conformance")
	for _, c := range []*exec.Cmd{build, cases} {
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
			return 1
		}
	}
	return m.Run()
}

// few has a Service with a port on each node, and few ways to try.
const few = `
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: web, image: web}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: web, image: web}]}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30080}]}
`

func write(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// command verifies, and leaves no file.
func command(ctx context.Context, t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	temp := t.TempDir()
	t.Cleanup(func() {
		if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
			t.Errorf("left in TMPDIR: %v, %v", left, err)
		}
	})
	c := exec.CommandContext(ctx, lab, append([]string{"verify"}, args...)...)
	c.Env = append(append(os.Environ(), "TMPDIR="+temp), env...)
	return c
}

// expect runs it, and returns what is said of each mode.
func expect(t *testing.T, env []string, status int, summary string, args ...string) map[string]verify.Plane {
	t.Helper()
	c := command(t.Context(), t, env, append(args, "-f", write(t, "few.yaml", few), "-o", "json")...)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	t.Logf("%v\n%s%s", err, out, &errs)
	var r verify.Report
	if c.ProcessState.ExitCode() != status || json.Unmarshal(out, &r) != nil || !strings.Contains(r.Summary, summary) {
		t.Fatalf("want status %d, %q", status, summary)
	}
	planes := map[string]verify.Plane{}
	for _, p := range r.Planes {
		planes[p.Mode] = p
	}
	return planes
}

// A case that fails makes a mode unsafe that serves all Services, and no case at all is no answer.
func TestCases(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.UserNamespaces)
	const name = "TestNFTables/cases/affinity/ipv4/restarts"
	long := strings.Repeat("first\n", 100) + "    case_test.go:1: last " + strings.Repeat("words", 100)
	for _, c := range []struct {
		says   string
		status int
		want   []string
	}{
		{"=== RUN   " + name + "\n" + long + "\n=== RUN   TestOther\nother\n    --- FAIL: " + name + " (0.10s)\npanic: this",
			1, []string{"conformance: affinity/ipv4/restarts fails", "panic: this"}},
		{"--- FAIL: TestNFTables_vandalism (0.10s)", 1, []string{"conformance: vandalism fails"}},
		{long, 3, []string{"exit status 1"}},
	} {
		cmd := with(t, "#!/bin/sh\necho '"+c.says+"'\nexit 1\n")
		out, _ := cmd.CombinedOutput()
		for _, text := range c.want {
			if cmd.ProcessState.ExitCode() != c.status || !strings.Contains(string(out), text) {
				t.Errorf("%q: status %d, or no %q\n%s", c.says, cmd.ProcessState.ExitCode(), text, out)
			}
		}
		if words := strings.Contains(string(out), "last words"); words != strings.Contains(c.says, long) {
			t.Errorf("%q: said: %t\n%s", c.says, words, out)
		}
		if strings.Contains(string(out), "other") || strings.Count(string(out), "first") > 10 || len(out) > 2000 {
			t.Errorf("%q: too much is said:\n%s", c.says, out)
		}
	}
}

// with verifies, and a script is its cases; none: the real ones.
func with(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{programs.Agent, programs.Lab, programs.Cases} {
		if err := os.Link(filepath.Join(filepath.Dir(lab), name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if cases := filepath.Join(dir, programs.Cases); script != "" {
		if err := errors.Join(os.Remove(cases), os.WriteFile(cases, []byte(script), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	c := command(t.Context(), t, nil, "--proxy-mode", "nftables", "-f", write(t, "few.yaml", few))
	c.Path = filepath.Join(dir, programs.Lab)
	return c
}

// The configuration says which mode the node needs. The node's own place in it does not matter.
func TestHere(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.UserNamespaces)
	file := write(t, "config.yaml", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+
		"mode: iptables\nclusterCIDR: 10.99.0.0/16\nnodePortAddresses: [10.98.0.0/16]\n")
	expect(t, nil, 0, "is safe for this node's configuration (mode iptables, 1 Service)", "--config", file)
}

func TestUserMode(t *testing.T) {
	t.Parallel()
	planes := expect(t, nil, 0, "is safe for this node's configuration (modes nftables, ipvs, 1 Service)",
		"--kernel", vm.Need(t), "--proxy-mode", "nftables,ipvs")
	if len(planes) != 2 {
		t.Error(planes)
	}
}

func needEmulator(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		lack.Skip(t, lack.Emulator, err)
	}
}

// A kernel without one of its modules is not safe for a mode that needs it, and still is for another one.
func TestBroken(t *testing.T) {
	t.Parallel()
	needEmulator(t)
	planes := expect(t, []string{"FAIRLEAD_OLD_APPEND=module_blacklist=nft_numgen"}, 1, "not safe",
		"--kernel", "6.1", "--proxy-mode", "nftables,iptables")
	if p := planes["nftables"]; p.Safe || !strings.Contains(strings.Join(p.Reasons, "\n"), "numgen") {
		t.Errorf("nftables without numgen: %+v", p)
	}
	if p := planes["iptables"]; !p.Safe || p.Services != 1 || p.Ways == 0 {
		t.Errorf("iptables: %+v", p)
	}
}

// TestKernels boots one of them in a run, in two modes. The last one is a file, with its modules.
func TestKernels(t *testing.T) {
	t.Parallel()
	needEmulator(t)
	type cell struct {
		kernel, modes string
		file          bool
	}
	cells := []cell{
		{kernel: "5.10", modes: "iptables"}, // nftables and ipvs are promised from 5.13 on
		{kernel: "6.1", modes: "nftables,ipvs"},
		{kernel: "6.12", modes: "nftables,iptables"},
		{kernel: "6.12", modes: "userspace", file: true},
		{kernel: "6.12", modes: "ebpf"}, // without cases: an emulated processor takes minutes for its programs
	}
	for _, c := range sample.Of(t, len(cells), cells) {
		t.Run(fmt.Sprintf("%s %s", c.kernel, c.modes), func(t *testing.T) {
			kernel := []string{"--kernel", c.kernel}
			if c.file {
				kernel = kernelFile(t, c.kernel)
			}
			planes := expect(t, nil, 0, "Linux "+c.kernel+".", append(kernel, "--proxy-mode", c.modes)...)
			for mode := range strings.SplitSeq(c.modes, ",") {
				if p := planes[mode]; !p.Safe || p.Cases < 20 && mode != "ebpf" || p.Ways == 0 || !strings.HasPrefix(p.Release, c.kernel+".") {
					t.Errorf("%s: %+v", mode, p)
				}
			}
		})
	}
}

// kernelFile are the flags for a kernel of Debian as a machine has it: a file, and a directory.
func kernelFile(t *testing.T, version string) []string {
	t.Helper()
	boot := vm.Emulated{Kernel: version, Dir: t.TempDir(), Args: []string{lab, "--version"}} // which fetches it
	if status, err := boot.Run(t.Context()); err != nil || status != 0 {
		t.Fatal(status, err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(cache, "fairlead", "linux-"+version+".*-amd64-*", "linux"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	dir := t.TempDir()
	unpack := exec.Command("sh", "-c", "exec busybox cpio -id <\"$0\"", filepath.Join(filepath.Dir(found[0]), "modules"))
	unpack.Dir = dir
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	modules, err := filepath.Glob(filepath.Join(dir, "lib/modules/*"))
	if err != nil || len(modules) != 1 {
		t.Fatal(modules, err)
	}
	return []string{"--kernel", found[0], "--modules", modules[0]}
}

// After Ctrl-C nothing goes on.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	needEmulator(t)
	interrupted(t, command(t.Context(), t, nil, "--kernel", "6.1"), "qemu-system")
}

// Neither does what cases have started, nor do they leave files.
func TestInterrupted_cases(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.UserNamespaces)
	interrupted(t, with(t, "#!/bin/sh\ntouch $TMPDIR/file\nsleep 1000 &\nwait\n"), "sleep")
}

func interrupted(t *testing.T, c *exec.Cmd, when string) {
	t.Helper()
	mark := start(t, c, when)
	if err := c.Process.Signal(syscall.SIGINT); err != nil {
		t.Error(err)
	}
	_ = c.Wait()
	if status := c.ProcessState.ExitCode(); status != 130 {
		t.Errorf("exit status %d", status)
	}
	if left := processes(t, mark); left != "" {
		t.Errorf("still running: %s", left)
	}
}

// The cases end with it even when it is killed, and with them what they have started.
func TestKilled(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.UserNamespaces)
	c := with(t, "#!/bin/sh\nsleep 1000 &\nexec '"+filepath.Join(filepath.Dir(lab), programs.Cases)+"' \"$@\"\n")
	c.Env = append(c.Env, "TMPDIR="+t.TempDir()) // in which files stay
	mark := start(t, c, programs.Cases)
	eventually.True(t, "cases have a namespace", func() bool { return namespaces(t, mark) > 1 })
	if err := c.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = c.Wait()
	eventually.Equal(t, "what still runs", "", func() string { return processes(t, mark) })
}

// start waits until a process runs. The variable names the processes that are ours.
func start(t *testing.T, c *exec.Cmd, process string) (variable string) {
	t.Helper()
	variable = "FAIRLEAD_VERIFY_TEST=" + t.TempDir()
	c.Env = append(c.Env, variable)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, process+" runs", func() bool { return strings.Contains(processes(t, variable), process) })
	return variable
}

// processes are the names of those with a variable in their environment.
func processes(t *testing.T, variable string) (names string) {
	t.Helper()
	for _, dir := range directories(t, variable) {
		name, _ := os.ReadFile(filepath.Join(dir, "comm")) // it may have ended meanwhile
		names += string(name)
	}
	return names
}

// namespaces is in how many of the network the threads of cases are.
func namespaces(t *testing.T, variable string) int {
	t.Helper()
	found := map[string]bool{}
	for _, dir := range directories(t, variable) {
		name, _ := os.ReadFile(filepath.Join(dir, "comm"))
		threads, err := filepath.Glob(filepath.Join(dir, "task/*/ns/net"))
		if err != nil {
			t.Fatal(err)
		}
		for _, thread := range threads {
			if in, err := os.Readlink(thread); err == nil && string(name) == programs.Cases+"\n" {
				found[in] = true
			}
		}
	}
	return len(found)
}

// directories are those in /proc of processes with a variable in their environment.
func directories(t *testing.T, variable string) (found []string) {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if env, _ := os.ReadFile(name); strings.Contains(string(env), variable) {
			found = append(found, filepath.Dir(name))
		}
	}
	return found
}

func TestUsage(t *testing.T) {
	t.Parallel()
	image := write(t, "vmlinuz", "no program")
	for _, c := range []struct {
		status int
		want   string
		args   []string
	}{
		{2, "5.10, 6.1, 6.12", []string{"--kernel", "4.19"}},
		{2, "--modules", []string{"--kernel", image}},
		{2, "none of", []string{"--proxy-mode", "winkernel"}},
		{2, "missing.yaml", []string{"-f", "missing.yaml", "--kernel", "6.1"}},
		{2, "missing.yaml", []string{"--config", "missing.yaml", "--kernel", "6.1"}},
		{3, "ended", []string{"--kernel", "/bin/true"}},
	} {
		cmd := command(t.Context(), t, nil, c.args...)
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != c.status || !strings.Contains(string(out), c.want) {
			t.Errorf("%v: status %d\n%s", c.args, cmd.ProcessState.ExitCode(), out)
		}
	}
}
