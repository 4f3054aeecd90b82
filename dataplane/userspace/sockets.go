package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// transparent has a socket take and send packets of addresses that are not the node's. It needs CAP_NET_ADMIN.
func transparent(network, _ string, c syscall.RawConn) error {
	return control(c, func(fd int) error {
		level, option := unix.SOL_IP, unix.IP_TRANSPARENT
		if network[len(network)-1] == '6' {
			level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		return os.NewSyscallError("setsockopt IP_TRANSPARENT", unix.SetsockoptInt(fd, level, option, 1))
	})
}

// original has a UDP socket tell where each datagram was going.
func original(network, _ string, c syscall.RawConn) error {
	return errors.Join(transparent(network, "", c), control(c, func(fd int) error {
		level, option := unix.SOL_IP, unix.IP_RECVORIGDSTADDR
		if network[len(network)-1] == '6' {
			level, option = unix.SOL_IPV6, unix.IPV6_RECVORIGDSTADDR
		}
		return os.NewSyscallError("setsockopt IP_RECVORIGDSTADDR", unix.SetsockoptInt(fd, level, option, 1))
	}))
}

// abortive has a connection end by a reset when the process does, so that nobody takes what it has got for all there
// is. Sockets that a listener accepts are as it is.
func abortive(c syscall.RawConn) error {
	return control(c, func(fd int) error {
		err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		return os.NewSyscallError("setsockopt SO_LINGER", err)
	})
}

// outgoing is for connections of TCP. The kernel is to choose the port of a client's address when it knows the
// destination: ports are scarce for each destination only.
func outgoing(network, address string, c syscall.RawConn) error {
	return errors.Join(transparent(network, address, c), abortive(c), control(c, latePort))
}

// outgoingFrom is outgoing from the port that the client has. When another plane has its next connections, the client
// takes a port that it does not use, and answers of a backend go to whoever has that port: a packet for a socket of the
// node is not forwarded (tcp_v4_early_demux and ip_forward in the kernel). Before Linux 6.3, and if the client's port
// is not in net.ipv4.ip_local_port_range, it is any port.
//
// The port is the only one of those that the kernel may choose. Were the socket bound to it, no socket of the node
// could have it by choice of the kernel, whatever its address.
func outgoingFrom(port uint16) func(network, address string, c syscall.RawConn) error {
	return func(network, address string, c syscall.RawConn) error {
		return errors.Join(outgoing(network, address, c), control(c, func(fd int) error {
			err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_LOCAL_PORT_RANGE, int(port)<<16|int(port))
			if errors.Is(err, unix.ENOPROTOOPT) {
				return nil
			}
			return os.NewSyscallError("setsockopt IP_LOCAL_PORT_RANGE", err)
		}))
	}
}

func latePort(fd int) error {
	const option = unix.IP_BIND_ADDRESS_NO_PORT
	return os.NewSyscallError("setsockopt IP_BIND_ADDRESS_NO_PORT", unix.SetsockoptInt(fd, unix.SOL_IP, option, 1))
}

// shared lets several planes, of processes of one user, have a socket for the same Service.
func shared(network, address string, c syscall.RawConn) error {
	return errors.Join(transparent(network, address, c), control(c, func(fd int) error {
		return os.NewSyscallError("setsockopt SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	}))
}

func control(c syscall.RawConn, f func(fd int) error) error {
	var failed error
	if err := c.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// family appends the digit of an address's family to the name of a protocol.
func family(network string, a netip.Addr) string {
	if a.Is6() {
		return network + "6"
	}
	return network + "4"
}

func listenTCP(a netip.AddrPort, setup func(string, string, syscall.RawConn) error) (*net.TCPListener, error) {
	config := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
		return errors.Join(setup(network, address, c), abortive(c))
	}}
	config.SetMultipathTCP(false) // clients would not find the other paths
	l, err := config.Listen(context.Background(), family("tcp", a.Addr()), a.String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

func listenUDP(a netip.AddrPort, setup func(string, string, syscall.RawConn) error) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: setup}
	c, err := config.ListenPacket(context.Background(), family("udp", a.Addr()), a.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// unmapped is an address as rows have it.
func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
