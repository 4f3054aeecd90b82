package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// sequences are Services, one a line: its scheduler (-: the one that the plane is configured to), the weights of
// its backends a, b, …, the scope of its frontends, and connections, which stay open:
//
//	b          the next connection reaches backend b
//	(abb)      the next three do in some order: the scheduler leaves it open, or it depends on which were there first
//	x y z      names of backends in the order in which they are first reached
//	!          the next one is refused
//	-b         all connections to b are closed
//	b=2        b has another weight
//	@2         the next connections go to the Service's second address
//	to=fo      the Service has another scheduler
//	?          all open connections are answered, each by the backend that it has
//
// Comments name the kernel's file that defines the scheduler and say how.
const sequences = `
# ip_vs_rr.c: one after the other, whatever they are doing; with weights, wrr
rr     1,1,1  any  xyz xyz -y xyz
rr     2,3,7  any  (aabbbccccccc) -c (aabbbccccccc)

# ip_vs_wrr.c: in each round as often as its weight says, whatever they are doing
wrr    2,3,7  any  (aabbbccccccc) -c (aabbbccccccc) b=0 (aaccccccc)

# ip_vs_lc.c: where 256 times the open plus the closed connections that are remembered are fewest; with weights, wlc
lc     1,1,1  any  xyz (xyz) -y yy (xz)
lc     2,3,7  any  (abc) ccbcacbcc

# ip_vs_wlc.c: where that number, divided by the weight, is the least
wlc    2,3,7  any  (abc) ccbcacbcc -b bbb c=0 ab
-      2,3,7  any  (abc) ccbcacbcc

# ip_vs_sed.c: where the open connections, with the new one, divided by the weight, are fewest
sed    2,3,7  any  ccbcacbcc

# ip_vs_nq.c: the idle ones first; then as sed
nq     2,3,7  any  (abc) cccbcc -a a

# ip_vs_fo.c: the highest weight, as long as it is there
fo     1,2,3  any  cccccc a=4 aaaaaa a=0 c c=0 b ? c=3 c

# ip_vs_ovf.c: the highest weight until more connections than that are open, then the next; nobody has room: refused
ovf    1,2,4  any  ccccc bbb aa ! -c ccccc !

# ip_vs_lblc.c: all of a destination go to one until more than its weight are open there and another one has less
# than half of that; a new destination goes where wlc sends it
lblc   3,3    any       xxxx yyyy yyyy
lblc   9,9    internal  @1 xx @2 yy @1 xx @2 yy

# ip_vs_lblcr.c: then, however, the destination has both, and takes the one with fewer
lblcr  3,3    any       xxxx yyyy (xy)(xy)
lblcr  9,9    internal  @1 xx @2 yy @1 xx @2 yy

# another scheduler leaves the connections as they are, and counts them
wrr    2,3,7  any  (aabbbccccccc) to=fo ? cccc to=sed ? babcc to=- ? -c c
`

// TestIPVS_schedulers opens real connections through virtual servers and compares where they go with what
// defines each scheduler. All Services are there at the same time, beside another default.
func TestIPVS_schedulers(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	bed := newSchedulerBed(t)
	for _, v6 := range []bool{false, true} {
		name := "IPv4"
		if v6 {
			name = "IPv6"
		}
		t.Run(name, func(t *testing.T) {
			l := &lab{T: t, bed: bed, v6: v6, state: model.NewState()}
			l.start(ipvs.Options{Scheduler: "wlc", DrainTimeout: time.Nanosecond}) // who leaves is gone at once
			for name, test := range map[string]func(*lab){
				"sequences":   (*lab).sequences,
				"source":      (*lab).hashBySource,
				"disruption":  (*lab).disruption,
				"drain":       (*lab).drainHashed,
				"destination": (*lab).hashByDestination,
				"twos":        (*lab).twoChoices,
				"unknown":     (*lab).unknown,
			} {
				t.Run(name, func(t *testing.T) {
					inner := *l
					inner.T = t
					defer func() { l.state = inner.state }()
					test(&inner)
				})
			}
		})
	}
}

// Backends are on the node, so that their answers to clients outside pass it.
const backendNames = "abcd"

