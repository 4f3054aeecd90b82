package ebpf

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// forger sends packets of anybody's from a place in the cluster.
type forger struct {
	*testing.T
	bed    *testbed.Bed
	from   testbed.Place
	v4, v6 int // raw sockets
}

func newForger(t *testing.T, bed *testbed.Bed, from testbed.Place) forger {
	t.Helper()
	f := forger{T: t, bed: bed, from: from}
	do(t, bed, from, func() (err error) {
		if f.v4, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return err
		}
		f.v6, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	t.Cleanup(func() {
		if err := errors.Join(unix.Close(f.v4), unix.Close(f.v6)); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f forger) send(protocol, src, dst, words string) {
	f.Helper()
	p, err := parsePacket(strings.Join([]string{protocol, src, ">", dst, words}, " "))
	if err != nil {
		f.Fatal(err)
	}
	to := p.dst.Addr()
	if to.Is4() {
		err = unix.Sendto(f.v4, p.ip(), 0, &unix.SockaddrInet4{Addr: to.As4()})
	} else {
		err = unix.Sendto(f.v6, p.ip(), 0, &unix.SockaddrInet6{Addr: to.As16()})
	}
	if err != nil && !errors.Is(err, unix.ENOBUFS) {
		f.Fatal(err)
	}
}

// talker is an open connection, or a flow of datagrams, of a client outside.
type talker struct {
	net.Conn
	lines    *bufio.Reader
	to       netip.AddrPort
	protocol model.Protocol
	who      string // answers
}

func newTalker(t *testing.T, bed *testbed.Bed, protocol model.Protocol, to string) *talker {
	t.Helper()
	c := &talker{to: netip.MustParseAddrPort(to), protocol: protocol}
	var err error
	if c.Conn, err = bed.Dial(t.Context(), testbed.Outside, protocol, c.to); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	c.lines = bufio.NewReader(c.Conn)
	if c.who, err = c.ask(); err == nil && protocol == model.TCP { // the first line comes unasked
		c.who, err = c.ask()
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *talker) ask() (string, error) {
	if err := c.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("?\n")); err != nil {
		return "", err
	}
	line, err := c.lines.ReadString('\n')
	return strings.TrimSpace(line), err
}

// goesOn checks that who has answered still does.
func (c *talker) goesOn(t *testing.T, after string) {
	t.Helper()
	if who, err := c.ask(); err != nil || who != c.who {
		t.Errorf("after %s, %s %s > %s: %q, %v; it was %q", after, c.protocol, c.LocalAddr(), c.to, who, err, c.who)
	}
}

// Open, quiet connections go on, and datagrams reach their earlier receivers, whatever an attacker on the network
// sends. It forges packets of the node and of the clients, errors, and first packets of more flows than any table has
// room for.
func TestForged(t *testing.T) {
	t.Parallel()
	random := seeded(t)
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	p := planeAs(t, bed, Options{
		Pins: filepath.Join(testbed.NeedBPFFS(t), "fairlead"), Sizes: Sizes{Translations: 1 << 12},
	})
	defer p.Close()
	var open []*talker
	for range 4 {
		open = append(open,
			newTalker(t, bed, model.TCP, "192.0.2.1:30080"), newTalker(t, bed, model.TCP, "203.0.113.1:80"),
			newTalker(t, bed, model.TCP, "[fd00::c000:201]:30080"), newTalker(t, bed, model.UDP, "203.0.113.1:53"),
		)
	}
	f := newForger(t, bed, testbed.NodeB)
	for _, attack := range []struct {
		name string
		do   func(forger, *rand.Rand, []*talker)
	}{{"packets of the node", forger.asNode}, {"packets of clients", forger.asClients}, {"resets everywhere", forger.resetsEverywhere}, {"a flood", forger.flood}} {
		for _, c := range open { // datagrams last, if they go on for some seconds
			if c.protocol == model.UDP {
				p.agePackets(t)
				c.goesOn(t, "some seconds")
			}
		}
		attack.do(f, random, open)
		for _, c := range open {
			c.goesOn(t, attack.name)
		}
	}
}

// agePackets makes flows some seconds older.
func (p *Plane) agePackets(t *testing.T) {
	t.Helper()
	m := p.memory[packetsMapTranslations]
	err := each(m, func(key packetsTuple, value packetsTranslation) error {
		value.Last -= 2 * packetsTicksTICKS
		return m.Put(key, value)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// asNode begins connections to a backend from all ports of the node that stand for clients.
func (f forger) asNode(_ *rand.Rand, _ []*talker) {
	f.Helper()
	var ports portRange
	do(f, f.bed, testbed.Node, func() (err error) {
		ports, _, err = freePorts()
		return err
	})
	for port := range int(ports.Count) {
		from := fmt.Sprint(int(ports.First) + port)
		f.send("tcp", "[fd00::c000:201]:"+from, "[fd00::af4:10b]:8080", "S empty")
		f.send("tcp", "192.0.2.1:"+from, "10.244.1.11:8080", "S empty")
	}
}

// asClients sends what ends connections, but for numbers that only their ends know, and errors.
func (f forger) asClients(random *rand.Rand, open []*talker) {
	f.Helper()
	for _, c := range open {
		if c.protocol == model.UDP {
			continue
		}
		from, to := c.LocalAddr().String(), c.to.String()
		for range 100 {
			for _, flags := range []string{"R", "RA", "FA", "S"} {
				f.send("tcp", from, to, fmt.Sprintf("%s empty seq=%d ack=%d", flags, random.Uint32(), random.Uint32()))
			}
		}
		if c.to.Addr().Is4() {
			f.send("icmp", "192.0.2.2:0", c.to.Addr().String()+":0",
				fmt.Sprintf("port-unreachable (tcp %s > %s A seq=%d)", to, from, random.Uint32()))
		}
	}
}

// resetsEverywhere sends resets of which some come near the sequences of connections, and begins these anew.
func (f forger) resetsEverywhere(random *rand.Rand, open []*talker) {
	f.Helper()
	for _, c := range open[:3] {
		from, to := c.LocalAddr().String(), c.to.String()
		for seq := range uint32(1 << 16) {
			f.send("tcp", from, to, fmt.Sprintf("R empty seq=%d", seq<<16|random.Uint32()&0xffff))
		}
		f.send("tcp", from, to, fmt.Sprintf("S empty seq=%d", random.Uint32()))
	}
}

// flood begins flows with which no client goes on.
func (f forger) flood(_ *rand.Rand, open []*talker) {
	f.Helper()
	services := slices.Compact(slices.Sorted(func(yield func(string) bool) {
		for _, c := range open {
			yield(c.protocol.String() + " " + c.to.String())
		}
	}))
	for i := range 3 << 12 {
		protocol, to, _ := strings.Cut(services[i%len(services)], " ")
		from, words := fmt.Sprintf("198.18.%d.%d:4000", i>>8, i&255), "S empty"
		if strings.HasPrefix(to, "[") {
			from = fmt.Sprintf("[fd00:1::%x]:4000", i)
		}
		if protocol == "udp" {
			words = ""
		}
		f.send(protocol, from, to, words)
	}
}
