package ebpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
)

// These are the values that programs return.
const (
	tcUnspec    = -1
	tcShot      = 2
	xdpDrop     = 1
	xdpPass     = 2
	xdpTX       = 3
	xdpRedirect = 4
)

// A program that is attached to a bond runs at its ports, and knows none of them.
func TestFastBond(t *testing.T) {
	d := newDrivers(t.TempDir(), nil)
	if err := d.attach(&netlink.Bond{}, nil, nil); !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("a bond: %v", err)
	}
}

// fastBed is a Bed whose LAN takes what XDP programs of the node send, as hardware does.
func fastBed(t testing.TB, s testbed.Spec) *testbed.Bed {
	t.Helper()
	bed := testbed.Need(t, s)
	do(t, bed, testbed.LAN, func() error { return attachPass(t, string(testbed.Node)) })
	return bed
}

func do(t testing.TB, bed *testbed.Bed, at testbed.Place, f func() error) {
	t.Helper()
	if err := bed.Do(at, f); err != nil {
		t.Fatalf("%s: %+v", at, err)
	}
}

// attachPass attaches a program that does nothing.
func attachPass(t testing.TB, device string) error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer p.Close()
	i, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: i.Index, Flags: link.XDPDriverMode})
	if err == nil {
		t.Cleanup(func() { l.Close() })
	}
	return err
}

// accelerate attaches the program to a device of the node.
func accelerate(t testing.TB, bed *testbed.Bed, r packetRun, name string) (l netlink.Link) {
	t.Helper()
	pins := testbed.NeedBPFFS(t)
	do(t, bed, testbed.Node, func() (err error) {
		if l, err = netlink.LinkByName(name); err != nil {
			return err
		}
		d := newDrivers(pins, nil)
		outside := r.programs.Maps[packetsMapOutside]
		if err := d.put(l, r.programs.Programs[packetsProgFromOutside], outside); err != nil {
			return err
		}
		as := outletOf(l) // as of hardware
		as.Redirects = 0
		return outside.Put(uint32(l.Attrs().Index), as)
	})
	return l
}

const fastRows = `
backend default/a:http cluster 10.244.2.13:8080
backend default/a:http cluster6 [fd00::af4:20d]:8080
backend default/b:dns cluster 10.244.2.13:5353
backend default/b:dns cluster6 [fd00::af4:20d]:5353
backend default/c:kept cluster 10.244.2.14:80
backend default/f:kept cluster 10.244.2.15:80
backend default/d:here cluster 192.0.2.1:80
frontend 192.0.2.1:30080/tcp any forward default/a:http cluster snat offcluster
frontend [fd00::c000:201]:30080/tcp any forward default/a:http cluster6 snat offcluster
frontend 192.0.2.1:30053/udp any forward default/b:dns cluster snat offcluster
frontend [fd00::c000:201]:30053/udp any forward default/b:dns cluster6 snat offcluster
frontend 203.0.113.1:80/tcp any forward default/c:kept cluster snat never
frontend 203.0.113.1:80/udp any forward default/c:kept cluster snat never
frontend 203.0.113.2:80/tcp any forward default/d:here cluster snat never
frontend 203.0.113.3:80/tcp any drop default/e:
frontend 203.0.113.3:80/udp any drop default/e:
frontend 203.0.113.4:80/tcp any forward default/f:kept cluster snat never allow 198.51.100.7/32
frontend 203.0.113.4:80/udp any forward default/f:kept cluster snat never allow 198.51.100.7/32
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
`

// station is one of the two nodes on which the same happens: one has the program for drivers.
type station struct {
	packetRun
	eth0 netlink.Link
	eth1 netlink.Link // leads to one backend, elsewhere
	fast bool
	runs map[string]int // by what the program for drivers says
}

// run sends a frame through a program.
func (s *station) run(program string, frame []byte) (int, []byte, error) {
	device := uint32(s.eth0.Attrs().Index)
	in := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: skbContext{Device: device}}
	if program == packetsProgFromOutside {
		in.Context = xdpContext{DataEnd: uint32(len(frame)), Ingress: device}
	}
	result, err := s.programs.Programs[program].Run(&in)
	return int(int32(result)), in.DataOut, err
}

