package testbed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Sockets are made here and not by package net. That has no SCTP, whose one-to-one sockets behave like those of TCP
// (RFC 6458 section 4). And it finds out only once whether there is IPv6, perhaps in a namespace that has none. The
// runtime's poller serves them through os.File.

// openSocket makes a non-blocking socket in the calling thread's namespace, where it stays.
func openSocket(p model.Protocol, v6 bool) (int, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if v6 {
		family = unix.AF_INET6
	}
	if p == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(p))
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ESOCKTNOSUPPORT) {
		return 0, fmt.Errorf("this kernel has no %s: %w", p, err)
	}
	return fd, os.NewSyscallError("socket", err)
}

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

// HasFlowtables reports whether this kernel's nf_tables has flowtables.
func HasFlowtables() bool {
	const add = "add table ip t; add flowtable ip t f { hook ingress priority 0; devices = { lo }; }"
	return exec.Command("nft", "--check", add).Run() == nil
}

// listenSocket makes a socket that takes packets of both families on a port.
func listenSocket(p PodPort) (*os.File, error) {
	fd, err := openSocket(p.Protocol, true)
	if err != nil {
		return nil, err
	}
	set := func(level, option, value int) {
		if err == nil {
			err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, level, option, value))
		}
	}
	set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	if p.Protocol == model.UDP {
		set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1) // for fromDestination
	} else {
		set(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet6{Port: int(p.Port)}))
	}
	if err == nil && p.Protocol != model.UDP {
		err = os.NewSyscallError("listen", unix.Listen(fd, unix.SOMAXCONN))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), p.String()), nil
}

// accept waits for a listening socket's next connection.
func accept(listener *os.File) (*os.File, netip.AddrPort, error) {
	raw, err := listener.SyscallConn()
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
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	return os.NewFile(uintptr(fd), "connection"), addrPortOf(from), nil
}

// sourcePorts hands out the ephemeral ports of a place in turn, those of each protocol by itself. A port that the
// kernel picks may be one that it gave away a moment ago. For UDP it picks at random. For TCP it goes on from the last
// one, but from somewhere else every ten seconds (secure_ipv4_port_ephemeral in net/core/secure_seq.c). The connection
// tracking on the node would take the new flow for the old one, and a UDP flow would go to the old one's backend. So
// does a TCP connection where the old one was never answered. If that was not translated, the new one is not translated
// either.
type sourcePorts [256]atomic.Uint32 // by protocol

func (s *sourcePorts) next(p model.Protocol) uint16 {
	const first, count = 32768, 28232 // net.ipv4.ip_local_port_range by default
	return uint16(first + s[p].Add(1)%count)
}

// connect opens a connection from a place, and notes its port. The file is its owner's to close, which resets it.
func (h *host) connect(ctx context.Context, p *Probe) (*os.File, error) {
	var fd int
	err := h.at(func() (err error) {
		fd, err = openSocket(p.Protocol, p.To.Addr().Is6())
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := h.prepare(fd, p); err != nil {
		unix.Close(fd)
		return nil, err
	}
	err = unix.Connect(fd, sockaddr(p.To))
	f := os.NewFile(uintptr(fd), p.Protocol.String())
	if errors.Is(err, unix.EINPROGRESS) {
		err = awaitConnection(ctx, f, time.Now().Add(p.Timeout))
	}
	if err != nil {
		closeNow(f)
		return nil, os.NewSyscallError("connect", err)
	}
	return f, nil
}

// closeNow ends a connection before it returns, so that its port can be used again. A child process has the file, too,
// from its fork until its program begins.
func closeNow(f *os.File) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f.Close()
}

// prepare sets what must be set before connect.
func (h *host) prepare(fd int, p *Probe) error {
	if p.Protocol != model.UDP {
		// A reset instead of TIME_WAIT, of which a place would soon have too many.
		err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		if err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if p.Protocol != model.TCP { // TCP takes ICMP errors for final while it connects, others do not
		level, option := unix.IPPROTO_IP, unix.IP_RECVERR
		if p.To.Addr().Is6() {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
		}
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if p.Protocol == model.SCTP {
		if err := oneAddress(fd); err != nil {
			return err
		}
	}
	return h.bind(fd, p)
}

// oneAddress keeps an SCTP client to the address that it connects to. A server tells it all of its own, and by
// default they are tried after some seconds (RFC 9260 section 8.3); those of a pod behind a Service do not know the
// Service's port, and their answer ends the association.
func oneAddress(fd int) error {
	const (
		peerAddrParams   = 9 // SCTP_PEER_ADDR_PARAMS of include/uapi/linux/sctp.h, which package unix does not have
		disableHeartbeat = 2
		size, flags      = 156, 146
	)
	params := make([]byte, size)
	binary.NativeEndian.PutUint32(params[flags:], disableHeartbeat)
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, unix.IPPROTO_SCTP, peerAddrParams, string(params)))
}

// bind gives the socket its source port: the wanted one or the next.
func (h *host) bind(fd int, p *Probe) error {
	local := netip.IPv4Unspecified()
	if p.To.Addr().Is6() {
		local = netip.IPv6Unspecified()
	}
	if p.SourcePort != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		return os.NewSyscallError("bind", unix.Bind(fd, sockaddr(netip.AddrPortFrom(local, p.SourcePort))))
	}
	err := error(unix.EADDRINUSE)
	for try := 0; try < 1000 && errors.Is(err, unix.EADDRINUSE); try++ {
		p.SourcePort = h.ports.next(p.Protocol)
		err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(local, p.SourcePort)))
	}
	return os.NewSyscallError("bind", err)
}

