// Package socket makes sockets, and copies between two connections of TCP, both ways, until both have ended. An idle
// connection has no buffer, and neither has one whose other side does not read.
//
//	read a page ─► write ─► full? ─► read as much as the other side takes ─► full, too? ─► splice, if there is a pipe
package socket

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	page = 1 << 12 // is always read, and may have to wait until the other side takes it
	most = 1 << 16 // that is read at once
	// bulk is how much is spliced before the pipe for it is given back, which most connections do not need for most of
	// their time.
	bulk = 4 << 20
	// lull is for how long a stream may pause before its pipe is given back.
	lull = 100 * time.Millisecond
)

// A Copier copies. Connections share what they need for a moment.
type Copier struct {
	idle, halfClosed time.Duration
	pages, buffers   sync.Pool // of *[]byte
	pipes            pipes
}

// NewCopier makes one that ends a connection over which nothing passes for so long, or of which one side has ended its
// direction.
func NewCopier(idle, halfClosed time.Duration) *Copier {
	return &Copier{idle: idle, halfClosed: halfClosed, pages: buffersOf(page), buffers: buffersOf(most)}
}

// Close is called when all connections are over.
func (c *Copier) Close() { c.pipes.close() }

// Never is a time after which nothing ends.
const Never = 100 * 365 * 24 * time.Hour

func buffersOf(size int) sync.Pool {
	return sync.Pool{New: func() any {
		b := make([]byte, size)
		return &b
	}}
}

// Activity is what the two directions of a connection know of each other.
type Activity struct {
	last atomic.Int64 // when anything was copied
	half atomic.Bool  // one direction has ended
}

// Touch notes that something was copied.
func (a *Activity) Touch() { a.last.Store(time.Now().UnixNano()) }

// HalfClose notes that one direction has ended.
func (a *Activity) HalfClose() {
	a.half.Store(true)
	a.Touch()
}

// HalfClosed reports whether one has.
func (a *Activity) HalfClosed() bool { return a.half.Load() }

// Used is when something was copied last.
func (a *Activity) Used() int64 { return a.last.Load() }

// Deadline is when a connection has been idle for too long if nothing happens.
func (c *Copier) Deadline(a *Activity) time.Time {
	idle := c.idle
	if a.half.Load() {
		idle = c.halfClosed
	}
	return time.Unix(0, a.last.Load()).Add(idle)
}

// Carried is what backends have got and sent, without headers. Of a stream it has no packets.
type Carried struct {
	ToBackend, ToClient Sum
	Open                atomic.Int64 // connections and flows
}

// Sum adds up what is carried in one direction. nil takes everything, and forgets it.
type Sum struct{ Packets, Bytes atomic.Uint64 }

// Add adds to it.
func (s *Sum) Add(packets, bytes int) {
	if s != nil {
		s.Packets.Add(uint64(packets))
		s.Bytes.Add(uint64(bytes))
	}
}

// A Link is a client's connection and the one to its backend.
type Link struct {
	*Activity
	Client, Backend *Conn
	Carried         *Carried
	// Borrow asks for files for a pipe, and returns what gives them back; nil: there are none to be had.
	Borrow func(files int) (back func())
}

// Copy copies in both directions until both have ended.
func (c *Copier) Copy(l *Link) {
	l.Touch()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.copyOneWay(direction{l, c, l.Client, l.Backend, &l.Carried.ToClient})
	}()
	c.copyOneWay(direction{l, c, l.Backend, l.Client, &l.Carried.ToBackend})
	<-done
	l.Client.End()
	l.Backend.End()
}

// copyOneWay copies in one direction and passes its end on. An error ends both directions, by a reset, as if client and
// backend had one connection.
func (c *Copier) copyOneWay(d direction) {
	err := d.copy()
	if err == nil {
		err = d.to.CloseWrite()
	}
	if err != nil {
		d.to.Reset()
		d.from.Reset()
		return
	}
	d.HalfClose()
	_ = d.to.SetReadDeadline(c.Deadline(d.Activity)) // fails only if the connection is over
}

// direction is one of a Link's two.
type direction struct {
	*Link
	copier   *Copier
	to, from *Conn
	sum      *Sum
}

// copy copies until the end.
func (d *direction) copy() error {
	for room := page; ; {
		_ = d.from.SetReadDeadline(d.copier.Deadline(d.Activity)) // fails only if the connection is over
		n, err := d.move(room)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(d.copier.Deadline(d.Activity)):
			continue
		case err != nil || n == 0:
			return err
		}
		d.Touch()
		d.sum.Add(0, n)
		if n < room && n <= page {
			room = page
			continue
		}
		if n == room && room > page {
			if ended, err := d.splice(); ended || err != nil {
				return err
			}
		}
		room = d.room()
		runtime.Gosched() // a stream that never pauses would have others wait
	}
}

// room is how much may be read at once so that the other side takes it without delay, or a page.
func (d *direction) room() (n int) {
	_ = d.to.raw.Control(func(fd uintptr) { // fails only if the connection is over
		buffer, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF) // twice of what data may take
		waiting, failed := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
		if err == nil && failed == nil {
			n = buffer/2 - waiting
		}
	})
	return min(max(n, page), most)
}

// move reads once and writes what it has read; n is 0 at the end. It takes a buffer only when there is something to
// read.
func (d *direction) move(room int) (n int, err error) {
	pool := &d.copier.pages
	if room > page {
		pool = &d.copier.buffers
	}
	var buffer *[]byte
	failed := d.from.raw.Read(func(fd uintptr) bool {
		buffer = pool.Get().(*[]byte)
		n, err = unix.Read(int(fd), (*buffer)[:room])
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Read(int(fd), (*buffer)[:room])
		}
		if errors.Is(err, unix.EAGAIN) {
			pool.Put(buffer)
			buffer = nil
			return false
		}
		return true
	})
	if buffer != nil {
		defer pool.Put(buffer)
	}
	if err = errors.Join(failed, err); err != nil || n <= 0 {
		return 0, err
	}
	return n, d.write((*buffer)[:n])
}

// write has a deadline only where the other side does not take all at once.
func (d *direction) write(data []byte) error {
	var n int
	var err error
	failed := d.to.raw.Write(func(fd uintptr) bool {
		n, err = unix.Write(int(fd), data)
		return true
	})
	switch {
	case failed != nil:
		return failed
	case n == len(data):
		return nil
	case err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
		return os.NewSyscallError("write", err)
	}
	_ = d.to.SetWriteDeadline(time.Now().Add(d.copier.idle)) // fails only if the connection is over
	_, err = d.to.Write(data[max(n, 0):])
	_ = d.to.SetWriteDeadline(time.Time{})
	return err
}