// These are structs xdp_md and, its beginning, __sk_buff of the kernel.
type (
	xdpContext struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }
	skbContext struct {
		_      [10]uint32
		Device uint32
	}
)

// pass is what becomes of a frame that has come from outside: it leaves, or something else.
func (s *station) pass(frame []byte) (string, error) {
	if s.fast {
		action, out, err := s.run(packetsProgFromOutside, frame)
		if err != nil {
			return "", err
		}
		s.runs[strconv.Itoa(action)]++
		switch action {
		case xdpPass:
			if !bytes.Equal(out, frame) {
				return fmt.Sprintf("passed, but as % x", out), nil
			}
		case xdpDrop:
			return "dropped", nil
		case xdpTX, xdpRedirect:
			return fmt.Sprintf("leaves as % x", out), nil
		default:
			return fmt.Sprint("XDP action ", action), nil
		}
	}
	return s.slowly(frame)
}

// slowly does it as the stack does, with the programs before and behind it.
func (s *station) slowly(frame []byte) (string, error) {
	action, out, err := s.run(packetsProgFromAnywhere, frame)
	switch {
	case err != nil:
		return "", err
	case action == tcShot:
		return "dropped", nil
	case action != tcUnspec:
		return fmt.Sprintf("ingress %d: % x", action, out), nil
	}
	next := forwarded(out)
	if next == nil {
		return fmt.Sprintf("stays as % x", out), nil
	}
	copy(next, neighbour(destination(next)))
	copy(next[6:], s.eth0.Attrs().HardwareAddr)
	if destination(next) == elsewhere() {
		copy(next[6:], s.eth1.Attrs().HardwareAddr)
	}
	action, out, err = s.run(packetsProgLeave, next)
	if err != nil || action != tcUnspec {
		return fmt.Sprintf("egress %d", action), err
	}
	return fmt.Sprintf("leaves as % x", out), nil
}

// forwarded is a frame one hop later; nil if it ends here.
func forwarded(frame []byte) []byte {
	next := slices.Clone(frame)
	ip := next[14:]
	to := destination(next)
	if to == netip.MustParseAddr("192.0.2.1") || to == netip.MustParseAddr("fd00::c000:201") {
		return nil
	}
	if ip[0]>>4 == 6 {
		ip[7]--
		if ip[7] == 0 {
			return nil
		}
		return next
	}
	if ip[8]--; ip[8] == 0 {
		return nil
	}
	header := ip[:int(ip[0]&15)*4]
	copy(header[10:], []byte{0, 0})
	binary.BigEndian.PutUint16(header[10:], ^sum(header))
	return next
}

func destination(frame []byte) netip.Addr {
	at := frame[14+16 : 14+20]
	if frame[14]>>4 == 6 {
		at = frame[14+24 : 14+40]
	}
	a, _ := netip.AddrFromSlice(at)
	return a
}

// neighbour is the Ethernet address of whom a packet goes to next, which addNeighbours sets.
func neighbour(to netip.Addr) net.HardwareAddr {
	via := byte(254)
	for last, prefix := range map[byte]string{2: "10.244.2.0/24", 9: "192.0.2.9/32"} {
		p := netip.MustParsePrefix(prefix)
		if p.Contains(to) || to.Is6() && netip.PrefixFrom(testbed.EmbedV6(p.Addr()), 96+p.Bits()).Contains(to) {
			via = last
		}
	}
	return net.HardwareAddr{2, 0, 0, 0, 0, via}
}

// elsewhere is a backend that is not on the LAN.
func elsewhere() netip.Addr { return netip.MustParseAddr("10.244.2.14") }

