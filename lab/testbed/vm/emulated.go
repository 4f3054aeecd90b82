package vm

import (
	"context"
	_ "embed" // old
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

//go:embed old
var old string

// Debian are the versions for amd64 that old knows.
var Debian = []string{"5.10", "6.1", "6.12"}

// Emulated runs a program in a kernel for amd64, of Debian or any other, that qemu emulates: what the script old does.
type Emulated struct {
	Kernel         string   // a version that old knows, or a file
	Modules        string   // of a file: its directory /lib/modules/RELEASE
	Dir            string   // its directory testdata is the program's working directory
	Args           []string // a file of this machine, and its arguments
	Stdout, Stderr io.Writer
}

// failed is the exit status of old where there is none of the program.
const failed = 125

// Run returns the exit status of the program. Nothing goes on after it, unless this process is killed.
func (e Emulated) Run(ctx context.Context) (status int, err error) {
	for _, needed := range []struct{ program, pkg string }{
		{"bash", "bash"}, {"qemu-system-x86_64", "qemu-system-x86"}, {"busybox", "busybox-static"}, {"dpkg-deb", "dpkg"},
		{"/usr/lib/apt/apt-helper", "apt"}, {"ip", "iproute2"},
	} {
		if _, err := exec.LookPath(needed.program); err != nil {
			return 0, fmt.Errorf("%s is not installed; Debian has it in the package %s: %w", needed.program, needed.pkg, err)
		}
	}
	c := exec.CommandContext(ctx, "bash", append([]string{"-c", old, "old", e.Kernel, e.Dir}, e.Args...)...)
	c.Stdout, c.Stderr = e.Stdout, e.Stderr
	if e.Modules != "" {
		c.Env = append(os.Environ(), "FAIRLEAD_OLD_MODULES="+e.Modules)
	}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a group that gets the signal as one
	c.Cancel = func() error { return unix.Kill(-c.Process.Pid, unix.SIGTERM) }
	err = c.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case errors.As(err, &exit) && exit.ExitCode() >= 0 && exit.ExitCode() != failed:
		return exit.ExitCode(), nil
	case err != nil:
		return 0, fmt.Errorf("the emulation of Linux %s has failed: %w", e.Kernel, err)
	}
	return 0, nil
}
