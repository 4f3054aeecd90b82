package socket

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Conn is a connection of TCP, or another socket, without what package net does for each: that asks the kernel seven
// times more.
type Conn struct {
	*os.File
	raw syscall.RawConn
}

// Open makes a Conn of a socket that does not block. The socket is the Conn's, also after an error.
func Open(fd int) (*Conn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Conn{f, raw}, nil
}

// Setup sets a socket up that is of one family or the other.
type Setup func(fd int, v6 bool) error

// New makes a socket in the calling thread's network namespace, and sets it up. Of UDP it is for datagrams, of others
// for connections.
func New(protocol int, v6 bool, setups ...Setup) (*Conn, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if v6 {
		family = unix.AF_INET6
	}
	if protocol == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	for _, setup := range setups {
		if err := setup(fd, v6); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	return Open(fd)
}

// Listen makes a socket that takes connections, in the calling thread's network namespace. They are as it is set up.
func Listen(protocol int, at netip.AddrPort, setups ...Setup) (*Conn, error) {
	const backlog = 1<<16 - 1 // the kernel allows net.core.somaxconn
	again := func(fd int, v6 bool) error {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if v6 && err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1)
		}
		return os.NewSyscallError("setsockopt", err)
	}
	listen := func(fd int, _ bool) error { return os.NewSyscallError("listen", unix.Listen(fd, backlog)) }
	return New(protocol, at.Addr().Is6(), append(append([]Setup{again}, setups...), Bind(at), listen)...)
}

// Bind binds a socket to an address.
func Bind(to netip.AddrPort) Setup {
	return func(fd int, _ bool) error { return os.NewSyscallError("bind", unix.Bind(fd, Sockaddr(to))) }
}

// Lively is for connections of TCP: nothing waits for more to be sent, and a peer that is gone is found out as package
// net does. Sockets that a listener accepts are as it is.
func Lively(fd int, _ bool) error {
	const seconds, times = 15, 9
	for _, o := range [][3]int{
		{unix.SOL_TCP, unix.TCP_NODELAY, 1}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.SOL_TCP, unix.TCP_KEEPIDLE, seconds}, {unix.SOL_TCP, unix.TCP_KEEPINTVL, seconds},
		{unix.SOL_TCP, unix.TCP_KEEPCNT, times},
	} {
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			return os.NewSyscallError("setsockopt of keep-alive", err)
		}
	}
	return nil
}

// Raw is for what waits.
func (c *Conn) Raw() syscall.RawConn { return c.raw }

// Reset implements End.
func (c *Conn) Reset() {
	_ = c.Do(reset)
	c.Close()
}

// End closes a connection that is over. All that was said has been sent, or will be.
func (c *Conn) End() {
	_ = c.Do(func(fd int) error { return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{}) })
	c.Close()
}

// Do lets f do something with the socket, unless it is closed.
func (c *Conn) Do(f func(fd int) error) (err error) {
	failed := c.raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(failed, err)
}

// CloseWrite says that no more will be said.
func (c *Conn) CloseWrite() error {
	return c.Do(func(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) })
}

// CloseRead has reads end with what has come. It does nothing to a connection that is over.
func (c *Conn) CloseRead() {
	_ = c.Do(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RD) })
}

// LocalAddr is its own address and port.
func (c *Conn) LocalAddr() (at netip.AddrPort) {
	_ = c.Do(func(fd int) error { // of one that is closed there is none
		name, err := unix.Getsockname(fd)
		at = AddrPort(name)
		return err
	})
	return at
}

// Connect asks an address. It returns when that has been asked, or has refused.
func (c *Conn) Connect(to netip.AddrPort) error {
	return c.Do(func(fd int) error {
		err := unix.Connect(fd, Sockaddr(to))
		if errors.Is(err, unix.EINPROGRESS) {
			return nil
		}
		return os.NewSyscallError("connect", err)
	})
}

