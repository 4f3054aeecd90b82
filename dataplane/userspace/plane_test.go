package userspace_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

const (
	service = "10.96.0.10:80"
)

// node is a plane on the node of a testbed with three pods: client, pod-a (both on the node) and pod-b.
type node struct {
	testing.TB
	bed   *testbed.Bed
	plane dataplane.Dataplane
	log   bytes.Buffer // of the plane, which writes to it in its calls
}

func start(t testing.TB, o userspace.Options) *node { return startOn(t, testbed.Spec{}, o) }

func startOn(t testing.TB, spec testbed.Spec, o userspace.Options) *node {
	t.Helper()
	if t, ok := t.(*testing.T); ok {
		t.Parallel()
	}
	ports := []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}}
	pod := func(name, addr string, at testbed.Place) testbed.PodSpec {
		return testbed.PodSpec{Name: name, Node: at, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ports: ports}
	}
	spec.Pods = []testbed.PodSpec{
		pod("client", "10.244.1.20", testbed.Node), pod("pod-a", "10.244.1.11", testbed.Node),
		pod("pod-b", "10.244.2.13", testbed.NodeB),
	}
	bed := testbed.Need(t, spec)
	n := &node{TB: t, bed: bed}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.Driver(o, legacyTables(), nil).Open(dataplane.Config{Log: slog.New(slog.NewTextHandler(&n.log, nil))})
		return err
	})
	t.Cleanup(func() { n.plane.Close() })
	return n
}

func legacyTables() dataplane.New {
	return conntrack.Wrap(iptables.New(iptables.Options{Backend: iptables.Legacy}))
}

// byEachWay runs a test for each way in which packets come to the process.
func byEachWay(t *testing.T, test func(*testing.T, userspace.Redirect)) {
	for _, way := range []userspace.Redirect{userspace.ByTPROXY, userspace.ByNAT, userspace.ByPlane} {
		t.Run(string(way), func(t *testing.T) { test(t, way) })
	}
}

func (n *node) at(place testbed.Place, f func() error) {
	n.Helper()
	if err := n.bed.Do(place, f); err != nil {
		n.Fatal(err)
	}
}

// sync programs rows: the Service's frontend, and its backends, each with what follows the address.
func (n *node) sync(protocol string, backends ...string) *model.State {
	n.Helper()
	rows := "pods 10.244.0.0/16\npool default/web cluster\n" +
		"frontend " + service + "/" + protocol + " any forward default/web cluster snat offcluster\n"
	for _, b := range backends {
		rows += "backend default/web cluster " + b + "\n"
	}
	s, err := model.ParseState(rows)
	if err == nil {
		err = n.plane.Sync(n.Context(), s)
	}
	if err != nil {
		n.Fatal(err)
	}
	return s
}

// TestLeastOfTwo: a new connection goes to the backend that has fewer.
func TestLeastOfTwo(t *testing.T) {
	n := start(t, userspace.Options{})
	names := map[string]string{n.naming("a"): "a", n.naming("b"): "b"}
	rows := "pods 10.244.0.0/16\npool default/web cluster scheduler twos\n" +
		"frontend " + service + "/tcp any forward default/web cluster snat offcluster\n"
	for b := range names {
		rows += "backend default/web cluster " + b + "\n"
	}
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	open := map[string][]*net.TCPConn{}
	connect := func() {
		c := n.dial()
		name := make([]byte, 1)
		if _, err := io.ReadFull(c, name); err != nil {
			t.Fatal(err)
		}
		open[string(name)] = append(open[string(name)], c)
	}
	for range 20 {
		connect()
	}
	if len(open["a"]) != 10 || len(open["b"]) != 10 {
		t.Fatalf("%d and %d", len(open["a"]), len(open["b"]))
	}
	for _, c := range open["a"] {
		c.Close()
	}
	eventually.Nil(t, "the end of ten", func() error {
		if left := n.plane.Open(); left != 10 {
			return fmt.Errorf("%d are open", left)
		}
		return nil
	})
	open["a"] = nil
	for range 10 {
		connect()
	}
	if len(open["a"]) != 10 {
		t.Errorf("%d of 10 go to who has none", len(open["a"]))
	}
}

// naming is a backend that says its name.
func (n *node) naming(name string) string {
	return n.listen(func(c *net.TCPConn) {
		_, _ = c.Write([]byte(name)) // a client without it reports that
		go discard(c)
	})
}

// discard reads until the client ends, and then does so, too.
func discard(c *net.TCPConn) {
	defer c.Close()
	_, _ = io.Copy(io.Discard, c) // whatever the end is
}

// openOther makes another plane on the node.
func (n *node) openOther(plane dataplane.New, c dataplane.Config) (p dataplane.Dataplane) {
	n.Helper()
	n.at(testbed.Node, func() (err error) {
		p, err = plane(c)
		return err
	})
	n.Cleanup(func() { p.Close() })
	return p
}

// resync calls Sync.
func (n *node) resync(s *model.State) {
	n.Helper()
	if err := n.plane.Sync(n.Context(), s); err != nil {
		n.Fatal(err)
	}
}

// nft has the node's nft do something.
func (n *node) nft(commands string) string {
	n.Helper()
	nft := n.bed.Command(n.Context(), testbed.Node, "nft", "-f", "-")
	nft.Stdin = strings.NewReader(commands)
	out, err := nft.CombinedOutput()
	if err != nil {
		n.Fatalf("nft: %v: %s", err, out)
	}
	return string(out)
}

// dial connects a pod with the Service.
func (n *node) dial() *net.TCPConn { return n.dialTo(service) }

func (n *node) dialTo(to string) *net.TCPConn {
	n.Helper()
	return n.dialFrom(netip.AddrPort{}, to)
}

// dialFrom connects from a port, which may have been used a moment ago, or from any.
func (n *node) dialFrom(from netip.AddrPort, to string) *net.TCPConn {
	n.Helper()
	dialer := net.Dialer{Timeout: eventually.Patience()}
	if from.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(from)
		dialer.Control = reuse
	}
	var conn net.Conn
	n.at("client", func() (err error) {
		conn, err = dialer.DialContext(n.Context(), "tcp4", to)
		return err
	})
	n.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		n.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

