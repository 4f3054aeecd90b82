package vm_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/vm"
)

// role makes the test binary another program.
const role = "KERNEL_TEST_ROLE"

func TestMain(m *testing.M) {
	vm.Guest()
	switch os.Getenv(role) {
	case "power off":
		fmt.Println(unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	case "runner":
		fmt.Println(vm.Machine{Args: os.Args[1:], Stdout: os.Stdout}.Run(context.Background()))
	default:
		os.Exit(m.Run())
	}
}

// run is for commands that come to an end.
func run(t *testing.T, m vm.Machine) (status int, stdout, stderr string) {
	t.Helper()
	m.Kernel = vm.Need(t)
	var out, errs bytes.Buffer
	m.Stdout, m.Stderr = &out, &errs
	status, err := m.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return status, out.String(), errs.String()
}

func sh(script string) []string { return []string{"sh", "-c", script} }

func TestStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{sh("echo out; echo err >&2"), "0 out||err|"},
		{sh("printf 'no newline'; exit 7"), "7 no newline|"},
		{sh("kill -KILL $$"), "137 |"},
		{sh("kill -TERM $$"), "143 |"},
		{[]string{"no-such-program"}, `127 |test kernel: exec: "no-such-program": executable file not found in $PATH|`},
		{sh("sleep 1000 & setsid sleep 1000 & echo leaves two"), "0 leaves two||"},
		{sh("(sleep 0.2; echo late) & wait"), "0 late||"},
		{sh("cat; id -u; hostname; cat /sys/class/net/lo/flags"), "0 0|test-kernel|0x9||"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			status, stdout, stderr := run(t, vm.Machine{Args: c.args})
			got := strings.ReplaceAll(fmt.Sprintf("%d %s|%s", status, stdout, stderr), "\n", "|")
			if strings.TrimRight(got, "|") != strings.TrimRight(c.want, "|") {
				t.Errorf("is  %s\nnot %s", got, c.want)
			}
		})
	}
}

// TestBytes: output is passed as it is, however much and whichever bytes.
func TestBytes(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := sha256.New()
	f, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.Copy(want, f); err != nil {
		t.Fatal(err)
	}
	got := sha256.New()
	m := vm.Machine{Kernel: vm.Need(t), Args: []string{"cat", self}, Stdout: got}
	if status, err := m.Run(t.Context()); err != nil || status != 0 {
		t.Error(status, err)
	}
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Error("the test binary's bytes did not come out as they are")
	}
}

