package advise

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	requestBytes = 128 // of a request, and of its response
	connections  = 20  // in a slice
	requests     = 100 // in a slice
	// answerTime is how long to wait for what comes at once.
	answerTime = 2 * time.Second
)

// traffic is that of a client in a scratch cluster. One thread is both ends: with data planes of the kernel all packets
// pass within the calls of the client, and no change of tasks is part of what is measured.
type traffic struct {
	*scratch
	to   []netip.AddrPort // asked in turn
	next int
	open *connection // for requests
}

// connection has both ends here.
type connection struct{ here, there int }

func (c connection) close() {
	unix.Close(c.here)
	unix.Close(c.there)
}

func (t *traffic) close() {
	if t.open != nil {
		t.open.close()
	}
}

// connectSlice makes connections with one request each.
func (t *traffic) connectSlice() (took []time.Duration, err error) {
	err = t.bed.Do(client, func() error {
		for range connections {
			begin := time.Now()
			c, err := t.connect()
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

// requestSlice makes requests on one connection.
func (t *traffic) requestSlice() (took []time.Duration, err error) {
	err = t.bed.Do(client, func() error {
		if t.open == nil {
			c, err := t.connect()
			if err != nil {
				return err
			}
			t.open = &c
		}
		for range requests {
			begin := time.Now()
			if err := t.open.request(); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return nil
	})
	return took, err
}

// connect makes a connection from the calling thread's place.
func (t *traffic) connect() (c connection, err error) {
	to := t.to[t.next%len(t.to)]
	t.next++
	if c.here, err = socket(to.Addr().Is6()); err != nil {
		return c, err
	}
	if err = again(func() error { return unix.Connect(c.here, sockaddr(to)) }); err != nil {
		unix.Close(c.here)
		return c, fmt.Errorf("connect to %s: %w", to, err)
	}
	if c.there, err = t.accept(); err != nil {
		unix.Close(c.here)
		return c, fmt.Errorf("a connection to %s: %w", to, err)
	}
	return c, nil
}

// socket is one that is reset when it is closed: there would soon be too many that wait.
func socket(v6 bool) (int, error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	return fd, prepare(fd)
}

func prepare(fd int) error {
	wait := unix.NsecToTimeval(answerTime.Nanoseconds())
	err := errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	if err != nil {
		unix.Close(fd)
	}
	return err
}

// accept is the server: which backend was chosen shows by where it arrives.
func (s *scratch) accept() (int, error) {
	waiting := make([]unix.PollFd, len(s.listeners))
	for i, fd := range s.listeners {
		waiting[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	var n int
	err := again(func() (err error) {
		n, err = unix.Poll(waiting, int(answerTime.Milliseconds()))
		return err
	})
	if err == nil && n == 0 {
		err = errors.New("it did not arrive")
	}
	if err != nil {
		return 0, err
	}
	for _, w := range waiting {
		if w.Revents != 0 {
			fd, _, err := unix.Accept4(int(w.Fd), unix.SOCK_CLOEXEC)
			if err != nil {
				return 0, os.NewSyscallError("accept", err)
			}
			return fd, prepare(fd)
		}
	}
	return 0, errors.New("it did not arrive")
}

// request goes there, and its response comes back.
func (c connection) request() error {
	return errors.Join(carry(c.here, c.there), carry(c.there, c.here))
}

// carry writes at one end and reads at the other.
func carry(from, to int) error {
	var b [requestBytes]byte
	if err := again(func() error { _, err := unix.Write(from, b[:]); return err }); err != nil {
		return os.NewSyscallError("write", err)
	}
	for read := 0; read < len(b); {
		n := 0
		err := again(func() (err error) { n, err = unix.Read(to, b[read:]); return err })
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

// again repeats what one of the runtime's signals has interrupted.
func again(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}