func reuse(_, _ string, c syscall.RawConn) (err error) {
	controlled := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(controlled, err)
}

// listen makes pod-a serve a port by a function.
func (n *node) listen(serve func(*net.TCPConn)) (backend string) {
	n.Helper()
	var listener net.Listener
	n.at("pod-a", func() (err error) {
		listener, err = net.Listen("tcp4", "10.244.1.11:0")
		return err
	})
	n.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serve(conn.(*net.TCPConn))
		}
	}()
	return listener.Addr().String()
}

// answers probes the Service, and reports who answered.
func (n *node) answers(p model.Protocol) string {
	n.Helper()
	o, err := n.bed.Probe(n.Context(), testbed.Probe{
		From: "client", To: netip.MustParseAddrPort(service), Protocol: p, Timeout: eventually.Patience(),
	})
	if err != nil {
		n.Fatal(err)
	}
	if o.Result != testbed.Answered {
		return o.Result.String()
	}
	return o.Backend
}

func TestDial_nextBackend(t *testing.T) { byEachWay(t, testDialNextBackend) }

func testDialNextBackend(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, DialTimeout: eventually.Patience()})
	n.sync("tcp", "10.244.1.11:9", "10.244.1.99:8080", "10.244.2.13:8080") // refused, no host, pod-b
	begun := time.Now()
	for i := range 12 {
		if who := n.answers(model.TCP); who != "pod-b" {
			t.Fatalf("%s", who)
		}
		if i == 0 || i == 11 && time.Since(begun) < time.Second { // later clients find out again who is not there
			n.counted("dials failed 2 retried 1 unanswered 0\n",
				"served default/web cluster 10.244.1.11:9 connections 0 failed 1\n")
		}
	}
}

// counted is an error if the plane's counters lack a line.
func (n *node) counted(lines ...string) {
	n.Helper()
	counters, err := n.plane.Counters(n.Context())
	if err != nil {
		n.Fatal(err)
	}
	for _, want := range lines {
		if !strings.Contains(counters.String(), want) {
			n.Errorf("no %q in:\n%s", want, counters)
		}
	}
}

// TestBridge has a client on a bridge that asks netfilter, and one on a bridge that does not.
func TestBridge(t *testing.T) {
	for _, asks := range []string{"0", "1"} {
		t.Run("bridge-nf-call-iptables="+asks, func(t *testing.T) {
			n := startOn(t, testbed.Spec{PodBridge: true}, userspace.Options{})
			set := "test ! -e /proc/sys/net/bridge || echo " + asks + " > /proc/sys/net/bridge/bridge-nf-call-iptables"
			if out, err := n.bed.Command(t.Context(), testbed.Node, "sh", "-c", set).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			n.sync("tcp", "10.244.1.11:8080")
			if who := n.answers(model.TCP); who != "pod-a" {
				t.Errorf("%s", who)
			}
			n.sync("udp", "10.244.1.11:5353")
			if who := n.answers(model.UDP); who != "pod-a" {
				t.Errorf("%s", who)
			}
		})
	}
}

// TestEnter has a process prepare to take the place of another plane. It takes nothing before it is told to, and if it
// ends instead, no client waits for it.
func TestEnter(t *testing.T) { byEachWay(t, testEnter) }

func testEnter(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{})
	n.at(testbed.Node, func() error {
		previous, err := nftables.New(dataplane.Config{})
		if err == nil {
			err = errors.Join(n.plane.Close(), err)
			n.plane = previous
		}
		return err
	})
	s := n.sync("tcp", "10.244.1.11:8080")
	prepare := func() dataplane.Dataplane {
		var p dataplane.Dataplane
		n.at(testbed.Node, func() (err error) {
			p, err = userspace.Driver(userspace.Options{Redirect: way}, legacyTables(), nil).Open(dataplane.Config{})
			return err
		})
		if _, err := p.SetStage(t.Context(), nil, dataplane.Standby); err != nil {
			t.Fatal(err)
		}
		if err := p.Sync(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if report, err := p.Audit(t.Context(), s, dataplane.Full); err != nil || len(report.Drifts) > 0 {
			t.Error(report.Drifts, err)
		}
		return p
	}
	relayed := func(p dataplane.Dataplane) int {
		conn := n.dial()
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(line, "pod-a ") {
			t.Fatal(line, err)
		}
		defer conn.Close()
		return p.Open()
	}
	ended := prepare()
	if c := relayed(ended); c > 0 {
		t.Error("it has taken a connection")
	}
	if err := ended.Close(); err != nil {
		t.Error(err)
	}
	relayed(ended)
	next := prepare()
	if c := relayed(next); c > 0 {
		t.Error("it has taken a connection")
	}
	if _, err := next.SetStage(t.Context(), s, dataplane.Active); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(next.Remove(context.Background()), next.Close()); err != nil {
			t.Error(err)
		}
	})
	if c := relayed(next); c == 0 {
		t.Error("it has not taken a connection")
	}
	for range 2 { // it goes on, although the other plane is there
		report, err := next.Audit(t.Context(), s, dataplane.Full)
		if err = errors.Join(err, next.Sync(t.Context(), s)); err != nil || len(report.Drifts) > 0 {
			t.Error(report.Drifts, err)
		}
	}
	if c := relayed(next); c == 0 {
		t.Error("it has not taken a connection")
	}
}

// TestClean_attempt has a process of the node wait for ours, which has ended, when another plane takes its place.
func TestClean_attempt(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	s := n.sync("tcp", "10.244.1.11:8080")
	if err := n.plane.Close(); err != nil {
		t.Fatal(err)
	}
	from := netip.AddrPortFrom(n.bed.Addr(testbed.Node, false), 40000)
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: eventually.Patience()}
	connected := make(chan error)
	go func() {
		connected <- n.bed.Do(testbed.Node, func() error {
			conn, err := dialer.DialContext(t.Context(), "tcp4", service)
			if err == nil {
				err = conn.Close()
			}
			return err
		})
	}()
	n.at(testbed.Node, func() error {
		if err := tracked(t.Context(), from, netip.MustParseAddrPort(service)); err != nil {
			return err
		}
		next, err := nftables.New(dataplane.Config{})
		if err != nil {
			return err
		}
		n.plane = next
		return errors.Join(next.Sync(t.Context(), s), userspace.Driver(userspace.Options{}, nil, nil).Remove(t.Context(), dataplane.Config{}))
	})
	if err := <-connected; err != nil {
		t.Error(err)
	}
}