// clients are addresses of the place Outside beside its own.
func (l *lab) clients() (all []netip.Addr) {
	first := netip.MustParseAddr("192.0.2.64").As4()
	for i := range byte(128) {
		all = append(all, l.family(netip.AddrFrom4([4]byte{first[0], first[1], first[2], first[3] + i})))
	}
	return all
}

func newSchedulerBed(t *testing.T) *testbed.Bed {
	spec := testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "client"},
		{Name: "host", HostNetwork: true, Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 80}}},
	}}
	for i, name := range backendNames {
		v4 := netip.AddrFrom4([4]byte{10, 244, 1, byte(11 + i)})
		spec.Pods = append(spec.Pods, testbed.PodSpec{
			Name: string(name), Addrs: []netip.Addr{v4, testbed.EmbedV6(v4)},
			Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}},
		})
	}
	bed := testbed.Need(t, spec)
	if err := bed.Do(testbed.Outside, addClients); err != nil {
		t.Fatal(err)
	}
	return bed
}

func addClients() error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	for _, v6 := range []bool{false, true} {
		for _, a := range (&lab{v6: v6}).clients() {
			ip := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
			if err := netlink.AddrAdd(eth0, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD}); err != nil {
				return err
			}
		}
	}
	return nil
}

// lab is a plane on the node of a bed, in one address family.
type lab struct {
	*testing.T
	bed   *testbed.Bed
	v6    bool
	plane dataplane.Dataplane
	state *model.State // which the plane holds
}

