package ebpf_test

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/lack"
)

// openPlane is set in the environment of a process that says why no plane can be opened.
const openPlane = "FAIRLEAD_TEST_EBPF_OPEN"

func openError() string {
	_, err := ebpf.New(ebpf.Options{Cgroup: "/", Pins: "/"})(dataplane.Config{})
	return fmt.Sprint(err)
}

const anyCommand = -1

// forbid has bpf() fail in what the calling thread starts: all of it, or one command.
func forbid(command int, with unix.Errno) error {
	const load, equal, answer = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ, unix.BPF_RET
	check := unix.SockFilter{Code: equal, K: uint32(command), Jf: 1}
	if command == anyCommand {
		check = unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE} // than 0
	}
	program := []unix.SockFilter{ // over struct seccomp_data: the call, …, 16 bytes on its arguments
		{Code: load, K: 0}, {Code: equal, K: unix.SYS_BPF, Jf: 3},
		{Code: load, K: 16}, check, {Code: answer, K: unix.SECCOMP_RET_ERRNO | uint32(with)},
		{Code: answer, K: unix.SECCOMP_RET_ALLOW},
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	return os.NewSyscallError("prctl",
		unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&filter)), 0, 0))
}

// The plane names a facility that the kernel lacks in one line.
func TestLacking(t *testing.T) {
	lack.Need(t, lack.Root)
	for want, c := range map[string]struct {
		command int
		with    unix.Errno
	}{
		`not supported by this kernel: it has no eBPF \(CONFIG_BPF_SYSCALL\)`: {anyCommand, unix.ENOSYS},
		`not supported by this kernel: it runs no eBPF programs for the sockets of a cgroup \(CONFIG_CGROUP_BPF\)`: {
			unix.BPF_PROG_LOAD, unix.EINVAL,
		},
		`the kernel lets this process load no eBPF programs \(look for seccomp, .*\): .*: operation not permitted`: {
			unix.BPF_PROG_LOAD, unix.EPERM,
		},
	} {
		t.Run(c.with.Error(), func(t *testing.T) {
			t.Parallel()
			runtime.LockOSThread() // and never unlocked: the thread ends with the test
			check(t, forbid(c.command, c.with))
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), openPlane+"=1")
			out, err := cmd.CombinedOutput()
			check(t, err)
			got := strings.TrimSuffix(string(out), "\n")
			if !regexp.MustCompile("^ebpf: " + want + "$").MatchString(got) {
				t.Errorf("%q; want %q", got, want)
			}
		})
	}
}