// tracked returns when a client has asked.
func tracked(ctx context.Context, from, to netip.AddrPort) error {
	table, err := conntrack.OpenTable()
	if err != nil {
		return err
	}
	defer table.Close()
	return eventually.Poll(ctx, func() error {
		_, ok, err := table.Answers(model.TCP, from, to)
		if err == nil && !ok {
			err = errors.New("the client has not asked")
		}
		return err
	})
}

// TestDrain_closed ends a process that only drains: it must leave nothing that keeps clients from the plane in force.
func TestDrain_closed(t *testing.T) {
	n := startOn(t, testbed.Spec{PodBridge: true}, userspace.Options{Redirect: userspace.ByTPROXY})
	s := n.sync("udp", "10.244.1.11:5353")
	if who := n.answers(model.UDP); who != "pod-a" {
		t.Fatal(who)
	}
	var next dataplane.Dataplane
	n.at(testbed.Node, func() (err error) {
		next, err = nftables.New(dataplane.Config{})
		return err
	})
	t.Cleanup(func() { next.Close() })
	err := next.Sync(t.Context(), s)
	if err == nil {
		_, err = n.plane.SetStage(t.Context(), s, dataplane.Draining)
	}
	if err = errors.Join(err, n.plane.Close()); err != nil {
		t.Fatal(err)
	}
	if who := n.answers(model.UDP); who != "pod-a" {
		t.Error(who)
	}
}

// TestDrain_openConnections has a client return, from its earlier port, when another plane has taken the process's
// place. The earlier connection's socket is in TIME-WAIT, as the server was the first to end the connection.
func TestDrain_openConnections(t *testing.T) {
	t.Run("nftables", func(t *testing.T) { testDrainOpenConnections(t, nftables.New) })
	t.Run("ipvs", func(t *testing.T) {
		if lacksIPVS(t) {
			vm.Replay(t, "IPVS", "^TestDrain_openConnections$/^ipvs$")
			return
		}
		testDrainOpenConnections(t, ipvs.New(ipvs.Options{}))
	})
}

// lacksIPVS reports whether the kernel does.
func lacksIPVS(t *testing.T) bool {
	p, err := ipvs.New(ipvs.Options{})(dataplane.Config{})
	if err == nil {
		err = p.Close()
	} else if errors.Is(err, dataplane.ErrUnsupported) {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	return false
}

func testDrainOpenConnections(t *testing.T, other dataplane.New) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	ended := make(chan error, 1)
	s := n.sync("tcp", n.listen(func(c *net.TCPConn) {
		_, err := io.WriteString(c, "served")
		err = errors.Join(err, c.CloseWrite())
		_, last := c.Read(make([]byte, 1)) // the client's end, which has come by way of the process
		c.Close()
		if !errors.Is(last, io.EOF) {
			err = errors.Join(err, last)
		}
		ended <- err
	}))
	carrier := n.plane
	from := netip.AddrPortFrom(n.bed.Addr("client", false), 40000)
	ask := func() {
		c := n.dialFrom(from, service)
		if answer, err := io.ReadAll(c); err != nil || string(answer) != "served" {
			t.Fatalf("%q, %v", answer, err)
		}
		c.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	ask()
	next := n.openOther(other, dataplane.Config{})
	err := next.Sync(t.Context(), s)
	if err == nil {
		_, err = carrier.SetStage(t.Context(), s, dataplane.Draining)
	}
	if err != nil {
		t.Fatal(err)
	}
	ask()
	if _, err := n.plane.SetStage(t.Context(), s, dataplane.Standby); err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	ask()
	if _, err := n.plane.SetStage(t.Context(), s, dataplane.Active); err != nil {
		t.Fatal(err)
	}
	ask()
}

// TestDrain_answered drains after a question was answered: the socket for it, which has a port of the client's address,
// does not stay for as long as flows may be silent.
func TestDrain_answered(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY, FlowTimeout: time.Hour})
	s := n.sync("udp", "10.244.1.11:5353")
	if who := n.answers(model.UDP); who != "pod-a" {
		t.Fatal(who)
	}
	carrier := n.plane
	if open := carrier.Open(); open != 1 {
		t.Fatalf("%d flows", open)
	}
	if _, err := carrier.SetStage(t.Context(), s, dataplane.Draining); err != nil {
		t.Fatal(err)
	}
	eventually.Equal(t, "flows that are carried on", 0, carrier.Open)
}

// TestDrain_port has a client ask the same backend from the port that the kernel would have given to the process's
// socket. It asks when another plane has taken the process's place, and when the process is back.
func TestDrain_port(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	const port = 40000
	n.at(testbed.Node, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "%d %[1]d", port), 0)
	})
	s := n.sync("udp", "10.244.1.11:5353")
	ask := func(from uint16) testbed.Result {
		t.Helper()
		o, err := n.bed.Probe(t.Context(), testbed.Probe{
			From: "client", To: netip.MustParseAddrPort(service), Protocol: model.UDP, SourcePort: from, Timeout: eventually.Patience(),
		})
		if err != nil {
			t.Fatal(err)
		}
		return o.Result
	}
	if r := ask(port + 1); r != testbed.Answered {
		t.Fatal(r)
	}
	next := n.openOther(nftables.New, dataplane.Config{})
	err := next.Sync(t.Context(), s)
	if err == nil {
		_, err = n.plane.SetStage(t.Context(), s, dataplane.Draining)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r := ask(port); r != testbed.Answered {
		t.Errorf("when the other plane serves: %s", r)
	}
	n.resync(s)
	if r := ask(port); r != testbed.Answered {
		t.Errorf("when the process is back: %s", r)
	}
}