func TestSurroundings(t *testing.T) {
	t.Setenv("KERNEL_TEST", "two words, ä and\na 'line'")
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	if err := os.WriteFile("program", []byte("#!/bin/sh\npwd\necho \"$KERNEL_TEST\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, stdout, stderr := run(t, vm.Machine{Args: []string{"./program"}})
	if want := dir + "\n" + os.Getenv("KERNEL_TEST") + "\n"; stdout != want || stderr != "" {
		t.Errorf("is\n%s%s\nnot\n%s", stdout, stderr, want)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	shared := filepath.Join(dir, "shared, with others ä")
	for _, d := range []string{shared, filepath.Join(dir, "other")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, "old"), []byte("old\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, "gone"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	script := `for d in "$0/shared, with others ä" "$0/other"; do
		cd "$d" && cat old && rm gone && echo new >>old && mkdir sub && seq 100000 >sub/new && tail -n 1 old sub/new
	done; touch /usr/fairlead-kernel-test`
	_, stdout, stderr := run(t, vm.Machine{Args: append(sh(script), dir), Shared: []string{shared}})
	each := "old\n==> old <==\nnew\n\n==> sub/new <==\n100000\n"
	if stdout != each+each || stderr != "" {
		t.Errorf("the command says\n%s%s", stdout, stderr)
	}
	out, err := exec.Command("sh", "-c", `cd "$0" && find . -type f | LC_ALL=C sort | xargs -d '\n' wc -c`, dir).Output()
	want := `4 ./other/old
588895 ./shared, with others ä/sub/new
8 ./shared, with others ä/old
0 ./other/gone`
	if got := lines(string(out)); err != nil || got != lines(want) {
		t.Errorf("afterwards there is\n%s", got)
	}
	if _, err := os.Stat("/usr/fairlead-kernel-test"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the command has written on this machine: %v", err)
	}
}

// lines sorts what wc prints, without its sum.
func lines(text string) string {
	var all []string
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); !strings.HasSuffix(l, " total") {
			all = append(all, l)
		}
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

func TestWrongShares(t *testing.T) {
	t.Parallel()
	file := vm.Need(t)
	for _, name := range []string{"/", "/no/such/dir", "/etc/passwd"} {
		m := vm.Machine{Kernel: file, Args: []string{"true"}, Shared: []string{name}}
		if status, err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: status %d, %v", name, status, err)
		}
	}
}

func TestNoStatus(t *testing.T) {
	t.Setenv(role, "power off")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	m := vm.Machine{Kernel: vm.Need(t), Args: []string{self}}
	if status, err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "ended before the command") {
		t.Errorf("status %d, %v", status, err)
	}
	m = vm.Machine{Kernel: vm.Need(t), Args: []string{"true"}, Memory: "8M"}
	if status, err := m.Run(t.Context()); err == nil || !strings.Contains(strings.ToLower(err.Error()), "memory") {
		t.Errorf("status %d, %v", status, err)
	}
	m = vm.Machine{Kernel: "/bin/true", Args: []string{"true"}}
	if status, err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "ended before the command") {
		t.Errorf("status %d, %v", status, err)
	}
}

// TestWriterFails: a machine whose output is not read comes to an end.
func TestWriterFails(t *testing.T) {
	t.Parallel()
	read, write := io.Pipe()
	read.CloseWithError(errors.New("enough"))
	m := vm.Machine{Kernel: vm.Need(t), Args: sh("echo; sleep 1000"), Stdout: write}
	if status, err := m.Run(t.Context()); err == nil || err.Error() != "pass the command's output on: enough" {
		t.Errorf("status %d, %v", status, err)
	}
}

// events is a writer whose reader learns when the command has come so far.
type events chan string

func (e events) Write(b []byte) (int, error) {
	e <- string(b)
	return len(b), nil
}

// TestTwo: two machines run at once, each with its own network, until their contexts end.
func TestTwo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // names what is ours
	file := vm.Need(t)
	ctx, stop := context.WithCancelCause(t.Context())
	ended := make(chan error)
	output := make(events)
	for range 2 {
		go func() {
			m := vm.Machine{Kernel: file, Stdout: output, Stderr: output,
				Args: sh("ip link add ours type dummy && echo ready; sleep 1000")}
			_, err := m.Run(ctx)
			ended <- err
		}()
	}
	for range 2 {
		select {
		case got := <-output:
			if got != "ready\n" {
				t.Error(got)
			}
		case err := <-ended:
			t.Fatal(err)
		}
	}
	stop(errors.New("that will do"))
	for range 2 {
		if err := <-ended; err == nil || !strings.HasSuffix(err.Error(), ": that will do") {
			t.Error(err)
		}
	}
	expectNothing(t, os.Getenv("TMPDIR"))
}

// TestKilled: a program that is killed leaves no kernel behind.
func TestKilled(t *testing.T) {
	vm.Need(t)
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "sh", "-c", "echo ready; sleep 1000")
	cmd.Env = append(os.Environ(), role+"=runner", "TMPDIR="+dir)
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(output, ready); err != nil || string(ready) != "ready\n" {
		t.Errorf("%q, %v", ready, err)
	}
	if processes(t, dir) == "" {
		t.Error("this test does not find the kernel's processes")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	// They are not our children, so nothing tells of their end.
	eventually.Equal(t, "processes of the kernel", "", func() string { return processes(t, dir) })
}

// expectNothing fails if there are files in the directory, or processes that know it.
func expectNothing(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil || len(files) > 0 {
		t.Errorf("left in TMPDIR: %v, %v", files, err)
	}
	if left := processes(t, dir); left != "" {
		t.Errorf("still running:\n%s", left)
	}
}

// processes are the command lines of kernels with the directory in them.
func processes(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, name := range names {
		line, _ := os.ReadFile(name) // it may have ended meanwhile
		if strings.Contains(string(line), "uml_dir="+dir) {
			found = append(found, name+": "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return strings.Join(found, "\n")
}
