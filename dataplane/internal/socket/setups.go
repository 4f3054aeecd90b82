package socket

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ipOption is one that has a number for each family.
type ipOption struct {
	name   string
	v4, v6 int
}

func (o ipOption) set(fd int, v6 bool) error {
	level, option := unix.SOL_IP, o.v4
	if v6 {
		level, option = unix.SOL_IPV6, o.v6
	}
	return os.NewSyscallError("setsockopt "+o.name, unix.SetsockoptInt(fd, level, option, 1))
}

// Transparent has a socket take and send packets of addresses that are not the node's. It needs CAP_NET_ADMIN.
func Transparent(fd int, v6 bool) error {
	return ipOption{"IP_TRANSPARENT", unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT}.set(fd, v6)
}

// OriginalDestination has a UDP socket tell where each datagram was going.
func OriginalDestination(fd int, v6 bool) error {
	return ipOption{"IP_RECVORIGDSTADDR", unix.IP_RECVORIGDSTADDR, unix.IPV6_RECVORIGDSTADDR}.set(fd, v6)
}

// Free has a socket be bound to an address that is not there yet, as the own one before there is the route.
func Free(fd int, v6 bool) error {
	return ipOption{"IP_FREEBIND", unix.IP_FREEBIND, unix.IPV6_FREEBIND}.set(fd, v6)
}

// Abortive has a connection end by a reset when the process does, so that the peer does not take the data so far for
// all of it. Sockets that a listener accepts are as it is.
func Abortive(fd int, _ bool) error {
	err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	return os.NewSyscallError("setsockopt SO_LINGER", err)
}

// LatePort has the kernel choose the port of an address when it knows the destination: ports are scarce for each
// destination only.
func LatePort(fd int, _ bool) error {
	err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	return os.NewSyscallError("setsockopt IP_BIND_ADDRESS_NO_PORT", err)
}

// FromPort has the socket use the port that the client has. Once another plane has the client's next connections, the
// client takes a port that it does not use itself. If a socket of the node has that port, the socket gets the backend's
// answers. A packet for a socket of the node is not forwarded (tcp_v4_early_demux and ip_forward in the kernel). Before
// Linux 6.3, and if the client's port is not in net.ipv4.ip_local_port_range, it is any port.
//
// The port is the only one of those that the kernel may choose. Were the socket bound to it, no socket of the node
// could have it by choice of the kernel, whatever its address.
func FromPort(port uint16) Setup {
	return func(fd int, _ bool) error {
		err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_LOCAL_PORT_RANGE, int(port)<<16|int(port))
		if errors.Is(err, unix.ENOPROTOOPT) {
			return nil
		}
		return os.NewSyscallError("setsockopt IP_LOCAL_PORT_RANGE", err)
	}
}

// Shared lets several planes, of processes of one user, have a socket for the same Service.
func Shared(fd int, _ bool) error {
	return os.NewSyscallError("setsockopt SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
}

// control sets a socket of package net up.
func control(setups ...Setup) func(network, address string, c syscall.RawConn) error {
	return func(network, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			for _, setup := range setups {
				failed = errors.Join(failed, setup(int(fd), network[len(network)-1] == '6'))
			}
		})
		return errors.Join(err, failed)
	}
}

const receiveBuffer = 4 << 20 // bytes

// ReceiveMuch has as many datagrams wait in the kernel as it may: without CAP_NET_ADMIN as net.core.rmem_max allows.
func ReceiveMuch(c *net.UDPConn) {
	forced := errors.ErrUnsupported
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { // fails only if it is closed
			forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
		})
	}
	if forced != nil {
		_ = c.SetReadBuffer(receiveBuffer)
	}
}

// family appends the digit of an address's family to the name of a protocol.
func family(network string, a netip.Addr) string {
	if a.Is6() {
		return network + "6"
	}
	return network + "4"
}

// ListenTCP listens for connections that end by a reset when the process does, in the calling thread's namespace.
func ListenTCP(a netip.AddrPort, setups ...Setup) (*Conn, error) {
	return Listen(unix.IPPROTO_TCP, a, append(setups, Abortive, Lively)...)
}

// ListenUDP makes a socket for datagrams, in the calling thread's namespace.
func ListenUDP(a netip.AddrPort, setups ...Setup) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: control(setups...)}
	c, err := config.ListenPacket(context.Background(), family("udp", a.Addr()), a.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// GetOption is getsockopt with a structure of any length.
func GetOption(fd, level, name int, value []byte) error {
	length := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