// TestDrain_guards has packets for a row come all the while that another plane takes the process's place: none of them
// is one for an address at which nothing is served.
func TestDrain_guards(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	s := manyRows(t)
	n.nft(countSYNs)
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error)
	send := func() error { return sendSYNs(ctx, netip.MustParseAddrPort(service)) }
	go func() { stopped <- n.bed.Do("client", send) }()
	var err error
	for range 5 { // as it may go well
		n.resync(s)
		if _, err = n.plane.SetStage(ctx, s, dataplane.Draining); err != nil {
			break
		}
	}
	stop()
	if err = errors.Join(err, <-stopped); err != nil {
		t.Fatal(err)
	}
	eventually.Nil(t, "all packets go on", func() error { // some may be on their way
		counted := n.nft("list table ip test-syns")
		if came, went := packets(counted, "came"), packets(counted, "went"); came == 0 || came != went {
			return fmt.Errorf("%d packets came, %d went on", came, went)
		}
		return nil
	})
}

// TestDrain_waiting has a process of the node ask all the while that another plane takes the process's place. It gets
// no answer, so connection tracking knows it as waiting. It is translated as soon as the process takes it no more.
func TestDrain_waiting(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	s := manyRows(t)
	n.nft(`table ip test-syns {
	counter untranslated {}
	counter translated {}
	chain leaving {
		type filter hook postrouting priority 101; oifname lo accept
		ip daddr 10.96.0.10 counter name untranslated
		ip daddr 10.244.1.11 counter name translated
	}
}`)
	var next dataplane.Dataplane
	n.at(testbed.Node, func() (err error) {
		next, err = nftables.New(dataplane.Config{})
		return err
	})
	t.Cleanup(func() { next.Close() })
	n.resync(s)
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error)
	at := netip.MustParseAddrPort(service)
	go func() { stopped <- n.bed.Do(testbed.Node, func() error { return sendSYNs(ctx, at) }) }()
	n.at(testbed.Node, func() error {
		return tracked(ctx, netip.AddrPortFrom(n.bed.Addr(testbed.Node, false), 40000), at)
	})
	err := next.Sync(ctx, s)
	if err == nil {
		_, err = n.plane.SetStage(ctx, s, dataplane.Draining)
	}
	if err == nil {
		err = eventually.Poll(ctx, func() error {
			if packets(n.nft("list table ip test-syns"), "translated") == 0 {
				return errors.New("it is not translated")
			}
			return nil
		})
	}
	stop()
	if err = errors.Join(err, <-stopped); err != nil {
		t.Fatal(err)
	}
	if left := packets(n.nft("list table ip test-syns"), "untranslated"); left != 0 {
		t.Errorf("%d packets left the node as they were", left)
	}
}

// manyRows are so many that it takes a moment to take them away.
func manyRows(t *testing.T) *model.State {
	t.Helper()
	var rows strings.Builder
	rows.WriteString("guard 10.96.0.0/16 drop\npool default/web cluster\nbackend default/web cluster 10.244.1.11:8080\n")
	for i := range 5000 {
		fmt.Fprintf(&rows, "frontend 10.96.%d.%d:80/tcp any forward default/web cluster snat offcluster\n", i/250, i%250+1)
	}
	s, err := model.ParseState(rows.String())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// countSYNs counts what comes before the rules of the plane, and what they let go on, or take.
const countSYNs = `table ip test-syns {
	counter came {}
	counter went {}
	chain before { type filter hook prerouting priority -151; ip daddr 10.96.0.10 counter name came; }
	chain after { type filter hook prerouting priority -149; ip daddr 10.96.0.10 counter name went; }
}`

// packets reads a counter in a listing.
func packets(listing, counter string) (n int) {
	_, rest, _ := strings.Cut(listing, "counter "+counter+" {")
	if _, err := fmt.Sscanf(strings.TrimSpace(rest), "packets %d", &n); err != nil {
		return -1
	}
	return n
}

// sendSYNs sends first packets of connections. Their checksum is wrong, so that they get no answer.
func sendSYNs(ctx context.Context, to netip.AddrPort) error {
	const flags, syn = 13, 2
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	header := make([]byte, 20)
	binary.BigEndian.PutUint16(header[0:], 40000)
	binary.BigEndian.PutUint16(header[2:], to.Port())
	header[12], header[flags] = 5<<4, syn
	for ctx.Err() == nil && err == nil {
		err = unix.Sendto(socket, header, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
	}
	return err
}

// TestDial_port has a client connect to two destinations from one port, with one backend. The backend sees the port.
func TestDial_port(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	backend := n.listen(func(c *net.TCPConn) { fmt.Fprintln(c, c.RemoteAddr()) })
	s, err := model.ParseState("pool default/web cluster\nbackend default/web cluster " + backend + "\n" +
		"frontend 10.96.0.10:80/tcp any forward default/web cluster snat never\n" +
		"frontend 10.96.0.11:80/tcp any forward default/web cluster snat never\n")
	if err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	from := netip.AddrPortFrom(n.bed.Addr("client", false), 40000)
	var seen []string
	for _, to := range []string{"10.96.0.10:80", "10.96.0.11:80"} {
		line, err := bufio.NewReader(n.dialFrom(from, to)).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, strings.TrimSpace(line))
	}
	other, err := netip.ParseAddrPort(seen[1])
	if seen[0] != from.String() || err != nil || other.Addr() != from.Addr() || other == from {
		t.Errorf("%s is seen as %s", from, seen)
	}
}

func TestDatagram_nextBackend(t *testing.T) { byEachWay(t, testDatagramNextBackend) }

func testDatagramNextBackend(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("udp", "10.244.1.11:9", "10.244.2.13:5353")
	for range 6 {
		if who := n.answers(model.UDP); who != "pod-b" {
			t.Fatalf("%s", who)
		}
	}
}

// TestAnswer_toNodePort has a pod that another program hides behind the node ask one on another node, from a port that
// is a NodePort as well.
func TestAnswer_toNodePort(t *testing.T) { byEachWay(t, testAnswerToNodePort) }

func testAnswerToNodePort(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	node := n.bed.Addr(testbed.Node, false)
	n.nft(fmt.Sprintf(`table ip other {
		chain postrouting {
			type nat hook postrouting priority 100
			ip saddr %s ip daddr %s meta l4proto { tcp, udp } snat to %s:31004
		}
	}`,
		n.bed.Addr("client", false), n.bed.Addr("pod-b", false), node))
	s, err := model.ParseState(fmt.Sprintf("pods 10.244.0.0/16\n"+
		"pool default/web cluster\nbackend default/web cluster 10.244.1.11:8080\n"+
		"frontend %[1]s:31004/tcp any forward default/web cluster snat always\n"+
		"frontend %[1]s:31004/udp any reject default/dns\n", node))
	if err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	for p, port := range map[model.Protocol]uint16{model.TCP: 8080, model.UDP: 5353} {
		to := netip.AddrPortFrom(n.bed.Addr("pod-b", false), port)
		o, err := n.bed.Probe(t.Context(), testbed.Probe{From: "client", To: to, Protocol: p, Timeout: eventually.Patience()})
		if err != nil || o.Result != testbed.Answered {
			t.Errorf("%s: %v, %v", p, o.Result, err)
		}
	}
}

// TestDatagram_port: the backend sees the client's address, and a port that no socket of the client gets by itself.
func TestDatagram_port(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	backend := n.listenDatagrams()
	n.sync("udp", backend.LocalAddr().String())
	c, err := n.bed.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(service))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := backend.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	_, from, err := backend.ReadFrom(make([]byte, 1))
	if err != nil {
		t.Fatal(err)
	}
	seen, ports := from.(*net.UDPAddr).AddrPort(), []byte(nil)
	n.at("client", func() (err error) {
		ports, err = os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
		return err
	})
	var low, high uint16
	if _, err := fmt.Sscan(string(ports), &low, &high); err != nil {
		t.Fatal(err)
	}
	if seen.Addr() != n.bed.Addr("client", false) || low <= seen.Port() && seen.Port() <= high {
		t.Errorf("the backend sees %s; the client's ports are %d to %d", seen, low, high)
	}
}

