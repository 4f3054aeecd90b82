package testbed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"fairlead.dev/fairlead/lab/eventually"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// BPFFS makes a file system of type bpf that is mounted nowhere. It is there, below the path that is returned, as long
// as the file is open in this process.
func BPFFS() (f *os.File, path string, err error) { return detached("bpf") }

// MountBPFFS mounts such a file system for commands of the node that start from now on alone. It is gone
// when they and the bed are, however this process ends.
func (b *Bed) MountBPFFS(dir string) error {
	h, err := b.host(Node)
	if err != nil {
		return err
	}
	return h.at(func() error { // on the thread that starts them
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "")
		}
		if err == nil {
			err = os.MkdirAll(dir, 0o700)
		}
		if err == nil {
			err = unix.Mount("bpf", dir, "bpf", 0, "")
		}
		if err != nil {
			return fmt.Errorf("mount a file system of type bpf at %s: %w", dir, err)
		}
		return nil
	})
}

// detached makes a file system of a type that is mounted nowhere.
func detached(kind string) (f *os.File, path string, err error) {
	context, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, "", os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, "", os.NewSyscallError("fsconfig", err)
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, "", os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(mount), kind), fmt.Sprintf("/proc/self/fd/%d", mount), nil
}

// cgroup is one of version 2, for threads: those that join it are in it, whatever the rest of the process is in. The
// sockets that they open are in it as well, and with them the programs that are attached to it.
type cgroup struct {
	dir  string
	lock *os.File // the directory; a process that can lock it may remove it
}

const cgroupPrefix = "fairlead-test-"

// newCgroup makes one below the process's own, and removes those of processes that were killed.
func newCgroup() (*cgroup, error) {
	own, err := ownCgroup()
	if err != nil {
		return nil, err
	}
	sweepCgroups(own)
	for {
		c, err := tryCgroup(own)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, fs.ErrNotExist) { // another process may have swept it
			return c, err
		}
	}
}

func tryCgroup(own string) (*cgroup, error) {
	dir, err := os.MkdirTemp(own, cgroupPrefix)
	if err != nil {
		return nil, err
	}
	c := &cgroup{dir: dir}
	if c.lock, err = lockDir(dir); err == nil {
		err = os.WriteFile(filepath.Join(dir, "cgroup.type"), []byte("threaded"), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a cgroup for threads: %w", err), c.close())
	}
	return c, nil
}

// lockDir locks a directory until it is closed, which the kernel does when the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "lock", Path: dir, Err: err}
	}
	return f, nil
}

// SweepCgroups removes what processes that were killed have left, if they were in the cgroup of this one.
func SweepCgroups() {
	if own, err := ownCgroup(); err == nil {
		sweepCgroups(own)
	}
}

// sweepCgroups removes cgroups that are not locked. It ignores those that are in use or cannot be removed.
func sweepCgroups(own string) {
	all, _ := filepath.Glob(filepath.Join(own, cgroupPrefix+"*"))
	for _, dir := range all {
		if lock, err := lockDir(dir); err == nil {
			_ = os.Remove(dir)
			lock.Close()
		}
	}
}

func ownCgroup() (string, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	_, path, ok := strings.Cut(string(own), "0::/")
	for _, m := range mounts {
		if ok && m.FSType == "cgroup2" {
			path, _, _ = strings.Cut(path, "\n")
			return filepath.Join(m.MountPoint, path), nil
		}
	}
	return "", fmt.Errorf("no control groups of version 2: %w", errors.ErrUnsupported)
}

// join moves the calling thread.
func (c *cgroup) join() error {
	if c == nil {
		return nil
	}
	if err := os.WriteFile(filepath.Join(c.dir, "cgroup.threads"), []byte("0"), 0); err != nil {
		return fmt.Errorf("join cgroup: %w", err)
	}
	return nil
}

// close waits for the threads to end, which they do in the background.
func (c *cgroup) close() error {
	if c == nil {
		return nil
	}
	defer c.lock.Close()
	return eventually.Poll(context.Background(), func() error {
		if err := os.Remove(c.dir); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}
