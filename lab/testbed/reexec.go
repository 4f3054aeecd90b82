package testbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// reexeced is set in the environment of the program that Reexec starts.
const reexeced = "FAIRLEAD_USER_NAMESPACE"

// Reexec makes a Bed possible without root. If this process may not make network namespaces, it runs the same program
// with the same arguments in a new user namespace, in which it is root. It waits for its end and returns its exit
// status: the caller then exits with it.
//
//	if status, done, err := testbed.Reexec(); done || err != nil { … os.Exit(status) }
//
// The user namespace comes with a network namespace, of which only the loopback interface is of use.
//
// The error says what to change if the system allows neither.
//
// In the test kernel, process 1 does its work here, see vm.Guest.
func Reexec() (status int, done bool, err error) {
	vm.Guest()
	denied := tryNetns()
	if denied == nil {
		return 0, false, ownLoopback()
	}
	err = errors.New("their root may not either")
	if os.Getenv(reexeced) == "" {
		status, err = runInUserns()
	}
	if err != nil {
		return 1, false, fmt.Errorf("a virtual cluster needs root (%w) or unprivileged user namespaces (%w): "+
			"run as root, or try sysctl -w %s", denied, err, usernsSysctl())
	}
	return status, true, nil
}

// RunTests is the body of a TestMain whose tests need a Bed: it runs them, by Reexec if need be, and
// returns the exit status. Where no Bed can be made, the report of the run lists them as skipped.
func RunTests(run func() int) (status int) {
	status, done, err := Reexec()
	switch {
	case err != nil:
		status = lack.SkipAll(lack.UserNamespaces, err)
	case !done:
		status = run()
	}
	return status
}

// ownLoopback sets the loopback interface up in the network namespace that Reexec has made.
func ownLoopback() error {
	if os.Getenv(reexeced) == "" {
		return nil
	}
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	return nil
}

// tryNetns finds out whether this process may make and configure a network namespace.
func tryNetns() error {
	n, err := newNetns(routerSysctls())
	if err != nil {
		return err
	}
	n.close()
	return nil
}

// runInUserns runs this program again and passes signals on to it.
func runInUserns() (status int, err error) {
	runtime.LockOSThread() // its end would kill the child: see Pdeathsig in prctl(2)
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), reexeced+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   unix.SIGKILL,
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if s == unix.SIGTERM || !inForeground() {
				_ = cmd.Process.Signal(s) // it may have ended meanwhile
			}
		case err := <-ended:
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				return exitStatus(exit), nil
			}
			return 0, err
		}
	}
}

// inForeground reports whether the terminal's own signals (Ctrl-C) reach the child without our help.
func inForeground() bool {
	group, err := unix.IoctlGetInt(int(os.Stdin.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// exitStatus is what a shell would report.
func exitStatus(e *exec.ExitError) int {
	if w, ok := e.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return e.ExitCode()
}

// usernsSysctl is the setting that stands in the way on this machine, as far as it can be told.
func usernsSysctl() string {
	for _, s := range []struct{ file, setting string }{
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "kernel.apparmor_restrict_unprivileged_userns=0"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "kernel.unprivileged_userns_clone=1"},
	} {
		if _, err := os.Stat(s.file); err == nil {
			return s.setting
		}
	}
	return "user.max_user_namespaces=10000"
}
