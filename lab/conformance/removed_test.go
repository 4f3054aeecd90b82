package conformance_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestRemoved has clients ask a backend that answers no more, and the Service loses it. Clients that ask again from the
// same ports reach another backend, and so do those that still wait. With affinity all of a client reach the same. Connections that are open live on.
func TestRemoved(t *testing.T) {
	t.Parallel()
	legacy := iptables.New(iptables.Options{Backend: iptables.Legacy})
	all := append(successors(t), successor{"iptables-legacy", localhost.Wrap(conntrack.Wrap(legacy))},
		successor{"ebpf-behind", ebpfPlane(t, ebpf.Behind, plane)})
	for _, s := range all {
		testRemoved(t, s, model.TCP)
	}
}

func TestRemoved_SCTP(t *testing.T) {
	t.Parallel()
	if !testbed.HasProtocol(model.SCTP) {
		vm.Replay(t, "SCTP")
		return
	}
	testRemoved(t, successor{"nftables", plane}, model.SCTP)
}

func TestRemoved_IPVS(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	testRemoved(t, successor{"ipvs", ipvsPlane(ipvs.Options{})}, model.TCP)
}

func testRemoved(t *testing.T, s successor, p model.Protocol) {
	t.Run(s.name, func(t *testing.T) {
		t.Parallel()
		for name, affinity := range map[string]string{"any": "", "affinity": " affinity 1h0m0s"} { // planes may share pins
			t.Run(name, func(t *testing.T) { newRemoved(t, p, affinity).run(s) })
		}
	})
}

// removed is a Service whose backend pod-a is to be replaced by pod-b and pod-c.
type removed struct {
	*testing.T
	bed      *testbed.Bed
	protocol model.Protocol
	affinity string
	clients  []removedClient

	mu      sync.Mutex
	reached map[removedClient]string // which of them, with affinity
}

// removedClient asks from two ports that no other client has: a plane may use a client's port as its own.
type removedClient struct {
	from  testbed.Place
	to    netip.AddrPort
	ports uint16 // the first one
}

func newRemoved(t *testing.T, p model.Protocol, affinity string) *removed {
	serves := []testbed.PodPort{{Protocol: p, Port: 8080}}
	bed := testbed.Need(t, testbed.Spec{Cgroup: true, Pods: []testbed.PodSpec{
		{Name: "client", Node: testbed.Node}, {Name: "pod-a", Node: testbed.NodeB, Ports: serves},
		{Name: "pod-b", Node: testbed.NodeB, Ports: serves}, {Name: "pod-c", Node: testbed.NodeB, Ports: serves},
	}})
	r := &removed{T: t, bed: bed, protocol: p, affinity: affinity, reached: map[removedClient]string{}}
	for _, from := range []testbed.Place{"client", testbed.Node, testbed.Outside} {
		for _, v6 := range []bool{false, true} {
			r.clients = append(r.clients, removedClient{from, r.service(v6), uint16(50_000 + 2*len(r.clients))})
		}
	}
	return r
}

func (r *removed) service(v6 bool) netip.AddrPort {
	a := netip.MustParseAddr("10.96.0.10")
	if v6 {
		a = testbed.EmbedV6(a)
	}
	return netip.AddrPortFrom(a, 80)
}

// rows are those of the Service with backends.
func (r *removed) rows(pods ...testbed.Place) *model.State {
	r.Helper()
	rows := "pods 10.244.0.0/16\npods fd00::af4:0/112\n"
	for _, v6 := range []bool{false, true} {
		to, pool := r.service(v6), "default/web cluster"
		if v6 {
			pool += "6"
		}
		for _, pod := range pods {
			rows += fmt.Sprintf("backend %s %s\n", pool, netip.AddrPortFrom(r.bed.Addr(pod, v6), 8080))
		}
		rows += fmt.Sprintf("frontend %s/%s any forward %s snat offcluster\npool %s%s\n", to, r.protocol, pool, pool, r.affinity)
	}
	s, err := model.ParseState(rows)
	must(r.T, err)
	return s
}

func (r *removed) run(s successor) {
	before, after := r.rows("pod-a"), r.rows("pod-b", "pod-c")
	m := memories{T: r.T, bed: r.bed, open: s.open, s: before}
	p := m.plane(dataplane.Config{})
	defer func() { must(r.T, errors.Join(p.Remove(context.Background()), p.Close())) }()
	must(r.T, p.Sync(r.Context(), before))
	open := map[removedClient]*lines{}
	for _, c := range r.clients {
		if r.protocol == model.TCP || c.from != testbed.Outside { // SCTP behind another address is no matter of this test
			open[c] = r.open(c)
		}
	}
	begins := "tcp flags & (syn | ack) == syn"
	if r.protocol == model.SCTP {
		begins = "sctp chunk init exists"
	}
	out, err := r.bed.Command(r.Context(), "pod-a", "nft",
		"table inet silent { chain in { type filter hook input priority 0; "+begins+" drop; }; }").CombinedOutput()
	if err != nil {
		r.Fatalf("%v: %s", err, out)
	}
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { r.each(func(c removedClient) { r.wait(s, c) }) })
	r.each(func(c removedClient) {
		if got := r.ask(c, c.ports, 100*time.Millisecond); got.Result != testbed.TimedOut {
			r.Errorf("%s to %s, whose backend does not answer: %s", c.from, c.to, got)
		}
	})
	must(r.T, p.Apply(r.Context(), after, model.Diff(before, after)))
	r.each(func(c removedClient) {
		r.reaches(c, c.ports, "from a port from which the removed backend was asked")
	})
	for c, l := range open {
		must(r.T, l.SetDeadline(time.Now().Add(patience)))
		_, err := l.Write([]byte("?\n"))
		must(r.T, err)
		r.answers(c, l, "after its backend was removed")
	}
}

