package attack

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

// way is how clients of the victim reach one of its Services. Each has its own, so that no two clients that are hidden
// behind the node ask the same port of a pod.
type way struct {
	from testbed.Place
	to   string // an address but for its last number, or "node"
	v6   bool
}

// ways are those of a hundred connections a second, in all.
var ways = []way{
	{client, "10.96.1.", false}, {testbed.Node, "10.96.1.", true}, {testbed.Outside, "node", false}, {far, "203.0.113.", true},
}

// Numbers of the victim's Services. Those of ways come first.
const (
	stickyNumber = 20 // has session affinity
	calmNumber   = 21 // the first of some that have as well, and whose clients are quiet
	calms        = 6
	quietNumber  = 30 // whose connections are quiet
	swapNumber   = 40 // whose endpoint is replaced
	addedNumber  = 41 // which comes and goes

	firstTarget, firstNodePort = 7000, 31000
)

func targetPorts() (all []uint16) {
	for n := range uint16(60) {
		all = append(all, firstTarget+n)
	}
	return all
}

// numbered is one of the victim's Services, whose addresses and ports follow from its number.
func numbered(n int) *corev1.Service {
	s := service(victim, fmt.Sprintf("web-%d", n), both(fmt.Sprintf("10.96.1.%d", n+1)), uint16(firstTarget+n))
	return exposed(s, int32(firstNodePort+n), both(fmt.Sprintf("203.0.113.%d", n+1))...)
}

func victimObjects(s *stage) (all []runtime.Object) {
	add := func(svc *corev1.Service) {
		all = append(all, svc)
		all = append(all, s.of(svc, "web-1", "web-2")...)
	}
	for n := range ways {
		add(numbered(n))
	}
	for n := stickyNumber; n < calmNumber+calms; n++ {
		svc := numbered(n)
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		add(svc)
	}
	add(numbered(quietNumber))
	return all
}

// address is where a way leads, with a Service's number.
func (w way) address(s *stage, n int) netip.AddrPort {
	if w.to == "node" {
		return netip.AddrPortFrom(s.bed.Addr(testbed.Node, w.v6), uint16(firstNodePort+n))
	}
	a := netip.MustParseAddr(fmt.Sprintf("%s%d", w.to, n+1))
	if w.v6 {
		a = testbed.EmbedV6(a)
	}
	return netip.AddrPortFrom(a, 80)
}

// watch keeps the victim's clients busy: short connections, streams whose every byte is compared, sockets of UDP, and a
// client that must stay with its backend. Other clients use no Service: they connect to a pod, and to the node itself.
func (s *stage) watch() *traffic.Watch {
	s.Helper()
	spec := traffic.WatchSpec{Interval: 40 * time.Millisecond, Streams: 2 * len(ways), Timeout: lost}
	for n, w := range ways {
		spec.Paths = append(spec.Paths, traffic.Path{From: w.from, To: w.address(s, n)})
	}
	spec.Affinity = []traffic.Path{{From: client, To: ways[0].address(s, stickyNumber)}}
	for _, to := range []netip.AddrPort{
		netip.AddrPortFrom(s.bed.Addr(testbed.Node, false), hostPort),
		netip.AddrPortFrom(s.bed.Addr("web-2", true), firstTarget+quietNumber),
	} {
		spec.Visits = append(spec.Visits, traffic.Path{From: client, To: to})
	}
	w, err := traffic.StartWatch(s.Context(), s.bed, spec)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { w.Stop() })
	return w
}

// lost is how long a client waits that counts what was not answered as a failure.
const lost = 5 * time.Second

// quiet are clients that are silent while something happens, and want to go on afterwards.
type quiet struct {
	s     *stage
	conns []quietConn
	calm  []string // who answered, by the numbers of Services from calmNumber on
}

type quietConn struct {
	net.Conn
	name string
	in   *bufio.Reader
	who  string
}

// quietWays are those of open connections that are silent. The node hides the clients of most.
var quietWays = []way{
	{testbed.Outside, "node", false}, {testbed.Outside, "node", true}, {far, "node", true}, {client, "10.96.1.", false},
	{testbed.Node, "10.96.1.", false},
}

func (s *stage) quiet() *quiet {
	s.Helper()
	q := &quiet{s: s}
	for _, w := range quietWays {
		for range 3 {
			to := w.address(s, quietNumber)
			c, err := s.bed.Dial(s.Context(), w.from, model.TCP, to)
			if err != nil {
				s.Fatal(err)
			}
			s.Cleanup(func() { _ = c.Close() })
			conn := quietConn{Conn: c, name: fmt.Sprintf("quiet connection from %s to %s", w.from, to), in: bufio.NewReader(c)}
			if conn.who, err = conn.answer(); err != nil {
				s.Fatalf("%s: %v", conn.name, err)
			}
			q.conns = append(q.conns, conn)
		}
	}
	for n := range calms {
		who, err := s.ask(way{far, "node", false}.address(s, calmNumber+n))
		if err != nil {
			s.Fatal(err)
		}
		q.calm = append(q.calm, who)
	}
	return q
}

func (s *stage) ask(to netip.AddrPort) (who string, err error) {
	o, err := s.bed.Probe(s.Context(), testbed.Probe{From: far, To: to, Timeout: lost})
	if err == nil && o.Result != testbed.Answered {
		err = errors.New(o.Result.String())
	}
	return o.Backend, err
}

func (c quietConn) answer() (who string, err error) {
	if err := c.SetReadDeadline(time.Now().Add(lost)); err != nil {
		return "", err
	}
	line, err := c.in.ReadString('\n')
	who, _, _ = strings.Cut(line, " ")
	return who, err
}

// resume is what the clients find when they go on.
func (q *quiet) resume() (wrong []string) {
	for _, c := range q.conns {
		_, err := io.WriteString(c, "?\n")
		var who string
		if err == nil {
			who, err = c.answer()
		}
		if err == nil && who != c.who {
			err = fmt.Errorf("%s answers instead of %s", who, c.who)
		}
		if err != nil {
			wrong = append(wrong, fmt.Sprintf("%s: %v", c.name, err))
		}
	}
	for n, before := range q.calm {
		to := way{far, "node", false}.address(q.s, calmNumber+n)
		if who, err := q.s.ask(to); err != nil || who != before {
			wrong = append(wrong, fmt.Sprintf("client of %s: %q answers, and %q did before: %v", to, who, before, err))
		}
	}
	return wrong
}
