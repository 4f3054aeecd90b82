package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// door lets questions in. The mode of the socket's file decides from whom.
type door struct{}

func newDoor() door { return door{} }

func (door) admit(h http.Handler) http.Handler { return h }

func (door) listen(path string) (net.Listener, error) { return listenUnix(path) }

// knock puts a question to the process that listens on a socket.
func knock(socket string, r *http.Request) (*http.Response, error) {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	return transport.RoundTrip(r)
}

// Absent reports whether it is for want of a process that listens that Ask or Order has failed.
func Absent(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) }

// listenUnix opens a socket for the owner only. One that a killed process has left is replaced, and the
// directory is made.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	listener, err := listenPrivately(path)
	if errors.Is(err, unix.EADDRINUSE) {
		if err = checkDead(path); err == nil {
			err = os.Remove(path)
		}
		if err != nil {
			return nil, err
		}
		listener, err = listenPrivately(path)
	}
	return listener, err
}

// listenPrivately has the file begin with the mode that is wanted: in Linux it takes that of the socket.
func listenPrivately(path string) (net.Listener, error) {
	var refused error
	c := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		err := socket.Control(func(fd uintptr) { refused = unix.Fchmod(int(fd), 0o600) })
		return cmp.Or(err, refused)
	}}
	return c.Listen(context.Background(), "unix", path)
}

// RemoveDeadSocket removes a control socket on which no process listens, and reports whether there was one.
func RemoveDeadSocket(path string) (bool, error) {
	if alive := checkDead(path); alive != nil {
		return false, nil //nolint:nilerr // there is none, or a process listens
	}
	return true, os.Remove(path)
}

// checkDead is an error unless a path is a socket on which no process listens. A process whose queue is full listens.
func checkDead(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket", path)
	}
	switch conn, err := net.Dial("unix", path); {
	case err == nil:
		return errors.Join(fmt.Errorf("another process listens on %s", path), conn.Close())
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("another process may listen on %s: %w", path, err)
	}
	return nil
}

// listenFree listens at an address that need not be on an interface.
func listenFree(at netip.AddrPort) (net.Listener, error) {
	l, _, err := listenAt(at, false)
	return l, err
}

// listenAt listens alone, or where another process of the same user may listen, too.
func listenAt(at netip.AddrPort, shared bool) (l net.Listener, c syscall.RawConn, err error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		c = raw
		return control(c, func(fd int) error {
			err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1)
			if err == nil && shared {
				err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
			return err
		})
	}}
	config.SetMultipathTCP(false) // which has no programs that choose a socket
	l, err = config.Listen(context.Background(), "tcp", at.String())
	return l, c, err
}

// listenShared is listenFree where another process of the same user may listen, too. New clients then come to the
// younger one of two, and the other one can end. A program tells the kernel the socket's number. If there is only one
// socket, the kernel takes that.
func listenShared(at netip.AddrPort) (net.Listener, error) {
	l, c, err := listenAt(at, true)
	if err != nil {
		return nil, err
	}
	second := unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 1}}
	err = control(c, func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &second)
	})
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func control(c syscall.RawConn, option func(fd int) error) (err error) {
	failed := c.Control(func(fd uintptr) { err = option(int(fd)) })
	return errors.Join(failed, err)
}
