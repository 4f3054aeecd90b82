package userspace

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// accept takes connections until the proxy ends, or the socket is closed. Who a client is and where it was going the
// last function knows.
func (p *proxy) accept(l *net.TCPListener, locate func(*net.TCPConn) (packet, error)) {
	for p.context.Err() == nil {
		client, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if isExhausted(err) {
			p.shed(l)
		}
		if err != nil {
			p.pause()
			continue
		}
		at, err := locate(client)
		if err != nil { // somebody asks us directly
			reset(client)
			continue
		}
		at.protocol = model.TCP
		raw, err := client.SyscallConn()
		if err != nil { // it is closed
			continue
		}
		p.enter(at, caller{raw, func() { reset(client) }, func(d decision) { p.serve(client, at, d) }})
	}
}

// shed keeps those out who wait while the process can open no more files.
func (p *proxy) shed(l *net.TCPListener) {
	for range p.files.shed(l) {
		p.turned.count(nil, tooManyFiles)
	}
}

// brought is a client that TPROXY has brought.
func (o origin) brought(c *net.TCPConn) (packet, error) {
	return packet{
		origin:      o,
		client:      unmapped(c.RemoteAddr().(*net.TCPAddr).AddrPort()),
		destination: unmapped(c.LocalAddr().(*net.TCPAddr).AddrPort()),
	}, nil
}

// serve finds a backend for a client and carries what they say until both have ended.
func (p *proxy) serve(client *net.TCPConn, at packet, d decision) {
	backend, b, err := dial(p, call{decision: d, client: at.client}, nil, p.connectTCP)
	if err != nil {
		p.undialed(d.key, err)
		reset(client)
		return
	}
	defer p.atEnd(func() {
		reset(client)
		reset(backend)
	})()
	d.pool.answered(at.client.Addr(), b, time.Now())
	p.join(client, backend)
}

// join carries in both directions until both have ended.
func (p *proxy) join(client, backend *net.TCPConn) {
	var both activity
	both.touch()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.carry(client, backend, &both)
	}()
	p.carry(backend, client, &both)
	<-done
	end(client)
	end(backend)
}

// activity is what the two directions of a connection know of each other.
type activity struct {
	last atomic.Int64 // when anything was carried
	half atomic.Bool  // one direction has ended
}

func (a *activity) touch() { a.last.Store(time.Now().UnixNano()) }

// deadline is when the connection is idle for too long if nothing happens.
func (a *activity) deadline(o Options) time.Time {
	idle := o.IdleTimeout
	if a.half.Load() {
		idle = o.HalfClosedTimeout
	}
	return time.Unix(0, a.last.Load()).Add(idle)
}

// carry copies in one direction and passes its end on. An error ends both directions, by a reset, as if client and
// backend had one connection.
func (p *proxy) carry(to, from *net.TCPConn, both *activity) {
	err := p.copy(to, from, both)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		reset(to)
		reset(from)
		return
	}
	both.half.Store(true)
	both.touch()
	_ = to.SetReadDeadline(both.deadline(p.options)) // fails only if the connection is over
}

// bulk is how much is spliced before the pipe for it is given back: four descriptors, which most connections do not
// need for most of their time.
const bulk = 4 << 20

// lull is for how long a stream may pause before its pipe is given back.
const lull = 100 * time.Millisecond

// copy copies until the end. It takes a buffer only when there is something to read; a stream that fills it is
// spliced, past the memory of the process.
func (p *proxy) copy(to, from *net.TCPConn, both *activity) error {
	raw, err := from.SyscallConn()
	if err != nil {
		return err
	}
	for {
		_ = from.SetReadDeadline(both.deadline(p.options)) // fails only if the connection is over
		n, err := p.move(to, raw)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(both.deadline(p.options)):
		case err != nil || n == 0:
			return err
		default:
			both.touch()
		}
		if n == bufferSize {
			_ = from.SetReadDeadline(time.Now().Add(lull)) // fails only if the connection is over
			carried, err := io.Copy(to, io.LimitReader(from, bulk))
			if err == nil && carried < bulk {
				return nil
			}
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
			both.touch()
		}
	}
}

// move reads once and writes what it has read; n is 0 at the end.
func (p *proxy) move(to *net.TCPConn, raw syscall.RawConn) (n int, err error) {
	var buf *[bufferSize]byte
	failed := raw.Read(func(fd uintptr) bool {
		buf = p.buffers.Get().(*[bufferSize]byte)
		for {
			n, err = unix.Read(int(fd), buf[:])
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			p.buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	})
	if buf != nil {
		defer p.buffers.Put(buf)
	}
	if failed != nil {
		return 0, failed
	}
	if err != nil || n == 0 {
		return 0, err
	}
	_, err = to.Write(buf[:n])
	return n, err
}

// end closes a connection that is over. All that was said has been sent, or will be.
func end(c *net.TCPConn) {
	_ = c.SetLinger(-1) // fails only if c is closed
	c.Close()
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // fails only if c is closed
	c.Close()
}
