package testbed

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// server answers on one port of a pod: each connection and each datagram gets this line.
//
//	<pod> <address:port seen>
//
// A connection stays open and gets the line again for each line it sends. A connection whose first byte after the line
// is Echo gets back all that follows. A datagram that begins with it gets the pod's name and the rest of itself. Zeros
// after the line make the answer as large as the datagram.
type server struct {
	name string
	port io.Closer     // the listening socket
	gone chan struct{} // closed when the listener has ended

	mu    sync.Mutex
	conns map[io.Closer]struct{} // nil: the server has stopped
}

// Echo asks a server to send back what follows.
const Echo = '='

// serve starts servers for the ports that have none.
func (b *Bed) serve(p *pod, ports []PodPort) error {
	for _, port := range ports {
		if p.servers[port] != nil {
			continue
		}
		s := &server{name: p.Name, gone: make(chan struct{}), conns: map[io.Closer]struct{}{}}
		var loop func()
		err := p.host.at(func() (err error) {
			loop, err = s.listen(port)
			return err
		})
		if err != nil {
			return fmt.Errorf("serve %s: %w", port, err)
		}
		p.servers[port] = s
		b.serves.Go(func() {
			defer close(s.gone)
			loop()
		})
	}
	return nil
}

func (p *pod) stop() {
	for _, s := range p.servers {
		s.stop()
	}
	clear(p.servers)
}

// listen opens the socket, in the calling thread's namespace, and returns the loop that serves it.
// It serves both families and every address of the namespace.
func (s *server) listen(p PodPort) (loop func(), err error) {
	f, err := listenSocket(p)
	if err != nil {
		return nil, err
	}
	if p.Protocol != model.UDP {
		s.port = f
		return func() { s.acceptLoop(f) }, nil
	}
	defer f.Close() // FilePacketConn duplicates it
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, err
	}
	s.port = c
	return func() { s.udpLoop(c.(*net.UDPConn)) }, nil
}

func (s *server) acceptLoop(listener *os.File) {
	var group sync.WaitGroup
	defer group.Wait()
	for {
		c, from, err := accept(listener)
		switch {
		case err != nil && s.stopped():
			return
		case err != nil: // too many open files, or a connection that has gone already
			time.Sleep(time.Millisecond)
		case s.add(c):
			group.Go(func() { s.answer(c, from) })
		}
	}
}

func (s *server) answer(c *os.File, from netip.AddrPort) {
	defer s.remove(c)
	line := s.line(from)
	in := make([]byte, 4096)
	for lines := 1; ; {
		if _, err := c.Write(bytes.Repeat(line, lines)); err != nil {
			return
		}
		for lines = 0; lines == 0; {
			n, err := c.Read(in)
			if err != nil {
				return
			}
			if in[0] == Echo {
				if _, err := c.Write(in[1:n]); err == nil {
					_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, in) // the client sees what is wrong
				}
				return
			}
			lines = bytes.Count(in[:n], []byte("\n"))
		}
	}
}

func (s *server) udpLoop(c *net.UDPConn) {
	in, control := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo))
	for {
		size, n, _, from, err := c.ReadMsgUDPAddrPort(in, control)
		switch {
		case err != nil && s.stopped():
			return
		case err == nil: // else an ICMP error about an earlier answer
			// An answer that cannot be sent is a lost datagram, which clients must expect.
			_, _, _ = c.WriteMsgUDPAddrPort(s.reply(in[:size], from), fromDestination(control[:n]), from)
		}
	}
}

func (s *server) reply(datagram []byte, from netip.AddrPort) []byte {
	if len(datagram) == 0 || datagram[0] != Echo {
		line := s.line(from)
		return append(line, make([]byte, max(len(datagram)-len(line), 0))...)
	}
	return fmt.Appendf(nil, "%s %s", s.name, datagram[1:])
}

func (s *server) line(from netip.AddrPort) []byte {
	b := append(make([]byte, 0, 64), s.name...)
	b = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()).AppendTo(append(b, ' '))
	return append(b, '\n')
}

// add notes a connection so that stop can end it; it reports false, and has closed it, after stop.
func (s *server) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		c.Close()
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *server) remove(c io.Closer) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *server) stopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns == nil
}

// stop ends the server and its connections, whose clients see them end. The port is free when it has gone.
func (s *server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.port.Close()
	for c := range s.conns {
		c.Close()
	}
	s.conns = nil
}

// fromDestination turns the control message that says where a datagram was sent into the one that
// sends the answer from there. They are the same (struct in6_pktinfo, RFC 3542 section 6), but for
// the interface, its last four bytes: routing chooses the one that the answer leaves by.
func fromDestination(control []byte) []byte {
	if n := unix.CmsgLen(unix.SizeofInet6Pktinfo); len(control) >= n {
		clear(control[n-4 : n])
	}
	return control
}