// TestDatagram_portTaken: another program has the port, so that no answer can come from there. The log says so, once.
func TestDatagram_portTaken(t *testing.T) {
	n := start(t, userspace.Options{})
	if err := n.plane.Close(); err != nil {
		t.Fatal(err)
	}
	var log testbed.Output
	n.plane = n.openOther(userspace.New(userspace.Options{Redirect: userspace.ByTPROXY}),
		dataplane.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	const taken = "192.0.2.1:53"
	other := n.datagrams(testbed.Node, taken)
	s, err := model.ParseState("pods 10.244.0.0/16\npool default/dns cluster\nbackend default/dns cluster 10.244.1.11:5353\n" +
		"frontend " + taken + "/udp any forward default/dns cluster snat never\n")
	if err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	ask := func() error {
		o, err := n.bed.Probe(t.Context(), testbed.Probe{
			From: "client", To: netip.MustParseAddrPort(taken), Protocol: model.UDP, Timeout: 100 * time.Millisecond,
		})
		if err == nil && o.Result != testbed.Answered {
			err = errors.New(o.Result.String())
		}
		return err
	}
	const want = `level=WARN msg="cannot listen for a destination, which is not served" destination=` + taken + "/udp"
	eventually.Nil(t, "a line in the log", func() error {
		if err := ask(); err == nil {
			return errors.New("there is an answer")
		}
		if !strings.Contains(log.String(), want) {
			return errors.New(log.String())
		}
		return nil
	})
	_ = ask()
	if log := log.String(); strings.Count(log, want) != 1 {
		t.Error(log)
	}
	_ = other.Close()
	eventually.Nil(t, "an answer", ask)
}

// TestDatagram_backendGone has a client go on talking from one port when its backend has stopped serving.
func TestDatagram_backendGone(t *testing.T) { byEachWay(t, testDatagramBackendGone) }

func testDatagramBackendGone(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("udp", "10.244.1.11:5353", "10.244.2.13:5353")
	c, err := n.bed.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(service))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, 100)
	ask := func() string {
		for { // a datagram that reaches no socket is lost, and the client repeats itself
			_, err := c.Write([]byte("?\n"))
			if err == nil {
				err = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			}
			if err != nil {
				t.Fatal(err)
			}
			if n, err := c.Read(buf); err == nil {
				who, _, _ := strings.Cut(string(buf[:n]), " ")
				return who
			}
		}
	}
	first := ask()
	if second := ask(); second != first {
		t.Fatalf("%s after %s", second, first)
	}
	if err := n.bed.StopServing(first); err != nil {
		t.Fatal(err)
	}
	if third := ask(); third == first {
		t.Fatalf("still %s", third)
	}
}

// TestClose_replaced: a plane that another one of the mode has replaced leaves the rules to that one when it ends.
func TestClose_replaced(t *testing.T) { byEachWay(t, testCloseReplaced) }

func testCloseReplaced(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("tcp", "10.244.1.11:8080")
	old := n.plane
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.Driver(userspace.Options{Redirect: way}, legacyTables(), nil).Open(dataplane.Config{})
		return err
	})
	s := n.sync("tcp", "10.244.1.11:8080")
	if _, err := old.SetStage(t.Context(), s, dataplane.Standby); err != nil {
		t.Error(err)
	}
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	r, err := n.plane.Audit(t.Context(), s, dataplane.Full)
	if len(r.Drifts) > 0 || err != nil {
		t.Errorf("%v, %v", r.Drifts, err)
	}
}

func TestDial_nobody(t *testing.T) { byEachWay(t, testDialNobody) }

func testDialNobody(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("tcp", "10.244.1.11:9", "10.244.1.11:10")
	if who := n.answers(model.TCP); who != testbed.Refused.String() {
		t.Fatalf("%s", who)
	}
	n.counted("dials failed 2 retried 0 unanswered 1\n")
}

