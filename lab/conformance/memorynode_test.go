package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Memory acts as the cluster with the cast: the node under test is a kernel of memory, and what passes that goes straight
// to its destination.
//
//	probe ─► arrival ─► memory.Kernel.Send ─┬─ Forward ─► the member of the cast at the backend's address answers
//	                                        ├─ Reject, Drop ─► refused, silence
//	                                        └─ Pass ─► the destination: a member answers, a machine refuses, or there is none
type Memory struct {
	memory.Kernel
	waits   bool // clients try again until they are answered, as the process may end and start again
	bridged bool
	ports   atomic.Uint32 // of clients: each connection has another one
}

// inMemory has planes of one nature tried.
func inMemory(n memory.Nature, waits bool) ground {
	return func(_ context.Context, spec testbed.Spec) (node, dataplane.New, error) {
		m := &Memory{waits: waits, bridged: spec.PodBridge}
		return m, m.Driver(memory.Name, n).Open, nil
	}
}

// Do calls f: there is one namespace.
func (m *Memory) Do(_ testbed.Place, f func() error) error { return f() }

// Cgroup is that of no node.
func (m *Memory) Cgroup() string { return "" }

// Close has nothing to give back.
func (m *Memory) Close() error { return nil }

// Addr is the address of a member of the cast.
func (m *Memory) Addr(place testbed.Place, v6 bool) netip.Addr {
	a, _ := (&testCase{}).arrival(place, addrOf(v6))
	return a
}

func addrOf(v6 bool) netip.Addr {
	if v6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

func (m *Memory) rules(context.Context) (text string, err error) {
	left, err := m.Driver(memory.Name, memory.Tracked).Inspect()
	if left.Rules {
		m.Kernel.Do(func(rows *model.State) { text = "table\n" + rows.String() })
	}
	return text, err
}

// forget has nothing to do: traffic ends its connections.
func (m *Memory) forget() error { return nil }

func (m *Memory) released(f func() error) error { return f() }

// Probe opens a connection and ends it.
func (m *Memory) Probe(ctx context.Context, p testbed.Probe) (o testbed.Outcome, err error) {
	if p.Protocol == 0 {
		p.Protocol = model.TCP
	}
	for began := time.Now(); ; {
		packet := m.packet(p.From, p.Protocol, p.To)
		o = m.send(packet, p.From)
		m.End(packet)
		if !m.waits || o.Result == testbed.Answered || time.Since(began) > p.Timeout {
			return o, ctx.Err()
		}
		runtime.Gosched()
	}
}

// packet begins a connection.
func (m *Memory) packet(from testbed.Place, protocol model.Protocol, to netip.AddrPort) memory.Packet {
	c := &testCase{options: map[string]string{"pod-bridge": fmt.Sprint(m.bridged)}}
	source, iface := c.arrival(from, to.Addr())
	return memory.Packet{SourcePort: uint16(m.ports.Add(1)), Packet: model.Packet{
		Protocol: protocol, Source: source, Destination: to, Interface: iface,
	}}
}

// send is what becomes of a packet.
func (m *Memory) send(p memory.Packet, _ testbed.Place) testbed.Outcome {
	switch a := m.Send(p); a.Verdict {
	case model.Forward:
		o := arrive(p, a.Backend.AddrPort())
		if a.Masquerade {
			o.Source = m.Addr(testbed.Node, p.Source.Is6())
		}
		return o
	case model.Reject:
		return testbed.Outcome{Result: testbed.Refused}
	case model.Drop:
		return testbed.Outcome{Result: testbed.TimedOut}
	}
	return arrive(p, p.Destination)
}

// arrive returns the pod that answers at an address.
func arrive(p memory.Packet, at netip.AddrPort) testbed.Outcome {
	for _, c := range Cast() {
		v4 := netip.MustParseAddr(c.Addr)
		serves := slices.ContainsFunc(c.ports(), func(port testbed.PodPort) bool {
			return port.Protocol == p.Protocol && port.Port == at.Port()
		})
		switch here := at.Addr() == v4 || at.Addr() == embedAddr(v4); {
		case here && (serves || p.Protocol == model.SCTP && at.Port() == 7000):
			return testbed.Outcome{Result: testbed.Answered, Backend: c.Name, Source: p.Source}
		case here && !c.HostNetwork:
			return testbed.Outcome{Result: testbed.Refused}
		}
	}
	if isNodeAddr(at.Addr()) || at.Addr().IsLoopback() {
		return testbed.Outcome{Result: testbed.Refused}
	}
	for _, a := range places() {
		if v4 := netip.MustParseAddr(a); at.Addr() == v4 || at.Addr() == embedAddr(v4) {
			return testbed.Outcome{Result: testbed.Refused}
		}
	}
	return testbed.Outcome{Result: testbed.Unreachable}
}

// Dial opens a connection that stays. See testbed.Bed.
func (m *Memory) Dial(
	_ context.Context, from testbed.Place, protocol model.Protocol, to netip.AddrPort,
) (net.Conn, error) {
	c := &memoryConn{node: m, from: from, packet: m.packet(from, protocol, to)}
	if protocol == model.UDP {
		return c, nil
	}
	if c.last = m.send(c.packet, from); c.last.Result != testbed.Answered {
		return nil, errors.New(c.last.String())
	}
	return c, nil
}

// memoryConn is an open connection. The answer to the last packet is what can be read.
type memoryConn struct {
	net.Conn // of which there is nothing else
	node     *Memory
	from     testbed.Place
	packet   memory.Packet
	last     testbed.Outcome
}

// Write sends a packet. One of TCP that begins a connection is an answer to nothing: it is reset.
func (c *memoryConn) Write(b []byte) (int, error) {
	c.last = c.node.send(c.packet, c.from)
	return len(b), nil
}

func (c *memoryConn) Read(b []byte) (int, error) {
	switch c.last.Result {
	case testbed.Answered:
		return copy(b, c.last.String()), nil
	case testbed.Refused:
		return 0, unix.ECONNREFUSED
	}
	return 0, os.ErrDeadlineExceeded
}

func (c *memoryConn) SetReadDeadline(time.Time) error { return nil }

func (c *memoryConn) Close() error {
	c.node.End(c.packet)
	return nil
}
