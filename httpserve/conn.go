package httpserve

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// conn is an open connection of a Pool.
type conn struct {
	net.Conn
	pool   *Pool
	source netip.Prefix
	late   sync.Once // the client was slow, which is told once

	// The Pool's mu guards what follows.
	turn     uint64    // of the Pool, when it last did something
	idle     bool      // between two requests
	accepted bool      // the request; until the next one
	handling bool      // a handler runs
	writing  bool      // the client is to take a part of the answer
	deadline time.Time // of what is read; zero: none
}

// computing says, with the Pool's mu held, that the answer is being made and the client not waited for.
func (c *conn) computing() bool { return c.handling && !c.writing }

// change lets f change what the Pool's mu guards.
func (c *conn) change(f func()) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	f()
}

// accept notes that a request's header is well.
func (c *conn) accept() {
	c.change(func() {
		c.accepted = true
		c.pool.touch(c)
	})
}

// handle calls a handler.
func (c *conn) handle(f func()) {
	c.change(func() { c.handling = true })
	defer c.change(func() { c.handling = false })
	f()
}

// rest notes that an answer has been given.
func (c *conn) rest() {
	c.change(func() {
		c.accepted, c.idle = false, true
		c.pool.touch(c)
	})
}

// SetReadDeadline implements net.Conn. With a time long ago http.Server ends its own Read, which is not the client's
// fault.
func (c *conn) SetReadDeadline(t time.Time) error {
	if t.IsZero() || time.Since(t) < time.Hour {
		c.change(func() { c.deadline = t })
	}
	return c.Conn.SetReadDeadline(t)
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.change(func() { c.idle = false })
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && c.overdue() {
		c.slow()
	}
	return n, err
}

// overdue reports whether the client has not sent its request in time. To be idle is no fault.
func (c *conn) overdue() (is bool) {
	c.change(func() { is = !c.idle && !c.deadline.IsZero() && !time.Now().Before(c.deadline) })
	return is
}

func (c *conn) slow() { c.late.Do(func() { c.pool.report(Slow) }) }

// Write implements net.Conn. If http.Server writes before it calls the handler, it refuses the request.
func (c *conn) Write(b []byte) (int, error) {
	var refusal bool
	c.change(func() { c.writing, refusal = true, !c.accepted })
	if refusal {
		c.pool.report(Malformed)
	}
	n, err := c.Conn.Write(b)
	c.change(func() { c.writing = false })
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.slow()
	}
	return n, err
}

// CloseWrite has http.Server end an answer so that it arrives although the request was not read.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.change(func() { c.pool.drop(c) })
	return c.Conn.Close()
}