// TestCopy sends more than fits any buffer both ways, and half closes after it.
func TestCopy(t *testing.T) { byEachWay(t, testCopy) }

func testCopy(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("tcp", n.listen(func(c *net.TCPConn) {
		all, err := io.ReadAll(c) // until the client has half closed
		if err == nil {
			_, err = c.Write(all)
		}
		if err != nil {
			t.Error(err)
		}
		c.Close()
	}))
	sent := bytes.Repeat([]byte("fairlead"), 3<<20)
	c := n.dial()
	go func() {
		_, err := c.Write(sent)
		if err = errors.Join(err, c.CloseWrite()); err != nil {
			t.Error(err)
		}
	}()
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	if sha256.Sum256(got) != sha256.Sum256(sent) {
		t.Fatalf("%d bytes came back of %d, or others", len(got), len(sent))
	}
}

// abort ends a connection by a reset.
func abort(t *testing.T, c *net.TCPConn) {
	if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
		t.Error(err)
	}
}

func TestReset_byBackend(t *testing.T) { byEachWay(t, testResetByBackend) }

func testResetByBackend(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("tcp", n.listen(func(c *net.TCPConn) {
		if _, err := c.Read(make([]byte, 1)); err != nil { // the client knows that it is connected
			t.Error(err)
		}
		abort(t, c)
	}))
	c := n.dial()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("%v", err)
	}
}

func TestReset_byClient(t *testing.T) { byEachWay(t, testResetByClient) }

func testResetByClient(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	seen := make(chan error, 1)
	n.sync("tcp", n.listen(func(c *net.TCPConn) {
		_, err := c.Write([]byte("x"))
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		seen <- err
		c.Close()
	}))
	c := n.dial()
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	abort(t, c)
	if err := <-seen; !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("%v", err)
	}
}

func TestIdle(t *testing.T) {
	n := start(t, userspace.Options{IdleTimeout: 500 * time.Millisecond})
	n.sync("tcp", n.listen(func(c *net.TCPConn) { n.Cleanup(func() { c.Close() }) })) // and says nothing
	if _, err := n.dial().Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("%v", err)
	}
}

func TestBound(t *testing.T) {
	n := start(t, userspace.Options{MaxConnections: 1})
	n.sync("tcp", "10.244.1.11:8080")
	c := n.dial()
	if _, err := c.Read(make([]byte, 1)); err != nil { // the proxy has accepted it
		t.Fatal(err)
	}
	if who := n.answers(model.TCP); who != testbed.Refused.String() {
		t.Fatalf("%s", who)
	}
	counters, err := n.plane.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"refused 10.96.0.10:80/tcp reject 1 table-full\n", "served default/web cluster 10.244.1.11:8080 connections 1\n",
		"table connections capacity 1 used 1 full 1\n", "dials failed 0 retried 0 unanswered 0\n",
	} {
		if !strings.Contains(counters.String(), want) {
			t.Errorf("no %q in:\n%s", want, counters)
		}
	}
	c.Close()
	for n.answers(model.TCP) != "pod-a" { // until the proxy has seen the end
	}
}

func TestBound_flows(t *testing.T) { byEachWay(t, testBoundFlows) }

func testBoundFlows(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, MaxFlows: 1})
	n.sync("udp", n.silent())
	const want = "table flows capacity 1 used 1 evictions "
	eventually.Nil(t, "a flow gives its place to a newer one", func() error { // a busy machine may be too late to send anything
		o, err := n.bed.Probe(t.Context(), testbed.Probe{
			From: "client", To: netip.MustParseAddrPort(service), Protocol: model.UDP, Timeout: 20 * time.Millisecond,
		})
		if err != nil || o.Result != testbed.TimedOut {
			t.Fatal(o, err)
		}
		counters, err := n.plane.Counters(t.Context())
		if err == nil && !strings.Contains(counters.String(), want) {
			err = fmt.Errorf("the counters are %s", counters)
		}
		return err
	})
	n.sync("udp", "10.244.2.13:5353") // the first flow ends with its backend, soon
	eventually.Nil(t, "pod-b answers", func() error {
		o, err := n.bed.Probe(t.Context(), testbed.Probe{
			From: "client", To: netip.MustParseAddrPort(service), Protocol: model.UDP, Timeout: time.Second,
		})
		if err == nil && o.Backend != "pod-b" {
			err = errors.New(o.String())
		}
		return err
	})
}

// silent makes pod-a take datagrams without answering them.
func (n *node) silent() (backend string) {
	n.Helper()
	return n.listenDatagrams().LocalAddr().String()
}

// listenDatagrams is a socket of pod-a.
func (n *node) listenDatagrams() (socket net.PacketConn) {
	n.Helper()
	n.at("pod-a", func() (err error) {
		socket, err = net.ListenPacket("udp4", "10.244.1.11:0")
		return err
	})
	n.Cleanup(func() { socket.Close() })
	return socket
}

// TestBound_answered has many clients ask once, each from another port, as resolvers do. They are more than there may
// be flows, and none has to wait for the end of another one's.
func TestBound_answered(t *testing.T) { byEachWay(t, testBoundAnswered) }

func testBoundAnswered(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, MaxFlows: 2})
	n.sync("udp", "10.244.1.11:5353")
	for range 6 {
		if who := n.answers(model.UDP); who != "pod-a" {
			t.Fatal(who)
		}
	}
}

// sticky programs backends with session affinity.
func (n *node) sticky(backends ...string) *model.State {
	n.Helper()
	rows := n.sync("tcp", backends...).String()
	s, err := model.ParseState(strings.ReplaceAll(rows, "pool default/web cluster", "pool default/web cluster affinity 1h0m0s"))
	if err != nil {
		n.Fatal(err)
	}
	n.resync(s)
	return s
}

// TestAffinity_late has the backend of a session refuse a connection, which waits for another one. Meanwhile the first
// backend answers the client again. The session stays there when the other one answers at last.
func TestAffinity_late(t *testing.T) { byEachWay(t, testAffinityLate) }

