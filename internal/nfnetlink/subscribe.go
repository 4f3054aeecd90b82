package nfnetlink

import (
	"os"

	"golang.org/x/sys/unix"
)

// Subscribe opens a socket, in the network namespace of the calling thread, to which the kernel sends what it tells
// groups of a netlink protocol. Datagrams wait in a buffer of so many bytes. Of the flags SOCK_NONBLOCK lets goroutines
// wait at the file.
func Subscribe(protocol, flags, buffer int, groups ...uint) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := os.NewFile(uintptr(fd), "netlink")
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer) // the system's limit is enough for most
	}
	address := unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	for _, g := range groups {
		address.Groups |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &address); err != nil {
		_ = s.Close()
		return nil, os.NewSyscallError("bind", err)
	}
	return s, nil
}