func (l *lab) check(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

func (l *lab) equal(have, want string) {
	l.Helper()
	if have != want {
		l.Errorf("have\n%s\nwant\n%s", have, want)
	}
}

func (l *lab) start(o ipvs.Options) {
	l.check(l.bed.Do(testbed.Node, func() (err error) {
		l.plane, err = ipvs.New(o)(dataplane.Config{})
		return err
	}))
	l.state.Pods.Prefixes = testbed.ClusterCIDRs()
	l.check(l.plane.Sync(l.Context(), l.state))
	l.Cleanup(func() {
		if err := errors.Join(l.plane.Remove(context.Background()), l.plane.Close()); err != nil {
			l.Error(err)
		}
	})
}

// to changes the State; the plane may refuse rows, which the error is about.
func (l *lab) to(change func(s *model.State)) error {
	next := l.state.Clone()
	change(next)
	c := model.Diff(l.state, next)
	l.state = next
	return l.plane.Apply(l.Context(), next, c)
}

func (l *lab) family(a netip.Addr) netip.Addr {
	if l.v6 {
		return testbed.EmbedV6(a)
	}
	return a
}

// service is one with some addresses, and a backend for each weight.
type service struct {
	id        model.PoolID
	pool      model.Pool
	scope     model.Scope
	addresses []netip.AddrPort
}

// newService is the n-th Service. Nothing is done with it yet.
func (l *lab) newService(n int, scheduler string, addresses int, weights ...uint16) *service {
	s := &service{id: model.PoolID{Service: fmt.Sprintf("default/service-%d:http", n), V6: l.v6}}
	s.pool.Scheduler = scheduler
	for i, weight := range weights {
		backend := l.family(netip.AddrFrom4([4]byte{10, 244, 1, byte(11 + i)}))
		s.pool.Backends = append(s.pool.Backends,
			model.Backend{Addr: backend, Port: 8080, Local: true, Weight: weight})
	}
	for i := range addresses {
		address := l.family(netip.AddrFrom4([4]byte{10, 96, byte(n), byte(1 + i)}))
		s.addresses = append(s.addresses, netip.AddrPortFrom(address, 80))
	}
	return s
}

// put adds the Service to a State, or what became of it.
func (s *service) put(state *model.State) {
	state.Pools[s.id] = s.pool
	for _, a := range s.addresses {
		key := model.Key{Addr: a.Addr(), Port: a.Port(), Protocol: model.TCP}
		state.Frontends[key] = model.Frontend{Service: s.id.Service, Verdict: model.Drop} // replaced, unless scope is Internal
		key.Scope = s.scope
		state.Frontends[key] = model.Frontend{Service: s.id.Service, Verdict: model.Forward, Pool: s.id}
	}
}

func (s *service) delete(state *model.State) {
	delete(state.Pools, s.id)
	for _, a := range s.addresses {
		for _, scope := range []model.Scope{model.Any, s.scope} {
			delete(state.Frontends, model.Key{Addr: a.Addr(), Port: a.Port(), Protocol: model.TCP, Scope: scope})
		}
	}
}

// setWeight replaces the pool's backends, as rows that are in force are not written to.
func (s *service) setWeight(backend string, weight uint16) {
	s.pool.Backends = slices.Clone(s.pool.Backends)
	s.pool.Backends[strings.Index(backendNames, backend)].Weight = weight
}

// connection is an open one.
type connection struct {
	net.Conn
	backend string
}

// dial connects, from a certain address if that is valid, and learns which backend answers.
func (l *lab) dial(from testbed.Place, source netip.Addr, to netip.AddrPort) (*connection, error) {
	d := net.Dialer{Timeout: 5 * time.Second}
	if source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
	}
	c := &connection{}
	err := l.bed.Do(from, func() (err error) {
		c.Conn, err = d.Dial("tcp", to.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	c.backend, err = c.read()
	return c, err
}

// read reads a line and returns the backend that it is from.
func (c *connection) read() (backend string, err error) {
	line := make([]byte, 128)
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", err
	}
	n, err := c.Read(line)
	backend, _, _ = strings.Cut(string(line[:n]), " ")
	return backend, err
}

// end closes a connection, and returns when its last packet but one has passed the node, which counts it as
// closed from the first one.
func (c *connection) end() error {
	err := errors.Join(
		c.SetReadDeadline(time.Now().Add(5*time.Second)), // the one before may be long past
		c.Conn.(*net.TCPConn).CloseWrite())
	if err == nil {
		_, err = io.Copy(io.Discard, c)
	}
	return errors.Join(err, c.Close())
}

// sequence is a Service, what connections to it are open, and how its backends are called.
type sequence struct {
	*lab
	*service
	from    testbed.Place
	address netip.AddrPort
	open    []*connection
	letters string            // x, y, … in place of the backends' own names; empty: those
	names   map[string]string // by backend
}

func (l *lab) sequences() {
	var lines []string
	for line := range strings.Lines(sequences) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	var all []*sequence
	for i, line := range lines {
		all = append(all, l.newSequence(i+1, strings.Fields(line)))
	}
	l.check(l.to(func(state *model.State) {
		for _, s := range all {
			s.put(state)
		}
	}))
	for i, s := range all {
		words := strings.Fields(lines[i])
		have, err := s.play(words[3:])
		l.check(err)
		if want := strings.Join(words[3:], " "); have != want {
			l.Errorf("%s %s %s\nhave %s\nwant %s", words[0], words[1], words[2], have, want)
		}
	}
	report, err := l.plane.Audit(l.Context(), l.state, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		l.Errorf("audit: %v, %v", report.Drifts, err)
	}
	l.check(l.to(func(state *model.State) {
		for _, s := range all {
			s.delete(state)
		}
	}))
}

func (l *lab) newSequence(n int, words []string) *sequence {
	var weights []uint16
	for _, word := range strings.Split(words[1], ",") {
		weight, err := strconv.ParseUint(word, 10, 16)
		l.check(err)
		weights = append(weights, uint16(weight))
	}
	s := &sequence{lab: l, service: l.newService(n, strings.Trim(words[0], "-"), 2, weights...)}
	s.from = testbed.Outside
	if words[2] == model.Internal.String() {
		s.from, s.scope = "client", model.Internal
	}
	s.address, s.names = s.addresses[0], map[string]string{}
	if strings.Contains(strings.Join(words[3:], ""), "x") {
		s.letters = "xyz"
	}
	return s
}

// play does what the words say, and returns them with what happened in the place of what should.
func (s *sequence) play(words []string) (have string, err error) {
	var out []string
	for _, word := range words {
		if err == nil {
			word, err = s.step(word)
		}
		out = append(out, word)
	}
	for _, c := range s.open {
		err = errors.Join(err, c.Close())
	}
	return strings.Join(out, " "), err
}

func (s *sequence) step(word string) (have string, err error) {
	who, value, assigns := strings.Cut(word, "=")
	switch {
	case word[0] == '@':
		s.address = s.addresses[word[1]-'1']
	case word[0] == '-':
		return word, s.end(word[1:])
	case word == "?":
		return s.answers()
	case who == "to":
		s.pool.Scheduler = strings.Trim(value, "-")
		return word, s.to(s.put)
	case assigns:
		weight, err := strconv.ParseUint(value, 10, 16)
		s.setWeight(who, uint16(weight))
		return word, errors.Join(err, s.to(s.put))
	default:
		return s.connect(word)
	}
	return word, nil
}

// end closes the connections to a backend.
func (s *sequence) end(name string) (err error) {
	s.open = slices.DeleteFunc(s.open, func(c *connection) bool {
		ends := s.name(c.backend) == name
		if ends {
			err = errors.Join(err, c.end())
		}
		return ends
	})
	return err
}

// answers asks all connections.
func (s *sequence) answers() (have string, err error) {
	for _, c := range s.open {
		if _, err := c.Write([]byte("?\n")); err != nil {
			return "", err
		}
		if backend, err := c.read(); backend != c.backend {
			return fmt.Sprintf("%s-for-%s(%v)", backend, c.backend, err), nil
		}
	}
	return "?", nil
}

// connect opens the connections that a word stands for, and sorts those in parentheses.
func (s *sequence) connect(word string) (have string, err error) {
	group, inside := []string(nil), false
	for _, letter := range word {
		switch letter {
		case '(':
			inside = true
		case ')':
			slices.Sort(group)
			have += "(" + strings.Join(group, "") + ")"
			group, inside = nil, false
		default:
			name, err := s.once()
			if err != nil {
				return "", err
			}
			if inside {
				group = append(group, name)
			} else {
				have += name
			}
		}
	}
	return have, nil
}

// once opens one connection and names its backend.
func (s *sequence) once() (name string, err error) {
	c, err := s.dial(s.from, netip.Addr{}, s.address)
	if errors.Is(err, unix.ECONNREFUSED) {
		return "!", nil
	}
	if err != nil {
		return "", err
	}
	s.open = append(s.open, c)
	return s.name(c.backend), nil
}

func (s *sequence) name(backend string) string {
	if s.letters == "" {
		return backend
	}
	if s.names[backend] == "" {
		s.names[backend] = s.letters[len(s.names):][:1]
	}
	return s.names[backend]
}

// assign connects once from each client and returns the backends in the clients' order.
func (l *lab) assign(to netip.AddrPort) (backends string) {
	for _, source := range l.clients() {
		c, err := l.dial(testbed.Outside, source, to)
		l.check(err)
		backends += c.backend
		l.check(c.end())
	}
	return backends
}

// shares says how many of the backends are a, b, …. If a random choice by weight might have that result, within four
// standard deviations, it says the expectation instead.
func shares(backends string, weights ...float64) string {
	sum := 0.0
	for _, w := range weights {
		sum += w
	}
	var out []string
	for i, w := range weights {
		n, p := float64(len(backends)), w/sum
		have, want := float64(strings.Count(backends, backendNames[i:i+1])), n*p
		if math.Abs(have-want) <= 4*math.Sqrt(n*p*(1-p)) {
			have = want
		}
		out = append(out, fmt.Sprintf("%c %.0f", backendNames[i], have))
	}
	return strings.Join(out, ", ")
}

// differ is how many clients have another backend.
func differ(before, after string) (n int) {
	for i := range before {
		if before[i] != after[i] {
			n++
		}
	}
	return n
}

// hashBySource tests sh (ip_vs_sh.c: 256 buckets for hashes of the source address, as many for each backend in turn
// as its weight says) and mh (ip_vs_mh.c: the same with 4093 buckets, of which each backend chooses its own).
func (l *lab) hashBySource() {
	for i, scheduler := range []string{"sh", "mh"} {
		s := l.newService(100+i, scheduler, 2, 1, 1, 2)
		l.check(l.to(s.put))
		first := l.assign(s.addresses[0])
		again, other := l.assign(s.addresses[0]), l.assign(s.addresses[1])
		l.equal(fmt.Sprintf("%s: %s; again: %d differ; another address: %d differ",
			scheduler, shares(first, 1, 1, 2), differ(first, again), differ(first, other)),
			scheduler+": a 32, b 32, c 64; again: 0 differ; another address: 0 differ")
		s.setWeight("c", 0)
		l.check(l.to(s.put))
		draining := l.assign(s.addresses[0])
		l.equal(scheduler+", c drains: "+shares(draining, 1, 1, 0),
			scheduler+", c drains: a 64, b 64, c 0")
		l.check(l.to(s.delete))
	}
}

// disruption is what sets mh apart: when a backend has gone, others' clients keep theirs, but for one in eight at
// most. With sh more than half of them do not.
func (l *lab) disruption() {
	for i, want := range []string{
		"sh: a 32, b 32, c 32, d 32; then a 43, b 43, c 43, d 0; many move",
		"mh: a 32, b 32, c 32, d 32; then a 43, b 43, c 43, d 0; few move",
	} {
		scheduler, _, _ := strings.Cut(want, ":")
		s := l.newService(110+i, scheduler, 1, 1, 1, 1, 1)
		l.check(l.to(s.put))
		before := l.assign(s.addresses[0])
		s.pool.Backends = s.pool.Backends[:3]
		l.check(l.to(s.put))
		after := l.assign(s.addresses[0])
		moved := differ(before, after) - strings.Count(before, "d")
		how := fmt.Sprintf("%d move", moved)
		switch others := len(before) - strings.Count(before, "d"); {
		case moved*8 <= others:
			how = "few move"
		case moved*2 > others:
			how = "many move"
		}
		l.equal(fmt.Sprintf("%s: %s; then %s; %s", scheduler, shares(before, 1, 1, 1, 1), shares(after, 1, 1, 1, 0), how), want)
		l.check(l.to(s.delete))
	}
}

// drainHashed has a backend drain, come back, drain again and go. Meanwhile only its own clients move. sh and mh keep
// buckets for a backend without weight: for mh the kernel keeps as many as its weight was, for sh one.
func (l *lab) drainHashed() {
	for i, c := range []struct {
		scheduler string
		weights   []uint16
	}{{"sh", []uint16{1, 1, 1, 1}}, {"sh", []uint16{5, 5, 5, 5}}, {"mh", []uint16{1, 1, 1, 1}}, {"mh", []uint16{3, 1, 2, 4}}} {
		s := l.newService(150+i, c.scheduler, 1, c.weights...)
		l.check(l.to(s.put))
		before := l.assign(s.addresses[0])
		s.setWeight("d", 0)
		l.check(l.to(s.put))
		during := l.assign(s.addresses[0])
		s.setWeight("d", c.weights[3])
		l.check(l.to(s.put))
		again := l.assign(s.addresses[0])
		l.equal(fmt.Sprintf("%s %d: while d drains it has %d clients, and %d others move; then %d differ",
			c.scheduler, c.weights, strings.Count(during, "d"), differ(before, during)-strings.Count(before, "d"), differ(before, again)),
			fmt.Sprintf("%s %d: while d drains it has 0 clients, and 0 others move; then 0 differ", c.scheduler, c.weights))
		l.check(l.to(s.delete))
	}
}

// hashByDestination tests dh (ip_vs_dh.c: 256 buckets for hashes of the destination address, one for each backend in
// turn).
func (l *lab) hashByDestination() {
	const addresses = 48
	s := l.newService(120, "dh", addresses, 1, 1, 1)
	l.check(l.to(s.put))
	reach := func(source netip.Addr) (backends string) {
		for _, address := range s.addresses {
			c, err := l.dial(testbed.Outside, source, address)
			l.check(err)
			backends += c.backend
			l.check(c.end())
		}
		return backends
	}
	first := reach(l.clients()[0])
	again, other := reach(l.clients()[0]), reach(l.clients()[1])
	l.equal(fmt.Sprintf("%s; again: %d differ; another client: %d differ",
		shares(first, 1, 1, 1), differ(first, again), differ(first, other)),
		"a 16, b 16, c 16; again: 0 differ; another client: 0 differ")
	s.setWeight("c", 0)
	l.check(l.to(s.put))
	draining := reach(l.clients()[0])
	l.equal("c drains: "+shares(draining, 1, 1, 0), "c drains: a 24, b 24, c 0")
	report, err := l.plane.Audit(l.Context(), l.state, dataplane.Quick)
	if err != nil || len(report.Drifts) > 0 {
		l.Errorf("audit: %v, %v", report.Drifts, err)
	}
	s.setWeight("c", 1)
	l.check(l.to(s.put))
	back := reach(l.clients()[0])
	s.setWeight("c", 0)
	l.check(l.to(s.put))
	s.pool.Backends = s.pool.Backends[:2]
	l.check(l.to(s.put))
	gone := reach(l.clients()[0])
	l.equal(fmt.Sprintf("c comes back: %d differ; c has drained and is gone: %d differ", differ(first, back), differ(draining, gone)),
		"c comes back: 0 differ; c has drained and is gone: 0 differ")
	l.check(l.to(s.delete))
}

// twoChoices tests twos (ip_vs_twos.c). Of two backends that are drawn by weight it takes the one with fewer
// connections for its weight, as wlc counts. As long as a has fewer than b it is taken unless b is drawn twice. That is
// three times in four if they weigh the same, seven times in sixteen if b weighs three times as much.
func (l *lab) twoChoices() {
	const n = 300
	for i, c := range []struct {
		weight uint16 // of b
		share  float64
	}{{100, 3. / 4}, {300, 7. / 16}} {
		s := &sequence{lab: l, service: l.newService(130+i, "twos", 1, 0, c.weight), from: testbed.Outside}
		s.address = s.addresses[0]
		l.check(l.to(s.put))
		all := strings.Repeat("b", n)
		have, err := s.connect(all)
		l.check(err)
		l.equal(have, all)
		s.setWeight("a", 100)
		l.check(l.to(s.put))
		have, err = s.connect(all)
		l.check(err)
		a := float64(strings.Count(have, "a"))
		if want := n * c.share; math.Abs(a-want) > 5*math.Sqrt(want*(1-c.share)) {
			l.Errorf("b has weight %d, and a gets %.0f of %d, not about %.0f", c.weight, a, n, want)
		}
		l.check(errors.Join(s.end("a"), s.end("b"), l.to(s.delete)))
	}
}

// unknown has a Service ask for a scheduler that the kernel has not: it has the configured one, wlc, until the kernel
// can do better, and all others are served.
func (l *lab) unknown() {
	good, bad := l.newService(140, "rr", 1, 1, 1), l.newService(141, "nonsense", 1, 1, 1)
	l.check(l.to(func(state *model.State) { bad.put(state); good.put(state) }))
	l.check(l.plane.Sync(l.Context(), l.state)) // the next try
	l.plays(good, "xyxy")
	l.plays(bad, "(xy)(xy)")

	s := l.watch(good)
	have, err := s.connect("xy")
	l.check(err)
	good.pool.Scheduler = "nonsense"
	l.check(l.to(good.put))
	more, err := s.connect("(xy)")
	l.check(err)
	alive, err := s.answers()
	l.check(err)
	l.equal(have+more+alive, "xy(xy)?")
	l.check(errors.Join(s.end("x"), s.end("y")))

	good.pool.Scheduler, bad.pool.Scheduler = "rr", "fo"
	l.check(l.to(func(state *model.State) { bad.put(state); good.put(state) }))
	l.plays(good, "xyxy")
	l.plays(bad, "xxx")
	l.check(l.to(func(state *model.State) { bad.delete(state); good.delete(state) }))
}

func (l *lab) watch(s *service) *sequence {
	return &sequence{
		lab: l, service: s, from: testbed.Outside, letters: "xyz", names: map[string]string{}, address: s.addresses[0],
	}
}

func (l *lab) plays(s *service, words string) {
	l.Helper()
	have, err := l.watch(s).play(strings.Fields(words))
	l.check(err)
	l.equal(have, words)
}
