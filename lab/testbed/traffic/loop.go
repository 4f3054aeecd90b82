package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

const (
	loopBytes = 128 // of a request, and of its response
	// loopTimeout is how long to wait for what comes at once.
	loopTimeout = 2 * time.Second
)

// Loop is a client and its server in one thread. With data planes of the kernel all packets pass within the calls of
// the client, and no change of tasks is part of what is measured.
type Loop struct {
	bed       *testbed.Bed
	from      testbed.Place
	listeners []int            // of the server
	targets   []netip.AddrPort // asked in turn
	raw       []rawTarget      // the same
	next      int
	open      *ends // for requests
}

// ends are both ends of a connection.
type ends struct{ here, there int }

func (e ends) close() {
	unix.Close(e.here)
	unix.Close(e.there)
}

// NewLoop makes one whose server listens in a place, in both families. The caller says whom it asks, and closes it.
func NewLoop(bed *testbed.Bed, from, server testbed.Place, ports []uint16) (*Loop, error) {
	l := &Loop{bed: bed, from: from}
	err := bed.Do(server, func() error {
		for _, port := range ports {
			if err := l.listen(port); err != nil {
				return fmt.Errorf("listen on port %d of %s: %w", port, server, err)
			}
		}
		return nil
	})
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// listen opens a socket in the calling thread's namespace.
func (l *Loop) listen(port uint16) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	l.listeners = append(l.listeners, fd)
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0),
		unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}), unix.Listen(fd, 16))
}

// Ask says whom the client asks in turn from now on: addresses that lead to the server.
func (l *Loop) Ask(targets ...netip.AddrPort) {
	l.hangUp()
	l.targets, l.raw, l.next = targets, rawTargets(targets), 0
}

// hangUp ends the connection that requests have left.
func (l *Loop) hangUp() {
	if l.open != nil {
		l.open.close()
		l.open = nil
	}
}

// Close ends the server, and the connection that requests have left.
func (l *Loop) Close() {
	l.hangUp()
	for _, fd := range l.listeners {
		unix.Close(fd)
	}
}

// Connects makes connections, of which each took what the system call takes: the kernel carries all packets through all
// namespaces within it.
func (l *Loop) Connects(n int) (took []time.Duration, err error) {
	return l.repeat(n, func() (time.Duration, error) {
		c, took, err := l.connect()
		if err == nil {
			c.close()
		}
		return took, err
	})
}

// Connections makes some with one request each, and returns what each took.
func (l *Loop) Connections(n int) (took []time.Duration, err error) {
	return l.repeat(n, func() (time.Duration, error) {
		begin := time.Now()
		c, _, err := l.connect()
		if err != nil {
			return 0, err
		}
		defer c.close()
		err = c.request()
		return time.Since(begin), err
	})
}

// Requests makes some on one connection, which stays, and returns what each took.
func (l *Loop) Requests(n int) (took []time.Duration, err error) {
	return l.repeat(n, func() (time.Duration, error) {
		if l.open == nil {
			c, _, err := l.connect()
			if err != nil {
				return 0, err
			}
			l.open = &c
		}
		begin := time.Now()
		err := l.open.request()
		return time.Since(begin), err
	})
}

// repeat does something n times in the client's place. The runtime's signals, which would interrupt system calls, do
// not reach the thread.
func (l *Loop) repeat(n int, once func() (time.Duration, error)) (took []time.Duration, err error) {
	err = l.bed.Do(l.from, func() error {
		all := &unix.Sigset_t{Val: [16]uint64{^uint64(0)}}
		if err := unix.PthreadSigmask(unix.SIG_BLOCK, all, nil); err != nil {
			return os.NewSyscallError("sigmask", err)
		}
		for range n {
			each, err := once()
			if err != nil {
				return err
			}
			took = append(took, each)
		}
		return nil
	})
	return took, err
}

// connect makes a connection from the calling thread's place. The time is that of the system call alone.
func (l *Loop) connect() (c ends, took time.Duration, err error) {
	number := l.next % len(l.raw)
	to := &l.raw[number]
	l.next++
	if c.here, err = blockingSocket(int(to.address.Family), loopTimeout); err != nil {
		return c, 0, err
	}
	start := time.Now()
	err = to.connect(c.here)
	took = time.Since(start)
	if err == nil {
		c.there, err = l.accept()
	}
	if err != nil {
		unix.Close(c.here)
		return c, took, fmt.Errorf("a connection to %s: %w", l.targets[number], err)
	}
	return c, took, nil
}

// accept is the server: which backend was chosen shows by where it arrives.
func (l *Loop) accept() (int, error) {
	waiting := make([]unix.PollFd, len(l.listeners))
	for i, fd := range l.listeners {
		waiting[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	if _, err := unix.Poll(waiting, int(loopTimeout.Milliseconds())); err != nil {
		return 0, os.NewSyscallError("poll", err)
	}
	for _, w := range waiting {
		if w.Revents != 0 {
			fd, _, err := unix.Accept4(int(w.Fd), unix.SOCK_CLOEXEC)
			if err != nil {
				return 0, os.NewSyscallError("accept", err)
			}
			return fd, prepareBlocking(fd, loopTimeout)
		}
	}
	return 0, errors.New("it did not arrive")
}

// request goes there, and its response comes back.
func (e ends) request() error {
	return errors.Join(carry(e.here, e.there), carry(e.there, e.here))
}

// carry writes at one end and reads at the other.
func carry(from, to int) error {
	var b [loopBytes]byte
	if _, err := unix.Write(from, b[:]); err != nil {
		return os.NewSyscallError("write", err)
	}
	for read := 0; read < len(b); {
		n, err := unix.Read(to, b[read:])
		switch {
		case err != nil:
			return os.NewSyscallError("read", err)
		case n == 0:
			return errors.New("the connection has ended")
		}
		read += n
	}
	return nil
}

// rawTarget is what connect takes.
type rawTarget struct {
	address unix.RawSockaddrInet6 // in which one of IPv4 fits
	size    uintptr
}

func rawTargets(targets []netip.AddrPort) []rawTarget {
	raw := make([]rawTarget, len(targets))
	for i, to := range targets {
		port := to.Port()<<8 | to.Port()>>8
		if to.Addr().Is6() {
			raw[i].address = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: to.Addr().As16()}
			raw[i].size = unix.SizeofSockaddrInet6
			continue
		}
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(&raw[i].address)) = unix.RawSockaddrInet4{
			Family: unix.AF_INET, Port: port, Addr: to.Addr().As4(),
		}
		raw[i].size = unix.SizeofSockaddrInet4
	}
	return raw
}

// connect is the system call, of which the runtime's scheduler does not hear.
func (to *rawTarget) connect(fd int) error {
	_, _, number := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.address)), to.size)
	if number != 0 {
		return number
	}
	return nil
}

// blockingSocket is one that is reset when it is closed: there would soon be too many that wait.
func blockingSocket(family int, timeout time.Duration) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	return fd, prepareBlocking(fd, timeout)
}

// prepareBlocking closes the socket if it fails.
func prepareBlocking(fd int, timeout time.Duration) error {
	wait := unix.NsecToTimeval(timeout.Nanoseconds())
	err := errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	if err != nil {
		unix.Close(fd)
	}
	return err
}
