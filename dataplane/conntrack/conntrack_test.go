package conntrack_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// The table of package conformance (udp-*.txtar, tcp-lives.txtar) says what happens to one flow. These tests are about
// the other flows, which must live on, and about the wrapper's cost.

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(m.Run))
}

// stage is a wrapped plane on the node of a cluster with three backends and a client.
type stage struct {
	*testing.T
	bed   *testbed.Bed
	plane dataplane.Dataplane
	state *model.State
	dumps int   // how often flows were looked through
	fault error // of that

	looked, forgotten [2]int // what the meter was told of IPv4 and IPv6
}

// Forgot implements dataplane.Meter.
func (s *stage) Forgot(v6 bool, flows int, took time.Duration) {
	family := 0
	if v6 {
		family = 1
	}
	s.looked[family]++
	s.forgotten[family] += flows
	if took <= 0 {
		s.Error("looking through flows took ", took)
	}
}

// Listening implements dataplane.Meter.
func (s *stage) Listening(bool, int) { s.Error("nobody listens") }

// NotListening implements dataplane.Meter.
func (s *stage) NotListening(bool) { s.Error("nobody wants to listen") }

func newStage(t *testing.T) *stage {
	t.Helper()
	t.Parallel()
	s := &stage{T: t, state: model.NewState()}
	ports := []testbed.PodPort{{Protocol: model.UDP, Port: 53}, {Protocol: model.TCP, Port: 80}}
	s.bed = testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "a", Ports: ports}, {Name: "b", Node: testbed.NodeB, Ports: ports}, {Name: "c", Node: testbed.NodeB, Ports: ports},
		{Name: "client"},
	}})
	err := s.bed.Do(testbed.Node, func() (err error) {
		s.plane, err = conntrack.Wrap(nftables.New)(dataplane.Config{Fault: s.inject, Meter: s})
		return err
	})
	if err == nil {
		err = s.plane.Sync(t.Context(), s.state)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(s.plane.Remove(ctx), s.plane.Close()); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *stage) inject(operation string) error {
	if operation != "conntrack delete" {
		return nil
	}
	s.dumps++
	return s.fault
}

// apply brings the plane to a State of these rows.
func (s *stage) apply(rows ...string) error {
	s.Helper()
	c := s.parse(rows...)
	return s.plane.Apply(s.Context(), s.state, c)
}

// parse makes these rows, in which a, b and c are the pods' addresses, the wanted State.
func (s *stage) parse(rows ...string) model.Change {
	s.Helper()
	names := strings.NewReplacer("(a)", "10.244.1.2", "(b)", "10.244.2.2", "(c)", "10.244.2.3")
	to, err := model.ParseState(names.Replace(strings.Join(rows, "\n")))
	if err != nil {
		s.Fatal(err)
	}
	c := model.Diff(s.state, to)
	s.state = to
	return c
}

func (s *stage) must(rows ...string) {
	s.Helper()
	if err := s.apply(rows...); err != nil {
		s.Fatal(err)
	}
}

type flow struct {
	net.Conn
	backend string
}

// flows opens UDP flows, with a source port each.
func (s *stage) flows(from testbed.Place, to string) []*flow {
	s.Helper()
	const n = 16 // which all choose the same of two backends once in 2^15 times
	var all []*flow
	for range n {
		c, err := s.bed.Dial(s.Context(), from, model.UDP, netip.MustParseAddrPort(to))
		if err != nil {
			s.Fatal(err)
		}
		s.Cleanup(func() { c.Close() })
		f := &flow{Conn: c}
		f.backend = s.ask(f)
		all = append(all, f)
	}
	return all
}

func (s *stage) ask(f *flow) string {
	s.Helper()
	line := make([]byte, 128)
	_, err := f.Write([]byte("?\n"))
	err = errors.Join(err, f.SetReadDeadline(time.Now().Add(15*time.Second)))
	if err != nil {
		s.Fatal(err)
	}
	n, err := f.Read(line)
	if err != nil {
		s.Fatal(err)
	}
	name, _, _ := strings.Cut(string(line[:n]), " ")
	return name
}

