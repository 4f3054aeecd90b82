package kubernetes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// scratch is a temporary directory that goes away even if its process is killed: the next process that makes one
// removes those without a lock.
type scratch struct {
	path string
	lock *os.File
}

const scratchPattern = "fairlead-control-plane-"

func newScratch() (*scratch, error) {
	sweep()
	for {
		path, err := os.MkdirTemp("", scratchPattern)
		if err != nil {
			return nil, err
		}
		name := filepath.Join(path, "lock")
		lock, err := lockFile(name)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if _, gone := os.Stat(name); err == nil && gone == nil {
			return &scratch{path, lock}, nil
		}
		lock.Close() // another process's sweep had the lock first
	}
}

func (s *scratch) remove() error {
	defer s.lock.Close()
	return os.RemoveAll(s.path)
}

// sweep removes the directories of processes that were killed. It leaves those that it may not remove.
func sweep() {
	stale, _ := filepath.Glob(filepath.Join(os.TempDir(), scratchPattern+"*", "lock"))
	for _, name := range stale {
		if lock, err := lockFile(name); err == nil {
			_ = os.RemoveAll(filepath.Dir(name))
			lock.Close()
		}
	}
}

// lockFile opens a file and locks it until it is closed. Where another process has the lock the error is EWOULDBLOCK.
func lockFile(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return f, nil
}

// reservedPort is a port of the loopback address that stays this process's while the API server is
// away: the socket is bound and never listens.
type reservedPort struct {
	fd   int
	port uint16
}

func reservePort() (*reservedPort, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	p := &reservedPort{fd: fd}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		var got unix.Sockaddr
		if got, err = unix.Getsockname(fd); err == nil {
			p.port = uint16(got.(*unix.SockaddrInet4).Port)
			return p, nil
		}
	}
	unix.Close(fd)
	return nil, fmt.Errorf("reserve a port of the loopback address: %w", err)
}

func (p *reservedPort) release() { unix.Close(p.fd) }
