package userspace_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const otherService = "10.96.0.11:80"

// two has two namespaces, of which each has a Service with a backend.
func (n *node) two(protocol, backend, otherBackend string) *model.State {
	n.Helper()
	rows := "pods 10.244.0.0/16\n"
	for _, s := range [][3]string{{"attacker/web", service, backend}, {"victim/web", otherService, otherBackend}} {
		rows += fmt.Sprintf("pool %[1]s cluster\nbackend %[1]s cluster %[3]s\n"+
			"frontend %[2]s/%[4]s any forward %[1]s cluster snat offcluster\n", s[0], s[1], s[2], protocol)
	}
	s, err := model.ParseState(rows)
	if err != nil {
		n.Fatal(err)
	}
	n.resync(s)
	return s
}

// holder are clients that keep their connections.
type holder struct {
	*node
	from testbed.Place
	to   string
	open []net.Conn
}

// take opens one more. It reports false if that is reset.
func (h *holder) take() bool {
	h.Helper()
	c, err := h.bed.Dial(h.Context(), h.from, model.TCP, netip.MustParseAddrPort(h.to))
	if err == nil {
		h.open = append(h.open, c)
		h.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(eventually.Patience())) // fails only if it is closed
		_, err = c.Read(make([]byte, 1))
	}
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		h.Fatal(err)
	}
	return err == nil
}

// lose awaits that so many are left.
func (h *holder) lose(left int) {
	h.Helper()
	eventually.Equal(h, fmt.Sprintf("open connections from %s to %s", h.from, h.to), left, func() (open int) {
		for _, c := range h.open {
			_ = c.SetReadDeadline(time.Now().Add(time.Millisecond)) // fails only if it is closed
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
				open++
			}
		}
		return open
	})
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// TestShare_connections: a client that takes all places gives up as many of them as others need, and no more.
func TestShare_connections(t *testing.T) { byEachWay(t, testShareConnections) }

func testShareConnections(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, MaxConnections: 12})
	backend := n.greeting()
	s := n.two("tcp", backend, backend)
	attacker := &holder{node: n, from: "client", to: service}
	for attacker.take() {
	}
	attacker.lose(12)
	victim := &holder{node: n, from: "client", to: otherService}
	for range 6 {
		if !victim.take() {
			t.Error("a connection within the share of its namespace is reset")
		}
	}
	attacker.lose(6)
	if attacker.take() || victim.take() {
		t.Error("a connection beyond a share has a place")
	}
	other := &holder{node: n, from: "pod-b", to: service}
	for range 3 {
		if !other.take() {
			t.Error("a connection within the share of its client is reset")
		}
	}
	for holder, left := range map[*holder]int{attacker: 3, other: 3, victim: 6} {
		holder.lose(left)
	}
	for i := range 2 {
		n.log.Reset()
		if _, err := n.plane.Audit(t.Context(), s, dataplane.Quick); err != nil {
			t.Fatal(err)
		}
		const want = `service="attacker/web (connections), victim/web (connections)"`
		if told := strings.Contains(n.log.String(), want); told != (i == 0) {
			t.Errorf("audit %d tells %s", i, n.log.String())
		}
	}
}

// flood sends datagrams to an address from as many ports as there are, until a function is called.
func (n *node) flood(to string) (stop func()) {
	n.Helper()
	var socket int
	n.at("client", func() (err error) {
		socket, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
		return err
	})
	at := netip.MustParseAddrPort(to)
	var over atomic.Bool
	ended := make(chan error, 1)
	go func() {
		datagram := make([]byte, 8+32)
		binary.BigEndian.PutUint16(datagram[2:], at.Port())
		binary.BigEndian.PutUint16(datagram[4:], uint16(len(datagram)))
		var err error
		for port := uint16(1024); !over.Load() && err == nil; port = max(1024, port+1) {
			binary.BigEndian.PutUint16(datagram, port)
			err = unix.Sendto(socket, datagram, 0, &unix.SockaddrInet4{Addr: at.Addr().As4()})
			if errors.Is(err, unix.ENOBUFS) {
				err = nil
			}
		}
		ended <- errors.Join(err, unix.Close(socket))
	}()
	return func() {
		over.Store(true)
		if err := <-ended; err != nil {
			n.Error(err)
		}
	}
}

// TestShare_flood: whatever is sent to one Service, datagrams to another one are answered, on a flow that is open and on
// new ones. Clients repeat themselves. The flood comes to the same socket, and to the same queue of a processor. While
// the process does not run, the flood fills them, and the kernel loses datagrams of both Services.
func TestShare_flood(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY, MaxFlows: 200})
	n.two("udp", n.silent(), "10.244.1.11:5353")
	dial := func() net.Conn {
		c, err := n.bed.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(otherService))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	open := dial()
	defer open.Close()
	defer n.flood(service)()
	for range 20 {
		fresh := dial()
		eventually.Nil(t, "an answer on a new flow", func() error { return asks(fresh, time.Second) })
		fresh.Close()
		eventually.Nil(t, "an answer on an open flow", func() error { return asks(open, time.Second) })
	}
}

// TestShare_floodAnswered: the same where flows end while their answers are read. The client repeats itself, as in
// TestShare_floodRedirected.
func TestShare_floodAnswered(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY, MaxFlows: 12})
	n.two("udp", "10.244.1.11:5353", "10.244.1.11:5353")
	defer n.flood(service)()
	for range 10 {
		c, err := n.bed.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(otherService))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for range 3 {
			eventually.Nil(t, "an answer", func() error { return asks(c, time.Second) })
		}
	}
}

// asks sends a datagram and waits for an answer.
func asks(c net.Conn, patience time.Duration) error {
	_, err := c.Write([]byte("?\n"))
	if err == nil {
		err = c.SetReadDeadline(time.Now().Add(patience))
	}
	if err == nil {
		_, err = c.Read(make([]byte, 100))
	}
	return err
}

// TestShare_floodRedirected: where datagrams are redirected, whatever a client sends to one Service, others have answers
// of another one, on a flow that is open and on a new one. They repeat themselves: of what comes faster than the process
// can take in, as with the race detector, the kernel loses some.
func TestShare_floodRedirected(t *testing.T) {
	for _, way := range []userspace.Redirect{userspace.ByNAT, userspace.ByPlane} {
		t.Run(string(way), func(t *testing.T) {
			n := start(t, userspace.Options{Redirect: way, MaxFlows: 200})
			n.two("udp", n.silent(), "10.244.2.13:5353")
			open, err := n.bed.Dial(t.Context(), "pod-a", model.UDP, netip.MustParseAddrPort(otherService))
			if err == nil {
				err = asks(open, eventually.Patience())
			}
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			defer n.flood(service)()
			again := func(c net.Conn) func() error { return func() error { return asks(c, time.Second) } }
			for range 20 {
				eventually.Nil(t, "on an open flow", again(open))
			}
			fresh, err := n.bed.Dial(t.Context(), "pod-a", model.UDP, netip.MustParseAddrPort(otherService))
			if err != nil {
				t.Fatal(err)
			}
			defer fresh.Close()
			eventually.Nil(t, "on a new flow", again(fresh))
		})
	}
}
