package load

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"fairlead.dev/fairlead/lab/testbed"
)

// Servers answer in pods. To TCP they say
//
//	<pod> <address:port seen>
//
// at once, as the servers of a testbed do, so that its probes understand them, and then send back what comes. The
// datagram "?" is answered by that line, any other by the pod's name and itself.
type Servers struct {
	group sync.WaitGroup

	mu    sync.Mutex
	open  map[io.Closer]struct{}
	ended bool
}

// Serve starts servers in pods, on a port of TCP and UDP each. The caller closes them, after the load that needs them.
func Serve(bed *testbed.Bed, pods []testbed.Place, ports ...int) (*Servers, error) {
	s := &Servers{open: map[io.Closer]struct{}{}}
	for _, pod := range pods {
		for _, port := range ports {
			if err := bed.Do(pod, func() error { return s.serve(string(pod), port) }); err != nil {
				s.Close()
				return nil, fmt.Errorf("load: serve port %d in %s: %w", port, pod, err)
			}
		}
	}
	return s, nil
}

// serve opens the sockets, in the calling thread's namespace.
func (s *Servers) serve(pod string, port int) error {
	for _, family := range []string{"4", "6"} {
		var c net.ListenConfig
		address := fmt.Sprintf(":%d", port)
		listener, err := c.Listen(context.Background(), "tcp"+family, address)
		if err != nil {
			return err
		}
		s.add(listener)
		s.group.Go(func() { s.accept(pod, listener) })
		packets, err := c.ListenPacket(context.Background(), "udp"+family, address)
		if err != nil {
			return err
		}
		s.add(packets)
		s.group.Go(func() { answerDatagrams(pod, packets) })
	}
	return nil
}

// Close ends all, and breaks what is open.
func (s *Servers) Close() {
	s.mu.Lock()
	s.ended = true
	for c := range s.open {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.group.Wait()
}

// add notes what Close closes; after Close it does so at once.
func (s *Servers) add(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[c] = struct{}{}; s.ended {
		_ = c.Close()
	}
}

func (s *Servers) remove(c io.Closer) {
	_ = c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
}

func (s *Servers) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

func (s *Servers) accept(pod string, l net.Listener) {
	for {
		conn, err := l.Accept()
		if err == nil {
			s.add(conn)
			s.group.Go(func() {
				defer s.remove(conn)
				echo(pod, conn)
			})
		} else if s.over() {
			return
		}
	}
}

// echo ends its direction when the client has ended its own.
func echo(pod string, conn net.Conn) {
	if _, err := fmt.Fprintf(conn, "%s %s\n", pod, conn.RemoteAddr()); err == nil {
		_, _ = io.Copy(conn, conn) // whatever is wrong the client sees as well
	}
}

func answerDatagrams(pod string, c net.PacketConn) {
	request := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(request)
		if err != nil {
			return
		}
		what := strings.TrimSuffix(string(request[:n]), "\n")
		if what == "?" {
			what = from.String()
		}
		_, _ = c.WriteTo([]byte(pod+" "+what+"\n"), from) // what cannot be sent is lost
	}
}