// check fails if a flow has another backend than before, except those of one that left.
func (s *stay) check(flows []*flow) {
	s.Helper()
	for _, f := range flows {
		switch now := s.ask(f); {
		case now == s.left:
			s.Errorf("%s still answers", now)
		case f.backend != s.left && f.backend != now:
			s.Errorf("%s answers, %s before", now, f.backend)
		}
	}
}

type stay struct {
	*stage
	left string
}

const (
	dns   = "frontend 10.96.0.10:53/udp any forward default/dns cluster snat offcluster"
	other = "frontend 10.96.0.11:53/udp any forward default/other cluster snat offcluster"
	web   = "frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster"
	pods  = "pods 10.244.0.0/16"
)

// pool is a pool of the given pods.
func pool(id string, port int, pods ...string) string {
	lines := []string{"pool " + id}
	for _, pod := range pods {
		lines = append(lines, fmt.Sprintf("backend %s (%s):%d", strings.Replace(id, " affinity 1h0m0s", "", 1), pod, port))
	}
	return strings.Join(lines, "\n")
}

func TestPlane_flowsThatLiveOn(t *testing.T) {
	s := newStage(t)
	s.must(pods, dns, pool("default/dns cluster", 53, "a", "b", "c"), other, pool("default/other cluster", 53, "a", "b"))
	service, others := s.flows("client", "10.96.0.10:53"), s.flows("client", "10.96.0.11:53")
	direct := s.flows("client", "10.244.1.2:53")
	s.looked, s.forgotten = [2]int{}, [2]int{}
	s.must(pods, dns, pool("default/dns cluster", 53, "b", "c"), other, pool("default/other cluster", 53, "a", "b"))
	gone := 0
	for _, f := range service {
		if f.backend == "a" {
			gone++
		}
	}
	if s.looked != [2]int{1, 0} || s.forgotten != [2]int{gone, 0} {
		t.Errorf("the meter was told of %v looks and %v flows, want one look and %d flows of IPv4", s.looked, s.forgotten, gone)
	}
	(&stay{s, "a"}).check(service)
	(&stay{s, ""}).check(others)
	(&stay{s, ""}).check(direct)
}

// A Service has more addresses, and ports, than are looked at one by one. Flows to each of them go when its frontends
// lead to other backends, and those to other Services stay.
func TestPlane_manyAddresses(t *testing.T) {
	for name, ports := range map[string][]int{"one port": {53}, "two ports": {53, 54}, "many ports": {53, 54, 55, 56, 57}} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			var addresses []string
			for i := range 6 {
				addresses = append(addresses, fmt.Sprintf("10.96.1.%d", 1+i))
			}
			leading := func(to string) (rows []string) {
				for _, a := range addresses {
					for _, port := range ports {
						rows = append(rows, fmt.Sprintf("frontend %s:%d/udp any forward default/%s cluster snat offcluster", a, port, to))
					}
				}
				return rows
			}
			stays := []string{pods, other, pool("default/other cluster", 53, "a")}
			s.must(slices.Concat(stays, leading("dns"), []string{pool("default/dns cluster", 53, "a")})...)
			others := s.flows("client", "10.96.0.11:53")
			var flows []*flow
			for i, a := range addresses {
				flows = append(flows, s.flows("client", fmt.Sprintf("%s:%d", a, ports[i%len(ports)]))[:2]...)
			}
			s.must(slices.Concat(stays, leading("next"), []string{pool("default/next cluster", 53, "b")})...)
			(&stay{s, "a"}).check(flows)
			(&stay{s, ""}).check(others)
		})
	}
}

// A client that asked before there were rules is served when it asks again, from the same port: that is what
// it does when it sends its SYN once more.
func TestPlane_tooEarly(t *testing.T) {
	rows := []string{
		pods, "pods fd00::af4:0/112", web, pool("default/web cluster", 80, "b"),
		"frontend [fd00::a60:a]:80/tcp any forward default/web cluster6 snat offcluster",
		"pool default/web cluster6\nbackend default/web cluster6 [fd00::af4:202]:80",
	}
	for name, program := range map[string]func(s *stage) error{
		"sync": func(s *stage) error {
			s.parse(rows...)
			return s.plane.Sync(s.Context(), s.state)
		},
		"audit": func(s *stage) error {
			s.must(rows...)
			report, err := s.plane.Audit(s.Context(), s.state, dataplane.Quick)
			if len(report.Drifts) > 0 {
				s.Error(report.Drifts)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			v4, v6 := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00::a60:a")
			s.expect(v4, "unreachable")
			s.expect(v6, "unreachable")
			if err := program(s); err != nil {
				t.Fatal(err)
			}
			s.expect(v4, "b source 10.244.1.3")
			s.expect(v6, "b source fd00::af4:103")
			if s.forgotten != [2]int{} {
				t.Errorf("the meter was told of %v UDP flows", s.forgotten)
			}
		})
	}
}