// Await waits for the answer. After os.ErrDeadlineExceeded it may be called again.
func (c *Conn) Await(patience time.Duration) error {
	_ = c.SetWriteDeadline(time.Now().Add(patience)) // fails only if it is closed
	defer func() { _ = c.SetWriteDeadline(time.Time{}) }()
	var failed error
	err := c.raw.Write(func(fd uintptr) bool {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		if failed = err; failed != nil {
			return true
		}
		_, err = unix.Getpeername(int(fd)) // the poller may wake up before anything has happened
		return err == nil
	})
	return errors.Join(err, os.NewSyscallError("connect", failed))
}

// AwaitRoom waits until the socket takes something to be sent.
func (c *Conn) AwaitRoom(patience time.Duration) error {
	_ = c.SetWriteDeadline(time.Now().Add(patience)) // fails only if it is closed
	defer func() { _ = c.SetWriteDeadline(time.Time{}) }()
	return c.raw.Write(func(fd uintptr) bool {
		waits := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(waits, 0)
		return n != 0 || err != nil
	})
}

// Send sends a datagram. If there is no room for it, it is lost: those of other sockets must not wait. That an earlier
// one was too large is no error: the kernel has learned it, and sends this one in fragments.
func (c *Conn) Send(data []byte) (err error) {
	failed := c.raw.Write(func(fd uintptr) bool {
		if _, err = unix.Write(int(fd), data); errors.Is(err, unix.EMSGSIZE) {
			_, err = unix.Write(int(fd), data)
		}
		return true
	})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EMSGSIZE) {
		err = nil
	}
	return errors.Join(failed, err)
}

// Accept waits until there are connections at a listener, and takes all of them, up to a few dozen. The error is
// os.ErrClosed when the listener is closed, which package os does not say of what waits.
func (c *Conn) Accept(each func(fd int, from netip.AddrPort)) error {
	const batch = 64
	var failed error
	err := c.raw.Read(func(l uintptr) bool {
		for n := range batch {
			fd, from, err := unix.Accept4(int(l), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return n > 0
			case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
				continue
			case err != nil:
				failed = os.NewSyscallError("accept", err)
				return true
			}
			each(fd, AddrPort(from))
		}
		return true
	})
	if err != nil {
		return os.ErrClosed
	}
	return failed
}

// Accepted is a side that is a socket yet, until data is sent with it.
type Accepted struct{ FD int }

// Reset implements End.
func (a Accepted) Reset() {
	_ = reset(a.FD)
	unix.Close(a.FD)
}

// reset sends the reset of a connection of TCP at once; one of SCTP sends it when it is closed. To close is not enough
// where the process has just forked: the kernel waits for the child, and rules that translate the reset may go first.
func reset(fd int) error {
	if err := Abortive(fd, false); err != nil {
		return err
	}
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none))
	if errno != 0 {
		return os.NewSyscallError("connect", errno)
	}
	return nil
}

// Sockaddr is an address as the kernel is told of it.
func Sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// AddrPort is what the kernel tells of an address.
func AddrPort(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), uint16(s.Port))
	}
	return netip.AddrPort{}
}

// End is one side of a connection.
type End interface{ Reset() }

// Ends are the two sides of a connection, which are reset together. The zero value has none yet.
type Ends struct {
	mu   sync.Mutex // held while a reset is sent
	ends [2]End     // the client's and the backend's
	over bool
}

// Take sets the client's side, or resets it if all of them were.
func (e *Ends) Take(client End) { e.set(0, client) }

// Reach sets the backend's side in the same way.
func (e *Ends) Reach(backend End) { e.set(1, backend) }

func (e *Ends) set(i int, side End) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ends[i] = side; e.over && side != nil {
		side.Reset()
	}
}

// Open makes a Conn of the client's side that was accepted. It returns nil if that was reset.
func (e *Ends) Open() *Conn {
	e.mu.Lock()
	defer e.mu.Unlock()
	a, ok := e.ends[0].(Accepted)
	if !ok || e.over {
		return nil
	}
	c, err := Open(a.FD)
	if err != nil {
		e.over = true
		return nil
	}
	e.ends[0] = c
	return c
}

// Reset resets what there is, and what there will be.
func (e *Ends) Reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return
	}
	e.over = true
	for _, side := range e.ends {
		if side != nil {
			side.Reset()
		}
	}
}

// Over reports whether that was done. If it is being done, it waits.
func (e *Ends) Over() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.over
}
