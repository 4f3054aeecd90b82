// Package nstest runs tests in namespaces of their own, where they may do what must not concern the machine. Nothing
// of it stays, however a test ends.
//
//	Run ─► a thread in a new network namespace ─► the test
//	Root ─► the test program again, root of a new user namespace ─► the calling test
package nstest

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/thread"
	"fairlead.dev/fairlead/lab/lack"
)

// Run runs f in a new network namespace, on a goroutine whose thread goes with it. It is skipped where that is not
// allowed.
func Run(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	failed := make(chan error)
	thread.Run(func() {
		defer close(failed)
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			failed <- err
			return
		}
		f(t)
	})
	if err := <-failed; err != nil {
		lack.Skip(t, lack.Root, err)
	}
}

const rootVariable = "FAIRLEAD_TEST_ROOT" // the test that runs in its own user namespace

// Root runs the calling test again as root of a new user namespace, which has limits (namespaces(7)) and a network of
// its own. It reports whether this is that run; in the other one the test has nothing more to do.
func Root(t *testing.T) bool {
	t.Helper()
	if os.Getenv(rootVariable) == t.Name() {
		return true
	}
	self := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	self.Env = append(os.Environ(), rootVariable+"="+t.Name())
	self.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := self.CombinedOutput()
	var failed *exec.ExitError
	switch {
	case err != nil && !errors.As(err, &failed):
		lack.Skip(t, lack.UserNamespaces, err)
	case err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()):
		t.Errorf("%v\n%s", err, out)
	}
	return false
}