// awaitConnection waits until a connection in progress is there or has failed.
func awaitConnection(ctx context.Context, f *os.File, deadline time.Time) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	defer limit(ctx, f, deadline)()
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			failed = err
		case errno != 0:
			failed = unix.Errno(errno)
		default: // the poller sometimes wakes up before anything happened
			_, err := unix.Getpeername(int(fd))
			return err == nil
		}
		return true
	})
	if err != nil {
		return err
	}
	return failed
}

// limit makes operations on f fail at the deadline or when ctx ends, until release is called.
func limit(ctx context.Context, f *os.File, deadline time.Time) (release func()) {
	_ = f.SetDeadline(deadline) // fails only if f is closed, and so will what follows
	stop := context.AfterFunc(ctx, func() { _ = f.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

// Dial opens a connection that stays. It is a stream on which each line sent is answered by one line (the first comes
// unasked), or a UDP socket with one answer for each datagram. It fails when ctx ends, or after ten seconds if ctx
// has no deadline. Close ends a TCP connection in order and aborts an SCTP association.
func (b *Bed) Dial(ctx context.Context, from Place, p model.Protocol, to netip.AddrPort) (net.Conn, error) {
	h, err := b.host(from)
	if err != nil {
		return nil, err
	}
	timeout := 10 * time.Second
	if end, ok := ctx.Deadline(); ok {
		timeout = time.Until(end)
	}
	f, err := h.connect(ctx, &Probe{Protocol: p, To: to, Timeout: timeout})
	if err != nil {
		return nil, fmt.Errorf("testbed: %s to %s/%s: %w", from, to, p, err)
	}
	if p == model.SCTP {
		return sctpConn{f}, nil
	}
	defer f.Close() // FileConn duplicates it
	c, err := net.FileConn(f)
	if tcp, ok := c.(*net.TCPConn); ok {
		err = tcp.SetLinger(-1) // unlike a probe's, this connection ends in the ordinary way
	}
	if err != nil {
		return nil, fmt.Errorf("testbed: %s to %s/%s: %w", from, to, p, err)
	}
	return c, nil
}

// httpDial bounds how long an HTTP client waits for a connection.
const httpDial = 10 * time.Second

// HTTPClient is one in a place. It keeps no connections.
func (b *Bed) HTTPClient(from Place) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(addr)
			if err != nil {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(ctx, httpDial) // the transport takes away the request's own deadline
			defer cancel()
			return b.Dial(ctx, from, model.TCP, to)
		},
	}}
}

// sctpConn is an SCTP association as a net.Conn.
type sctpConn struct{ *os.File }

func (c sctpConn) LocalAddr() net.Addr  { return c.addr(unix.Getsockname) }
func (c sctpConn) RemoteAddr() net.Addr { return c.addr(unix.Getpeername) }

func (c sctpConn) addr(get func(fd int) (unix.Sockaddr, error)) net.Addr {
	var a sctpAddr
	raw, err := c.SyscallConn()
	if err != nil {
		return a
	}
	_ = raw.Control(func(fd uintptr) { // of a closed connection nothing is known
		if sa, err := get(int(fd)); err == nil {
			a = sctpAddr(addrPortOf(sa))
		}
	})
	return a
}

type sctpAddr netip.AddrPort

func (sctpAddr) Network() string  { return "sctp" }
func (a sctpAddr) String() string { return netip.AddrPort(a).String() }

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