// wait asks before the backend is removed, and goes on until it is answered.
func (r *removed) wait(s successor, c removedClient) {
	if s.name == "ebpf" && c.from == testbed.Node || s.name == "ebpf-behind" && c.from != testbed.Outside {
		return // its socket asks the backend itself, and its packets meet nothing that leads them elsewhere
	}
	r.reaches(c, c.ports+1, "which had waited for the backend that was removed")
}

// reaches asks for a backend that has come.
func (r *removed) reaches(c removedClient, port uint16, what string) {
	got := r.ask(c, port, patience)
	if got.Backend != "pod-b" && got.Backend != "pod-c" {
		r.Errorf("%s to %s, %s: %s", c.from, c.to, what, got)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if other := r.reached[c]; r.affinity != "" && other != "" && other != got.Backend {
		r.Errorf("%s to %s, %s: %s, and another connection reached %s", c.from, c.to, what, got.Backend, other)
	}
	r.reached[c] = got.Backend
}

// patience is until a client has sent its first packet some more times: on a busy machine its backend is removed late.
const patience = 40 * time.Second

// each has all clients do something at the same time.
func (r *removed) each(do func(removedClient)) {
	var group sync.WaitGroup
	defer group.Wait()
	for _, c := range r.clients {
		group.Go(func() { do(c) })
	}
}

func (r *removed) ask(c removedClient, port uint16, patience time.Duration) testbed.Outcome {
	o, err := r.bed.Probe(context.Background(), testbed.Probe{From: c.from, To: c.to, Protocol: r.protocol, SourcePort: port, Timeout: patience})
	if err != nil {
		r.Error(err)
	}
	return o
}

// open is a connection that stays.
func (r *removed) open(c removedClient) *lines {
	r.Helper()
	conn, err := r.bed.Dial(r.Context(), c.from, r.protocol, c.to)
	must(r.T, err)
	r.Cleanup(func() { conn.Close() })
	l := &lines{conn, bufio.NewReader(conn)}
	r.answers(c, l, "when it has begun")
	return l
}

// lines are what a server answers, a line for each line.
type lines struct {
	net.Conn
	in *bufio.Reader
}

// answers has the first backend answer the last line.
func (r *removed) answers(c removedClient, l *lines, when string) {
	r.Helper()
	must(r.T, l.SetDeadline(time.Now().Add(patience)))
	if line, err := l.in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "pod-a ") {
		r.Errorf("an open connection of %s to %s %s: %q, %v", c.from, c.to, when, line, err)
	}
}

// TestLearn_removed has a plane learn where clients are whose own backend, which it remembers for longer, has left.
func TestLearn_removed(t *testing.T) {
	t.Parallel()
	for _, s := range successors(t) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			newRemoved(t, model.TCP, " affinity 1h0m0s").learn(s)
		})
	}
}

func (r *removed) learn(s successor) {
	before, after := r.rows("pod-a"), r.rows("pod-b", "pod-c")
	m := memories{T: r.T, bed: r.bed, open: s.open, s: before}
	p := m.plane(dataplane.Config{})
	defer func() { must(r.T, errors.Join(p.Remove(context.Background()), p.Close())) }()
	must(r.T, p.Sync(r.Context(), before))
	var known []dataplane.Session
	for i, c := range r.clients {
		if got := r.ask(c, c.ports, patience); got.Backend != "pod-a" {
			r.Fatalf("%s to %s: %s", c.from, c.to, got)
		}
		to := []string{"pod-b", "pod-c"}[i/2%2]
		r.reached[c] = to
		v6 := c.to.Addr().Is6()
		known = append(known, dataplane.Session{
			Pool: after.Frontends[model.Key{Addr: c.to.Addr(), Port: 80, Protocol: r.protocol}].Pool, Client: r.bed.Addr(c.from, v6),
			Backend: netip.AddrPortFrom(r.bed.Addr(testbed.Place(to), v6), 8080), Until: time.Now().Add(time.Minute),
		})
	}
	must(r.T, p.Apply(r.Context(), after, model.Diff(before, after)))
	_, err := p.Learn(r.Context(), after, told(known))
	must(r.T, err)
	r.each(func(c removedClient) { r.reaches(c, c.ports+1, "where another plane has it") })
}