// expect compares with what the client gets at port 80, always from the same port.
func (s *stage) expect(to netip.Addr, want string) {
	s.Helper()
	const port = 20000
	p := testbed.Probe{From: "client", To: netip.AddrPortFrom(to, 80), SourcePort: port, Timeout: 15 * time.Second}
	if want == "timed out" {
		p.Timeout = 5 * time.Second
	}
	outcome, err := s.bed.Probe(s.Context(), p)
	if got := outcome.String(); got != want || err != nil {
		s.Errorf("%s: %s, %v; want %s", to, got, err, want)
	}
}

// When the node and its pods are no longer treated apart, clients from outside keep their backends.
func TestPlane_scopeGoes(t *testing.T) {
	s := newStage(t)
	node := "frontend 192.0.2.1:30053/udp "
	s.must(pods, node+"internal forward default/dns cluster snat always", node+"any forward default/dns local snat never",
		pool("default/dns cluster", 53, "a", "b"), pool("default/dns local", 53, "a"))
	flows := s.flows(testbed.Outside, "192.0.2.1:30053")
	s.must(pods, node+"any forward default/dns cluster snat always", pool("default/dns cluster", 53, "a", "b"))
	(&stay{s, ""}).check(flows)
}

// Flows are looked through only if a change can have made one stale.
func TestPlane_looksOnlyIfNeeded(t *testing.T) {
	s := newStage(t)
	udp := pool("default/dns cluster", 53, "a", "b")
	tcp := pool("default/web cluster", 80, "a", "b")
	s.must(pods, dns, udp, web, tcp)
	for _, step := range []struct {
		what string
		rows []string
		want int
	}{
		{"nothing", []string{pods, dns, udp, web, tcp}, 0},
		{"a TCP backend leaves", []string{pods, dns, udp, web, pool("default/web cluster", 80, "a")}, 0},
		{"a TCP frontend goes", []string{pods, dns, udp}, 0},
		{"a UDP backend comes", []string{pods, dns, pool("default/dns cluster", 53, "a", "b", "c")}, 0},
		{"a UDP backend leaves", []string{pods, dns, udp}, 1},
		{"a UDP frontend goes", []string{pods}, 1},
	} {
		s.dumps = 0
		if s.must(step.rows...); s.dumps != step.want {
			t.Errorf("%s: looked %d times, want %d", step.what, s.dumps, step.want)
		}
	}
}

func (s *stage) setStage(to dataplane.Stage) {
	s.Helper()
	if _, err := s.plane.SetStage(s.Context(), s.state, to); err != nil {
		s.Fatal(err)
	}
}

// A standby plane leaves flows to the active plane. The first Audit after it becomes active forgets flows that have
// become stale meanwhile.
func TestPlane_waits(t *testing.T) {
	s := newStage(t)
	s.must(pods, dns, pool("default/dns cluster", 53, "a", "b"))
	flows := s.flows("client", "10.96.0.10:53")
	s.setStage(dataplane.Standby)
	s.must(pods, dns, pool("default/dns cluster", 53, "b", "c"))
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Fatal(err)
	}
	(&stay{s, ""}).check(flows)
	s.setStage(dataplane.Active)
	if _, err := s.plane.Audit(t.Context(), s.state, dataplane.Quick); err != nil {
		t.Fatal(err)
	}
	(&stay{s, "a"}).check(flows)
}

