package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

const (
	loopBytes = 128 // of a request, and of its response
	// loopTimeout is how long to wait for what comes at once.
	loopTimeout = 2 * time.Second
)

// Loop is a client and its server in one thread. With data planes of the kernel all packets pass within the calls of the
// client, and no change of tasks is part of what is measured.
type Loop struct {
	Bed       *testbed.Bed
	From      testbed.Place
	To        []netip.AddrPort // asked in turn
	Listeners []int            // of the server, see Listen

	raw  []rawTarget // of To
	next int
	open *ends // for requests
}

// ends are both ends of a connection.
type ends struct{ here, there int }

func (e ends) close() {
	unix.Close(e.here)
	unix.Close(e.there)
}

// Listen opens sockets for both families in the calling thread's namespace. The caller closes those that there are, also
// after an error.
func Listen(ports []uint16) (listeners []int, err error) {
	for _, port := range ports {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return listeners, os.NewSyscallError("socket", err)
		}
		listeners = append(listeners, fd)
		if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0),
			unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}), unix.Listen(fd, 16)); err != nil {
			return listeners, fmt.Errorf("listen on port %d: %w", port, err)
		}
	}
	return listeners, nil
}

// Close ends the connection that requests have left.
func (l *Loop) Close() {
	if l.open != nil {
		l.open.close()
	}
}

// Connections makes some with one request each, and returns what each took.
func (l *Loop) Connections(n int) (took []time.Duration, err error) {
	err = l.Bed.Do(l.From, func() error {
		for range n {
			begin := time.Now()
			c, err := l.connect()
			if err != nil {
				return err
			}
			err = c.request()
			took = append(took, time.Since(begin))
			if c.close(); err != nil {
				return err
			}
		}
		return nil
	})
	return took, err
}

// Requests makes some on one connection, which stays, and returns what each took.
func (l *Loop) Requests(n int) (took []time.Duration, err error) {
	err = l.Bed.Do(l.From, func() error {
		if l.open == nil {
			c, err := l.connect()
			if err != nil {
				return err
			}
			l.open = &c
		}
		for range n {
			begin := time.Now()
			if err := l.open.request(); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return nil
	})
	return took, err
}

// connect makes a connection from the calling thread's place.
func (l *Loop) connect() (c ends, err error) {
	if l.raw == nil {
		l.raw = rawTargets(l.To)
	}
	number := l.next % len(l.To)
	to := &l.raw[number]
	l.next++
	if c.here, err = blockingSocket(int(to.address.Family), loopTimeout); err != nil {
		return c, err
	}
	if err = untilDone(func() error { return to.connect(c.here) }); err == nil {
		c.there, err = l.accept()
	}
	if err != nil {
		unix.Close(c.here)
		return c, fmt.Errorf("a connection to %s: %w", l.To[number], err)
	}
	return c, nil
}

// accept is the server: which backend was chosen shows by where it arrives.
func (l *Loop) accept() (int, error) {
	waiting := make([]unix.PollFd, len(l.Listeners))
	for i, fd := range l.Listeners {
		waiting[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	err := untilDone(func() error {
		_, err := unix.Poll(waiting, int(loopTimeout.Milliseconds()))
		return err
	})
	if err != nil {
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
	if err := untilDone(func() error { _, err := unix.Write(from, b[:]); return err }); err != nil {
		return os.NewSyscallError("write", err)
	}
	for read := 0; read < len(b); {
		n := 0
		err := untilDone(func() (err error) { n, err = unix.Read(to, b[read:]); return err })
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

// untilDone repeats what one of the runtime's signals has interrupted.
func untilDone(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
