package traffic

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// httpClient is a client with its connections.
type httpClient struct {
	Load
	dialer  net.Dialer
	sources *sources
	request string
	open    map[netip.AddrPort]*httpConn // with KeepAlive
	spare   *bufio.Reader                // without
}

type httpConn struct {
	net.Conn
	in *bufio.Reader
}

func newHTTPClient(l Load, s *sources, number int) *httpClient {
	connection := "close"
	if l.KeepAlive {
		connection = "keep-alive"
	}
	c := &httpClient{
		Load: l, sources: s, open: map[netip.AddrPort]*httpConn{},
		request: "GET / HTTP/1.1\r\nHost: fairlead\r\nConnection: " + connection + "\r\n\r\n",
		// The runtime's probes are off here: each is a system call when a connection begins.
		dialer: net.Dialer{Timeout: l.Timeout, KeepAlive: -1, Control: reuse},
	}
	if n := len(l.Addresses); n > 0 {
		c.dialer.LocalAddr = &net.TCPAddr{IP: l.Addresses[number%n].AsSlice()}
	}
	return c
}

// reuse lets a port be used that was used a moment ago.
func reuse(_, _ string, c syscall.RawConn) (err error) {
	controlled := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(controlled, err)
}

// ask makes a request, and returns how long its phases took, the total apart.
func (c *httpClient) ask(to target) (s sample, err error) {
	begin := time.Now()
	conn := c.open[to.AddrPort]
	if conn == nil {
		if conn, err = c.connect(to); err != nil {
			return s, err
		}
		s.connected, s.connect = true, time.Since(begin)
	}
	_ = conn.SetDeadline(begin.Add(c.Timeout)) // fails only where all else does
	more, err := conn.exchange(c.request, &s)
	if c.KeepAlive && more && err == nil {
		c.open[to.AddrPort] = conn
		return s, nil
	}
	if c.FIN && !more && err == nil {
		_, _ = io.Copy(io.Discard, conn) // the server is the first to end it, and keeps what there is to be remembered of it
	}
	delete(c.open, to.AddrPort)
	_ = conn.Close()
	return s, err
}

func (c *httpClient) connect(to target) (*httpConn, error) {
	conn, err := dial(&c.dialer, to.name, c.sources)
	if err != nil {
		return nil, err
	}
	if !c.FIN {
		if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	in := c.spare
	if in == nil {
		in = bufio.NewReaderSize(nil, bufferBytes)
	}
	if !c.KeepAlive {
		c.spare = in
	}
	in.Reset(conn)
	return &httpConn{conn, in}, nil
}

// dial tries one source port after the other if one is in use.
func dial(d *net.Dialer, to string, s *sources) (conn net.Conn, err error) {
	if len(s.ports) == 0 {
		return d.DialContext(context.Background(), "tcp", to)
	}
	for range s.ports {
		d.LocalAddr = &net.TCPAddr{Port: s.take()}
		conn, err = d.DialContext(context.Background(), "tcp", to)
		if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			break
		}
	}
	return conn, err
}

// exchange sends a request and reads the answer. It reports whether the connection can be used again.
func (c *httpConn) exchange(request string, s *sample) (more bool, err error) {
	begin := time.Now()
	if _, err := io.WriteString(c, request); err != nil {
		return false, err
	}
	sent := time.Now()
	if _, err := c.in.Peek(1); err != nil {
		return false, err
	}
	s.waiting = time.Since(sent)
	answer, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return false, fmt.Errorf("read the answer: %w", err)
	}
	n, err := io.Copy(io.Discard, answer.Body)
	if err != nil {
		return false, err
	}
	s.processing, s.bytes = time.Since(begin), int(n)
	if answer.StatusCode != http.StatusOK {
		return !answer.Close, statusError(answer.StatusCode)
	}
	return !answer.Close, nil
}

func (c *httpClient) close() {
	for _, conn := range c.open {
		_ = conn.Close()
	}
}
