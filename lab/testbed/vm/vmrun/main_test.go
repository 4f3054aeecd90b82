package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/vm"
)

// role makes the test binary vmrun itself.
const role = "VMRUN_TEST"

func TestMain(m *testing.M) {
	vm.Guest()
	if os.Getenv(role) != "" {
		os.Unsetenv(role)
		main()
	}
	os.Exit(m.Run())
}

func vmrun(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), role+"=1", vm.Variable+"="+vm.Need(t))
	return cmd
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, want string }{
		{"sh -c exit\t3", "3 "},
		{"-t 1m -m 1G -- printf %s\t a -b", "0 a -b "},
		{"-t 1s sleep 1000", "125 vmrun: the test kernel was ended before the command: not done after 1s\n"},
		{"-w /no/such/dir true", "125 vmrun: prepare the test kernel: shared directory /no/such/dir: lstat /no: no such file or directory\n"},
		{"-k /no/such/file true", "125 vmrun: start the test kernel: fork/exec /no/such/file: no such file or directory\n"},
		{"-m much true", "125 vmrun: much is no size of memory, as 512M or 4G\n"},
	} {
		t.Run(c.args, func(t *testing.T) {
			args := strings.Split(c.args, " ")
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "\t", " ")
			}
			cmd := vmrun(t, args...)
			out, _ := cmd.CombinedOutput()
			if got := fmt.Sprintf("%d %s", cmd.ProcessState.ExitCode(), out); got != c.want {
				t.Errorf("is  %s\nnot %s", got, c.want)
			}
		})
	}
}

func TestSignal(t *testing.T) {
	t.Parallel()
	for _, s := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP} {
		cmd := vmrun(t, "sh", "-c", "echo ready; sleep 1000")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(stdout, make([]byte, len("ready\n"))); err != nil {
			t.Error(err)
		}
		if err := cmd.Process.Signal(s); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()
		got := fmt.Sprintf("%d %s", cmd.ProcessState.ExitCode(), &stderr)
		if !strings.HasPrefix(got, "125 vmrun: the test kernel was ended before the command: ") {
			t.Errorf("%v: %s", s, got)
		}
	}
}