// addElsewhere makes a second device, which leads there.
func addElsewhere(t testing.TB) (eth1 netlink.Link, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = "eth1", net.FlagUp
	if err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far1"}); err != nil {
		return nil, err
	}
	if eth1, err = netlink.LinkByName("eth1"); err != nil {
		return nil, err
	}
	far, err := netlink.LinkByName("far1")
	if err == nil {
		err = netlink.LinkSetUp(far)
	}
	if err == nil {
		err = attachPass(t, "far1")
	}
	only := net.IPNet{IP: elsewhere().AsSlice(), Mask: net.CIDRMask(32, 32)}
	if err == nil {
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: eth1.Attrs().Index, Dst: &only, Scope: netlink.SCOPE_LINK})
	}
	if err == nil {
		err = netlink.NeighSet(&netlink.Neigh{
			LinkIndex: eth1.Attrs().Index, State: netlink.NUD_PERMANENT, IP: only.IP, HardwareAddr: neighbour(elsewhere()),
		})
	}
	return eth1, err
}

func addNeighbours(eth0 netlink.Link) error {
	for _, last := range []byte{2, 9, 254} {
		v4 := netip.AddrFrom4([4]byte{192, 0, 2, last})
		for _, a := range []netip.Addr{v4, testbed.EmbedV6(v4)} {
			err := netlink.NeighSet(&netlink.Neigh{
				LinkIndex: eth0.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(),
				HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, last},
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// randomFrame is one of few flows, so that most packets belong to one, with all that a packet may have.
func randomFrame(r *rand.Rand, device net.HardwareAddr) []byte {
	one := func(of ...string) string { return of[r.IntN(len(of))] }
	port := fmt.Sprintf("%03d", r.IntN(3)) // each client has ports of its own: no hidden client needs a port by chance
	protocol := one("tcp", "tcp", "tcp", "udp", "udp", "sctp")
	var src, dst string
	switch r.IntN(8) {
	case 0, 1:
		src = one("192.0.2.9:4", "198.51.100.7:5") + port
		dst = one("192.0.2.1:30080", "192.0.2.1:30053", "203.0.113.1:80", "203.0.113.2:80", "203.0.113.3:80",
			"203.0.113.4:80", "10.96.1.1:80")
	case 2, 3:
		src, dst = "192.0.2.9:4"+port, one("192.0.2.1:30080", "192.0.2.1:30053")
	case 4:
		src = one("10.244.2.13:8080", "10.244.2.13:5353", "10.244.2.14:80")
		dst = one("192.0.2.1:4", "192.0.2.1:5", "192.0.2.9:4", "198.51.100.7:5") + port
	case 5, 6:
		src, dst = "[fd00::c000:209]:4"+port, one("[fd00::c000:201]:30080", "[fd00::c000:201]:30053")
	case 7:
		src, dst = one("[fd00::af4:20d]:8080", "[fd00::af4:20d]:5353"), one("[fd00::c000:201]:4", "[fd00::c000:209]:4")+port
	}
	words := map[string]string{
		"tcp": one("S", "SA", "A", "A", "PA", "PA", "FA", "RA"), "udp": one("", "", "unsummed"), "sctp": one("init", ""),
	}[protocol]
	switch n := r.IntN(20); {
	case n == 0:
		words += " options"
	case n == 1 && protocol == "udp":
		words = one("first", "later")
	}
	p, err := parsePacket(fmt.Sprintf("%s %s > %s %s", protocol, src, dst, words))
	if err != nil {
		panic(err)
	}
	return disfigure(r, p.bytes(), device)
}

// disfigure gives a frame what packets do not say.
func disfigure(r *rand.Rand, frame []byte, device net.HardwareAddr) []byte {
	copy(frame, device)
	if r.IntN(20) == 0 {
		copy(frame, net.HardwareAddr{2, 0, 0, 0, 1, 1}) // not for us
	}
	ttl := byte([]int{64, 64, 64, 255, 2, 1}[r.IntN(6)])
	ip := frame[14:]
	if ip[0]>>4 == 6 {
		ip[7] = ttl
		return frame
	}
	ip[8], ip[1] = ttl, byte(r.IntN(2)*0x20)
	header := ip[:int(ip[0]&15)*4]
	copy(header[10:], []byte{0, 0})
	binary.BigEndian.PutUint16(header[10:], ^sum(header))
	return frame
}

// flows is what the programs remember, and how many packets and bytes have passed. It leaves out what depends on the
// moment: when a flow was used, and what is noted once in a second.
func (s *station) flows(t *testing.T) (out map[packetsTuple]packetsTranslation, packets, octets uint64) {
	t.Helper()
	const lasting = 1 << 5
	out = map[packetsTuple]packetsTranslation{}
	var key packetsTuple
	var value packetsTranslation
	all := s.programs.Maps[packetsMapTranslations].Iterate()
	for all.Next(&key, &value) {
		packets += uint64(value.Packets)
		octets += uint64(value.Bytes)
		value.Last, value.Packets, value.Bytes, value.State = 0, 0, 0, value.State&^lasting
		out[key] = value
	}
	var whose packetsTrafficKey
	var passed packetsTraffic
	counted := s.programs.Maps[packetsMapTraffic].Iterate()
	for counted.Next(&whose, &passed) {
		packets += passed.Packets[0] + passed.Packets[1]
		octets += passed.Bytes[0] + passed.Bytes[1]
	}
	if err := errors.Join(all.Err(), counted.Err()); err != nil {
		t.Fatal(err)
	}
	return out, packets, octets
}

// A node behaves the same with and without the program for drivers. Any packet has the same fate, to the last bit, and
// the node remembers the same.
func TestFastIsTheSame(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.Linux514) // before, no device can be named to a test run
	bed := fastBed(t, testbed.Spec{})
	with := &station{packetRun: newPacketRun(t, fastRows), fast: true, runs: map[string]int{}}
	without := &station{packetRun: newPacketRun(t, fastRows)}
	do(t, bed, testbed.Node, func() (err error) {
		with.eth1, err = addElsewhere(t)
		return err
	})
	accelerate(t, bed, with.packetRun, "eth1")
	with.eth0 = accelerate(t, bed, with.packetRun, "eth0")
	without.eth0, without.eth1 = with.eth0, with.eth1
	r := seeded(t)
	do(t, bed, testbed.Node, func() error {
		if err := addNeighbours(with.eth0); err != nil {
			return err
		}
		// Each processor has a queue of flows that are not held, so both nodes have to use the same one.
		all, cpus := allowedCPUs(t)
		var one unix.CPUSet
		one.Set(cpus[0])
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer func() { _ = unix.SchedSetaffinity(0, &all) }()
		for i := range 4000 {
			frame := randomFrame(r, with.eth0.Attrs().HardwareAddr)
			got, err := with.pass(frame)
			if err != nil {
				return err
			}
			want, err := without.pass(frame)
			if err != nil {
				return err
			}
			if got != want {
				p, _ := decode(frame)
				return fmt.Errorf("packet %d: %s: % x:\n%s; without XDP:\n%s", i, p, frame, got, want)
			}
		}
		return nil
	})
	t.Log("by action: ", with.runs)
	if with.runs[strconv.Itoa(xdpTX)] < 200 || with.runs[strconv.Itoa(xdpRedirect)] < 20 ||
		with.runs[strconv.Itoa(xdpDrop)] < 30 {
		t.Errorf("few packets were handled by the program for drivers: %v", with.runs)
	}
	have, packets, octets := with.flows(t)
	want, wantPackets, wantOctets := without.flows(t)
	if packets != wantPackets || octets != wantOctets {
		t.Errorf("%d packets, %d bytes; without XDP %d, %d", packets, octets, wantPackets, wantOctets)
	}
	for key, value := range want {
		if have[key] != value {
			t.Errorf("%+v: %+v; without XDP %+v", key, have[key], value)
		}
	}
	if len(have) != len(want) {
		t.Errorf("%d translations; without XDP %d", len(have), len(want))
	}
}

// seeded is chance that FAIRLEAD_SEED repeats.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(sample.Seed(t), 0))
}
