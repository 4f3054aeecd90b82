package testbed

import (
	"io"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// The standard library has no SCTP. Its one-to-one sockets behave like those of TCP (RFC 6458
// section 4), so the runtime's poller serves them through os.File.

// HasProtocol reports whether this kernel has sockets of a protocol. TCP and UDP are always there,
// SCTP often is not.
func HasProtocol(p model.Protocol) bool {
	fd, err := openSocket(p, false)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

func listenSCTP(port uint16) (*os.File, error) {
	fd, err := openSocket(model.SCTP, true)
	if err != nil {
		return nil, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}))
	}
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, unix.SOMAXCONN))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "sctp"), nil
}

func acceptSCTP(l *os.File) accept {
	return func() (io.ReadWriteCloser, netip.AddrPort, error) {
		raw, err := l.SyscallConn()
		if err != nil {
			return nil, netip.AddrPort{}, err
		}
		var (
			fd     int
			from   unix.Sockaddr
			failed error
		)
		err = raw.Read(func(listener uintptr) bool {
			fd, from, failed = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return failed != unix.EAGAIN
		})
		switch {
		case err != nil: // raw.Read has no other reason
			return nil, netip.AddrPort{}, os.ErrClosed
		case failed != nil:
			return nil, netip.AddrPort{}, failed
		}
		return os.NewFile(uintptr(fd), "sctp"), addrPortOf(from), nil
	}
}
