package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestUnanswered_both has clients ask a slow backend by UDP, and ask again when a second plane is there. One plane goes
// on with their flows, and the other one's refusals do not concern them.
func TestUnanswered_both(t *testing.T) {
	t.Parallel()
	all := filters(t)
	for i, from := range all {
		testUnanswered(t, from, all[(i+1)%len(all)])
		testUnanswered(t, all[(i+1)%len(all)], from)
	}
}

func TestUnanswered_bothIPVS(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	ipvs := successor{"ipvs", ipvsPlane(ipvs.Options{})}
	for _, other := range filters(t) {
		testUnanswered(t, ipvs, other)
		testUnanswered(t, other, ipvs)
	}
}

// filters are the planes that look at the packets of the node's sockets. (When mode ebpf comes, it connects a socket
// anew that no backend has answered.)
func filters(t *testing.T) []successor {
	legacy := iptables.New(iptables.Options{Backend: iptables.Legacy})
	all := append(successors(t), successor{"iptables-legacy", localhost.Wrap(conntrack.Wrap(legacy))})
	return slices.DeleteFunc(all, func(s successor) bool { return s.name == "ebpf" })
}

func testUnanswered(t *testing.T, from, to successor) {
	t.Run(from.name+" to "+to.name, func(t *testing.T) {
		s := newSlow(t)
		m := memories{T: t, bed: s.bed, open: from.open, s: s.rows}
		before := m.plane(dataplane.Config{})
		defer func() { must(t, errors.Join(before.Remove(context.Background()), before.Close())) }()
		must(t, before.Sync(t.Context(), s.rows))
		s.dial()
		s.ask("with " + from.name)
		m.open = to.open
		now := m.plane(dataplane.Config{})
		defer func() { must(t, errors.Join(now.Remove(context.Background()), now.Close())) }()
		_, err := now.SetStage(t.Context(), nil, dataplane.Standby)
		must(t, err)
		must(t, now.Sync(t.Context(), s.rows))
		s.ask("with " + to.name + " as well")
	})
}

// slow is a Service whose backend does not answer.
type slow struct {
	*testing.T
	bed     *testbed.Bed
	rows    *model.State
	backend net.PacketConn
	clients []net.Conn
}

func newSlow(t *testing.T) *slow {
	const address, port = "10.96.0.10", 5353
	bed := testbed.Need(t, testbed.Spec{Cgroup: true, Pods: []testbed.PodSpec{
		{Name: "client", Node: testbed.Node}, {Name: "pod-a", Node: testbed.NodeB},
	}})
	s := &slow{T: t, bed: bed}
	must(t, bed.Do("pod-a", func() (err error) {
		s.backend, err = net.ListenPacket("udp", fmt.Sprintf(":%d", port))
		return err
	}))
	t.Cleanup(func() { s.backend.Close() })
	rows := "pods 10.244.0.0/16\npods fd00::af4:0/112\n"
	for _, v6 := range []bool{false, true} {
		to := netip.AddrPortFrom(netip.MustParseAddr(address), 53)
		pool := "default/dns cluster"
		if v6 {
			to, pool = netip.AddrPortFrom(testbed.EmbedV6(to.Addr()), 53), pool+"6"
		}
		rows += fmt.Sprintf("backend %s %s\nfrontend %s/udp any forward %s snat offcluster\nguard %s reject\n",
			pool, netip.AddrPortFrom(bed.Addr("pod-a", v6), port), to, pool, netip.PrefixFrom(to.Addr(), to.Addr().BitLen()))
	}
	var err error
	s.rows, err = model.ParseState(rows)
	must(t, err)
	return s
}

// dial opens the sockets of the clients.
func (s *slow) dial() {
	s.Helper()
	for key := range s.rows.Frontends {
		for _, from := range []testbed.Place{"client", testbed.Node, testbed.Outside} {
			conn, err := s.bed.Dial(s.Context(), from, model.UDP, key.AddrPort())
			must(s.T, err)
			s.Cleanup(func() { conn.Close() })
			s.clients = append(s.clients, conn)
		}
	}
}

// ask sends a datagram from each client, and waits until the backend has it. A refused client gets an error.
func (s *slow) ask(when string) {
	s.Helper()
	buffer := make([]byte, 100)
	for i, c := range s.clients {
		question := fmt.Sprintf("%d %s", i, when)
		_, err := c.Write([]byte(question))
		must(s.T, err)
		must(s.T, s.backend.SetReadDeadline(time.Now().Add(10*time.Second)))
		if n, _, err := s.backend.ReadFrom(buffer); err != nil || string(buffer[:n]) != question {
			must(s.T, c.SetReadDeadline(time.Now().Add(time.Second)))
			_, refused := c.Read(buffer)
			s.Errorf("%s, %s to %s: the backend has %q, %v; the client %v", when, c.LocalAddr(), c.RemoteAddr(), buffer[:n], err, refused)
			return
		}
	}
}