func testAffinityLate(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, DialTimeout: eventually.Patience()})
	n.sticky("10.244.1.11:8080", "10.244.2.13:8080")
	answers := func(want string) {
		t.Helper()
		if who := n.answers(model.TCP); who != want {
			t.Fatalf("%s answers instead of %s", who, want)
		}
	}
	answers("pod-a")
	n.nft("add table ip refusing; add table ip silent\n" +
		"add chain ip refusing out { type filter hook output priority 0; }\n" +
		"add rule ip refusing out ip daddr 10.244.1.11 tcp dport 8080 reject with tcp reset\n" +
		"add chain ip silent out { type filter hook postrouting priority 0; }\n" +
		"add rule ip silent out ip daddr 10.244.2.13 tcp dport 8080 drop\n")
	first := n.dial()
	eventually.True(t, "the first backend refuses", func() bool {
		counters, err := n.plane.Counters(t.Context())
		return err == nil && strings.Contains(counters.String(), "10.244.1.11:8080 connections 1 failed 1\n")
	})
	n.nft("delete table ip refusing\n")
	answers("pod-a")
	n.nft("delete table ip silent\n")
	if line, err := bufio.NewReader(first).ReadString('\n'); err != nil || !strings.HasPrefix(line, "pod-b ") {
		t.Fatal(line, err)
	}
	answers("pod-a")
}

func TestAffinity_remembered(t *testing.T) {
	n := start(t, userspace.Options{})
	s := n.sticky("10.244.1.11:8080")
	if who := n.answers(model.TCP); who != "pod-a" {
		t.Fatal(who)
	}
	check := func() {
		t.Helper()
		session := dataplane.Session{Pool: model.PoolID{Service: "default/web"}, Client: netip.MustParseAddr("10.244.1.20")}
		ok, err := session.Find(t.Context(), n.plane, s)
		if err != nil || !ok || session.Backend.String() != "10.244.1.11:8080" {
			t.Fatal(session, ok, err)
		}
	}
	check()
	if err := n.plane.Close(); err != nil {
		t.Fatal(err)
	}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.New(userspace.Options{})(dataplane.Config{})
		return err
	})
	if err := n.plane.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	check()
}

// TestAffinity_learned has a plane learn a session before its first Sync. After that the kernel has it, so that the next
// process finds it even if this one is killed.
func TestAffinity_learned(t *testing.T) {
	n := start(t, userspace.Options{})
	s := n.sticky("10.244.1.11:8080")
	if err := n.plane.Close(); err != nil {
		t.Fatal(err)
	}
	driver := userspace.Driver(userspace.Options{}, legacyTables(), nil)
	want := dataplane.Session{
		Pool: model.PoolID{Service: "default/web"}, Client: netip.MustParseAddr("10.244.1.21"),
		Backend: netip.MustParseAddrPort("10.244.1.11:8080"), Until: time.Now().Add(time.Hour),
	}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = driver.Open(dataplane.Config{})
		return err
	})
	_, err := n.plane.Learn(t.Context(), s, func(yield func(dataplane.Session, error) bool) { yield(want, nil) })
	if err = errors.Join(err, n.plane.Sync(t.Context(), s)); err != nil {
		t.Fatal(err)
	}
	found := false
	n.at(testbed.Node, func() error {
		for one, err := range driver.Sessions(t.Context(), dataplane.Config{}, s) {
			if err != nil {
				return err
			}
			found = found || one.Client == want.Client && one.Backend == want.Backend
		}
		return nil
	})
	if !found {
		t.Error("the kernel has not got the session")
	}
}

// kernel is all that a plane may have left on the node.
func (n *node) kernel() string {
	n.Helper()
	var out strings.Builder
	for _, command := range []string{
		"nft list ruleset", "ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all",
	} {
		words := strings.Fields(command)
		text, err := n.bed.Command(n.Context(), testbed.Node, words[0], words[1:]...).CombinedOutput()
		if err != nil {
			n.Fatalf("%s: %v: %s", command, err, text)
		}
		out.Write(text)
	}
	for _, address := range []string{"127.0.0.1:17985", "[::1]:17985"} {
		n.at(testbed.Node, func() error {
			l, err := net.Listen("tcp", address)
			if err == nil {
				err = l.Close()
			}
			fmt.Fprintln(&out, address, err)
			return nil
		})
	}
	return out.String()
}

func TestRemove_leavesNothing(t *testing.T) { byEachWay(t, testRemoveLeavesNothing) }

func testRemoveLeavesNothing(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	before := n.kernel()
	n.sync("tcp", "10.244.1.11:8080")
	if n.kernel() == before {
		t.Fatal("the plane is nowhere to be seen")
	}
	c := n.dial()
	if _, err := c.Read(make([]byte, 1)); err != nil { // it has reached its backend
		t.Fatal(err)
	}
	if err := n.plane.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := n.kernel(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a connection: %v", err)
	}
	n.sync("tcp", "10.244.1.11:8080") // it may go on
	if who := n.answers(model.TCP); who != "pod-a" {
		t.Fatal(who)
	}
}