func TestPlane_fault(t *testing.T) {
	s := newStage(t)
	s.must(pods, dns, pool("default/dns cluster", 53, "a"))
	flows := s.flows("client", "10.96.0.10:53")
	s.fault = errors.New("broken")
	if err := s.apply(pods, dns, pool("default/dns cluster", 53, "b", "c")); !errors.Is(err, s.fault) {
		t.Error(err)
	}
	s.fault = nil
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Error(err)
	}
	(&stay{s, "a"}).check(flows)
}

// The wrapped plane's memory of clients stays in reach, and follows a flow to its next backend.
func TestPlane_affinity(t *testing.T) {
	s := newStage(t)
	affinity := "default/dns cluster affinity 1h0m0s"
	s.must(pods, dns, pool(affinity, 53, "a"))
	flows := s.flows("client", "10.96.0.10:53")
	for _, backends := range [][]string{{"a"}, {"c"}} {
		s.must(pods, dns, pool(affinity, 53, backends...))
		got := s.ask(flows[0])
		session := dataplane.Session{Pool: model.PoolID{Service: "default/dns"}, Client: s.bed.Addr("client", false)}
		ok, err := session.Find(t.Context(), s.plane, s.state)
		want := netip.AddrPortFrom(s.bed.Addr(testbed.Place(backends[0]), false), 53)
		if got != backends[0] || session.Backend != want || !ok || err != nil {
			t.Errorf("%s answers, %s %v %v is remembered, want %s", got, session.Backend, ok, err, want)
		}
	}
	(&stay{s, "a"}).check(flows)
}

// A client that the removed backend has not answered is served when it asks again, from the same port.
func TestPlane_unanswered(t *testing.T) {
	rows := func(pod string) []string { return []string{pods, web, pool("default/web cluster", 80, pod)} }
	for name, remove := range map[string]func(s *stage) error{
		"apply": func(s *stage) error { return s.apply(rows("b")...) },
		"sync": func(s *stage) error {
			s.parse(rows("b")...)
			return s.plane.Sync(s.Context(), s.state)
		},
		"standby": func(s *stage) error {
			s.setStage(dataplane.Standby)
			s.must(rows("b")...)
			s.setStage(dataplane.Active)
			_, err := s.plane.Audit(s.Context(), s.state, dataplane.Quick)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			const silent = "table inet silent { chain in { type filter hook input priority 0; tcp dport 80 drop; }; }"
			if out, err := s.bed.Command(t.Context(), "a", "nft", silent).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			s.must(rows("a")...)
			s.expect(netip.MustParseAddr("10.96.0.10"), "timed out")
			if err := remove(s); err != nil {
				t.Fatal(err)
			}
			s.expect(netip.MustParseAddr("10.96.0.10"), "b source 10.244.1.3")
		})
	}
}

// TestPlane_zone: a CNI tracks flows to a Service in a zone, and translates them elsewhere. They stay.
func TestPlane_zone(t *testing.T) {
	s := newStage(t)
	const zone = "add table ip zones; add chain ip zones prerouting { type filter hook prerouting priority raw; }; " +
		"add rule ip zones prerouting meta l4proto { tcp, udp } th sport 20001 ct zone set 7"
	if out, err := s.bed.Command(t.Context(), testbed.Node, "nft", zone).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	for port, protocols := range map[uint16][]model.Protocol{20001: {model.UDP, model.TCP}, 20002: {model.UDP}} {
		for _, protocol := range protocols {
			to := netip.AddrPortFrom(netip.MustParseAddr("10.96.0.10"), map[model.Protocol]uint16{model.UDP: 53, model.TCP: 80}[protocol])
			p := testbed.Probe{From: "client", To: to, Protocol: protocol, SourcePort: port, Timeout: 15 * time.Second}
			if o, err := s.bed.Probe(t.Context(), p); err != nil || o.Result != testbed.Unreachable {
				t.Error(o, err)
			}
		}
	}
	s.parse(pods, dns, pool("default/dns cluster", 53, "a"), web, pool("default/web cluster", 80, "b"))
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Fatal(err)
	}
	for port, want := range map[uint16]int{20001: 2, 20002: 0} {
		if flows := s.bed.OfPort(port); strings.Count(flows, "dst=10.96.0.10 ") != want {
			t.Errorf("want %d, have: %s", want, flows)
		}
	}
}
