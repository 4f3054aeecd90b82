package ebpf_test

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// says is who answers a connected socket.
func says(conn net.Conn) (string, error) {
	if _, err := conn.Write([]byte("?\n")); err != nil {
		return "", err
	}
	if err := conn.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
		return "", err
	}
	answer := make([]byte, 128)
	n, err := conn.Read(answer)
	name, _, _ := strings.Cut(string(answer[:n]), " ")
	return name, err
}

// A node's socket that connected to a Service's address before the programs saw that is aborted, unless another plane
// serves it. A pod's is served by its packets.
func TestStrays(t *testing.T) {
	c := newCluster(t)
	have := parse(t, strings.ReplaceAll(dns, "backend default/web:dns cluster 10.244.1.12:5353 local\n", ""))
	dial := func(from testbed.Place, to string) net.Conn {
		conn, err := c.Dial(t.Context(), from, model.UDP, netip.MustParseAddrPort(to))
		check(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	four, six, later := dial(testbed.Node, "10.96.0.10:53"), dial(testbed.Node, "[fd00::a60:a]:53"), dial(testbed.Node, "10.96.0.12:53")
	carried, pod := dial(testbed.Node, "10.96.0.11:53"), dial("client", "10.96.0.10:53")
	pass := dial(testbed.Node, "10.244.1.11:5353")
	flow := ebpf.UDPFlow{From: addrPort(carried.LocalAddr()), To: addrPort(carried.RemoteAddr())}
	flows := map[ebpf.UDPFlow]netip.AddrPort{flow: netip.MustParseAddrPort("10.244.1.11:5353")}
	servedBy := func(f ebpf.UDPFlow) (netip.AddrPort, error) { return flows[f], nil }
	p := c.openAs(ebpf.Options{Serve: ebpf.TC, ServedBy: servedBy})
	defer p.Close()
	aborted := func(when string, want bool, conns ...net.Conn) {
		t.Helper()
		for _, conn := range conns {
			if _, err := conn.Write([]byte("?\n")); errors.Is(err, unix.EDESTADDRREQ) != want {
				t.Errorf("%s: a socket that is connected to %s should be aborted: %t; it is %v", when, conn.RemoteAddr(), want, err)
			}
		}
	}
	untilAborted := func(conn net.Conn, s *model.State) { // Audit looks after a while
		t.Helper()
		for {
			c.audited(p, s)
			if _, err := conn.Write([]byte("?\n")); errors.Is(err, unix.EDESTADDRREQ) {
				break
			}
			check(t, t.Context().Err())
		}
	}
	check(t, p.Sync(t.Context(), have))
	aborted("Sync", false, four, six, later, carried) // they may have connected a moment ago
	untilAborted(four, have)
	aborted("Audit has looked twice", true, six)
	aborted("Audit has looked twice", false, later, carried)
	for _, conn := range []net.Conn{pod, pass, dial(testbed.Node, "10.96.0.10:53")} {
		if name, err := says(conn); name != "pod-a" {
			t.Errorf("%s: %q, %v", conn.RemoteAddr(), name, err)
		}
	}
	more := parse(t, have.String()+"frontend 10.96.0.12:53/udp any forward default/web:dns cluster snat offcluster\n")
	check(t, p.Apply(t.Context(), more, model.Diff(have, more)))
	untilAborted(later, more)
	aborted("there is a Service", false, carried)
	flows[flow] = netip.MustParseAddrPort("10.244.1.12:5353") // which has left
	untilAborted(carried, more)
}

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.UDPAddr).AddrPort() }