func TestAudit_routing(t *testing.T) {
	n := start(t, userspace.Options{})
	s := n.sync("tcp", "10.244.1.11:8080")
	audit := func() (out string) {
		report, err := n.plane.Audit(t.Context(), s, dataplane.Quick)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range report.Drifts {
			out += d.String() + "\n"
		}
		return out
	}
	for _, damage := range []struct{ command, want string }{
		{"ip rule del table 17985", "ip rule 99: missing: fwmark 0x8000/0x8000 lookup 17985\n"},
		{"ip route flush table 17985", "ip route table 17985: missing: local default dev lo\n"},
		{"nft flush ruleset", "table ip fairlead-userspace: missing: all its rows\n" +
			"table ip6 fairlead-userspace: missing: all its rows\n"},
		{"nft flush set ip fairlead-userspace frontends",
			"frontend 10.96.0.10:80/tcp any: missing: forward default/web cluster snat offcluster\n"},
	} {
		if got := audit(); got != "" {
			t.Fatalf("before %s: %s", damage.command, got)
		}
		words := strings.Fields(damage.command)
		if out, err := n.bed.Command(t.Context(), testbed.Node, words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", damage.command, err, out)
		}
		if got := audit(); got != damage.want {
			t.Errorf("after %s: %q, not %q", damage.command, got, damage.want)
		}
		if err := n.plane.Sync(context.WithoutCancel(t.Context()), s); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSync_withoutSCTP(t *testing.T) {
	lack.Need(t, lack.NoSCTP)
	n := start(t, userspace.Options{})
	s, err := model.ParseState("pool default/web cluster\nbackend default/web cluster 10.244.1.11:8080\n" +
		"frontend 10.96.0.10:80/tcp any forward default/web cluster snat always\n" +
		"frontend 10.96.0.10:7000/sctp any forward default/web cluster snat always\n")
	if err != nil {
		t.Fatal(err)
	}
	const want = "frontend 10.96.0.10:7000/sctp any of default/web: this kernel has no SCTP"
	if err := n.plane.Sync(t.Context(), s); !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
	if who := n.answers(model.TCP); who != "pod-a" {
		t.Error(who)
	}
}

// unbound has a test's process, and all threads in which its planes open sockets, be without CAP_NET_BIND_SERVICE.
const unbound = "FAIRLEAD_TEST_UNBOUND"

// TestSync_withoutLowPorts has rows whose answers the process may not send.
func TestSync_withoutLowPorts(t *testing.T) {
	if os.Getenv(unbound) == "" {
		t.Parallel()
		again := exec.CommandContext(t.Context(), "setpriv", "--bounding-set=-net_bind_service",
			"--inh-caps=-net_bind_service", os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		again.Env = append(os.Environ(), unbound+"=1")
		out, err := again.CombinedOutput()
		switch {
		case strings.Contains(string(out), "--- SKIP"):
			lack.Inherit(t, out)
		case err != nil:
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	n := start(t, userspace.Options{Redirect: userspace.ByTPROXY})
	s, err := model.ParseState("pool default/dns cluster\nbackend default/dns cluster 10.244.1.11:5353\n" +
		"frontend 10.96.0.10:80/udp any forward default/dns cluster snat never\n" +
		"frontend 10.96.0.10:53/udp any forward default/dns cluster snat never\n" +
		"frontend 10.96.0.11:5353/udp any forward default/dns cluster snat never\n" +
		"frontend 10.96.0.11:53/udp any reject default/nobody\n")
	if err != nil {
		t.Fatal(err)
	}
	err = n.plane.Sync(t.Context(), s)
	if !errors.Is(err, dataplane.ErrPartial) {
		t.Fatal(err)
	}
	for port, want := range map[string]int{"10.96.0.10:80/udp": 1, "10.96.0.10:53/udp": 1, "10.96.0.11": 0} {
		if strings.Count(err.Error(), "frontend "+port) != want {
			t.Errorf("%s is not %d times in: %v", port, want, err)
		}
	}
	if o, err := n.bed.Probe(t.Context(), testbed.Probe{
		From: "client", To: netip.MustParseAddrPort("10.96.0.11:5353"), Protocol: model.UDP, Timeout: eventually.Patience(),
	}); err != nil || o.Backend != "pod-a" {
		t.Error(o, err)
	}
}

// TestUDP_portAgain: as TestSCTP_portAgain.
func TestUDP_portAgain(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByNAT, FlowTimeout: 100 * time.Millisecond})
	n.onePort()
	backend := n.datagrams("pod-a", "10.244.1.11:7777")
	n.sync("udp", "10.244.1.11:7777")
	for _, from := range []struct {
		place testbed.Place
		at    string
	}{{"client", "10.244.1.20"}, {"pod-b", "10.244.2.13"}, {"client", "10.244.1.20"}} {
		client := n.datagrams(from.place, from.at+":0")
		var saw net.Addr
		eventually.Nil(t, "the port is free again", func() (err error) {
			if _, err = client.WriteTo([]byte(from.at), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(service))); err != nil {
				return err
			}
			if err := backend.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				return err
			}
			text := make([]byte, 100)
			size, peer, err := backend.ReadFrom(text)
			if err == nil && string(text[:size]) != from.at {
				err = fmt.Errorf("%s has said %s", peer, text[:size]) // the client before, once more
			}
			saw = peer
			return err
		})
		if saw := saw.(*net.UDPAddr).IP.String(); saw != from.at {
			t.Errorf("the backend sees %s, not %s", saw, from.at)
		}
	}
}

// TestFlow_narrowPath: on the way to the backend a router has only small packets pass, and says so. The flow goes on.
func TestFlow_narrowPath(t *testing.T) { byEachWay(t, testFlowNarrowPath) }

func testFlowNarrowPath(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way})
	n.sync("udp", "10.244.2.13:5353")
	const narrow = "ip route replace $(ip route show 10.244.2.13) mtu lock 1280"
	if out, err := n.bed.Command(t.Context(), testbed.NodeB, "sh", "-c", narrow).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	c, err := n.bed.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(service))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func(question string) (answer string) {
		eventually.Nil(t, "an answer", func() error {
			text := make([]byte, 2000)
			_, err := c.Write([]byte(question))
			if err == nil {
				err = c.SetReadDeadline(time.Now().Add(time.Second))
			}
			if err == nil {
				var size int
				size, err = c.Read(text)
				answer = string(text[:size])
			}
			return err
		})
		return answer
	}
	before := ask("?") // with the address and port that the backend sees
	ask("=" + strings.Repeat("x", 1400))
	if after := ask("?"); after != before {
		t.Errorf("the flow of %s is that of %s", before, after)
	}
}

// onePort leaves the plane one port for its connections.
func (n *node) onePort() {
	n.Helper()
	n.at(testbed.Node, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40000"), 0)
	})
}

// datagrams is a socket at an address of a place.
func (n *node) datagrams(place testbed.Place, at string) *net.UDPConn {
	n.Helper()
	var conn *net.UDPConn
	n.at(place, func() (err error) {
		conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	})
	n.Cleanup(func() { conn.Close() })
	return conn
}
