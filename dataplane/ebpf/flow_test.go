package ebpf

import (
	"fmt"
	"math/bits"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// A resolver asks for both families from one port, and two processors see that first. Both datagrams reach the backend
// that one of them has chosen, and nothing is left of the other's choice.
func TestFlow_sameMoment(t *testing.T) {
	for name, c := range map[string]struct {
		snat string
		each int // translations of a flow
	}{"source kept": {"never", 2}, "source hidden": {"always", 4}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const flows = 100
			r := newPacketRunWith(t, `
backend default/web:dns cluster 10.244.1.11:5353 local
backend default/web:dns cluster 10.244.1.12:5353 local
backend default/web:dns cluster 10.244.1.13:5353 local
frontend 192.0.2.1:30053/udp any forward default/web:dns cluster snat `+c.snat+"\n", packetOptions{Translations: 1 << 12})
			for i := range flows {
				in, err := parsePacket(fmt.Sprintf("udp 192.0.2.9:%d > 192.0.2.1:30053", 40_000+i))
				if err != nil {
					t.Fatal(err)
				}
				first := r.through("lan", in)
				r.blind()
				second := r.through("lan", in)
				if first != second || !strings.Contains(first, " > 10.244.1.1") {
					t.Fatalf("two datagrams of flow %d become\n%s\n%s", i, first, second)
				}
			}
			if n := len(r.translations()); n != c.each*flows {
				t.Errorf("%d flows have %d translations", flows, n)
			}
			for line := range strings.Lines(r.flows()) {
				if c.each == 4 && strings.HasPrefix(line, "out 192.0.2.9:") {
					r.returns(strings.TrimSpace(line))
				}
			}
		})
	}
}

// blind keeps the next packet from seeing that it has a flow until it makes one, as if that had been made meanwhile.
func (r packetRun) blind() {
	r.Helper()
	if err := r.programs.Maps[activityTable].Put(uint32(0), packetsActivity{}); err != nil {
		r.Fatal(err)
	}
}

// returns checks that what a hidden client's packet to a backend becomes has a way back to that client.
func (r packetRun) returns(line string) {
	r.Helper()
	in, err := parsePacket("udp " + strings.TrimPrefix(line, "out "))
	if err != nil {
		r.Fatal(err)
	}
	sent, err := parsePacket(r.through("out", in))
	if err != nil {
		r.Fatal(err)
	}
	answer := packet{protocol: in.protocol, src: sent.dst, dst: sent.src}
	if got, want := r.through("pod", answer), fmt.Sprintf("udp %s > %s", in.dst, in.src); got != want {
		r.Errorf("%s -> %s; want %s", answer, got, want)
	}
}

const (
	roomRows = `
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster6 [fd00::a:b]:8080
backend default/web:dns cluster 10.244.2.13:5353
backend default/web:dns cluster6 [fd00::a:b]:5353
backend default/web:s cluster 10.244.2.13:38412
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat never
frontend 203.0.113.2:80/tcp any forward default/web:http cluster snat never
frontend [fd00::cb00:7101]:80/tcp any forward default/web:http cluster6 snat never
frontend 203.0.113.1:53/udp any forward default/web:dns cluster snat never
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
frontend [fd00::c000:201]:30080/tcp any forward default/web:http cluster6 snat always
frontend 192.0.2.1:30053/udp any forward default/web:dns cluster snat always
frontend [fd00::c000:201]:30053/udp any forward default/web:dns cluster6 snat always
frontend 192.0.2.1:30412/sctp any forward default/web:s cluster snat always
frontend 192.0.2.1:30081/tcp any forward default/web:http cluster snat offcluster
frontend [fd00::c000:201]:30081/tcp any forward default/web:http cluster6 snat offcluster
frontend 192.0.2.1:30054/udp any forward default/web:dns cluster snat offcluster
pods 10.244.0.0/16
`
	roomAtAll = 64 // translations
)

// newRoomRun has two ports that stand for clients.
func newRoomRun(t *testing.T) packetRun {
	t.Helper()
	return newPacketRunWith(t, roomRows, packetOptions{Translations: roomAtAll, DirectMTU: 1500, Ports: portRange{5000, 2}})
}

// empty has no translation in the table.
func (r packetRun) empty() {
	r.Helper()
	for key := range r.translations() {
		if err := r.programs.Maps[packetsMapTranslations].Delete(key); err != nil {
			r.Fatal(err)
		}
	}
}

// leave has room for some more translations only, as others have the rest.
func (r packetRun) leave(room int) {
	r.Helper()
	for i := range roomAtAll - room - len(r.translations()) {
		other := at(packetsHookEGRESS, unix.IPPROTO_TCP, packetsEndpoint{Port: uint16(i)}, packetsEndpoint{})
		if err := r.programs.Maps[packetsMapTranslations].Put(other, packetsTranslation{State: packetsStateBACK}); err != nil {
			r.Fatal(err)
		}
	}
}

// takePorts has others have all ports that stand for clients of a backend.
func (r packetRun) takePorts(backend string) {
	r.Helper()
	for _, own := range []string{"192.0.2.1:5000", "192.0.2.1:5001"} {
		key := at(packetsHookINGRESS, unix.IPPROTO_TCP, endpointAt(backend), endpointAt(own))
		if err := r.programs.Maps[packetsMapTaken].Put(key, uint8(0)); err != nil {
			r.Fatal(err)
		}
	}
}

// loseAddress has no address of IPv4 stand for clients.
func (r packetRun) loseAddress() {
	r.Helper()
	if err := r.programs.Maps[packetsMapNodeAddrs].Delete(addrKey(0, anywhere(true))); err != nil {
		r.Fatal(err)
	}
}

// begins has a client begin a flow, and then its backend send to the client's port. It reports whether that seems to be
// an answer of the service.
func (r packetRun) begins(in packet) (becomes string, answered bool) {
	r.Helper()
	service, backend := in.dst, netip.MustParseAddr("10.244.2.13")
	if told := in.service(); told.IsValid() {
		service = told
	}
	if in.v6() {
		backend = netip.MustParseAddr("fd00::a:b")
	}
	port := map[model.Protocol]uint16{model.TCP: 8080, model.UDP: 5353, model.SCTP: 38412}[in.protocol]
	becomes = r.through("lan", in)
	out := packet{protocol: in.protocol, src: netip.AddrPortFrom(backend, port), dst: in.src}
	got := r.through("out", out)
	out.src = service
	if got != "the same" && got != out.String() {
		r.Errorf("after %s the backend's packet becomes %s", in, got)
	}
	return becomes, got == out.String()
}

// A flow that the table has no room for leaves nothing there. Its backend's packets to that port are then for others, such
// as a client that knows the backend by its own address.
func TestFlow_noRoom(t *testing.T) {
	r := newRoomRun(t)
	for text, needs := range map[string]int{ // translations
		"tcp 192.0.2.9:5000 > 203.0.113.1:80 S":                              2,
		"tcp [fd00::9]:5000 > [fd00::cb00:7101]:80 S":                        2,
		"udp 192.0.2.9:5000 > 203.0.113.1:53":                                2,
		"tcp 192.0.2.9:5000 > 192.0.2.1:30080 S":                             4,
		"tcp [fd00::9]:5000 > [fd00::c000:201]:30080 S":                      4,
		"udp 192.0.2.9:5000 > 192.0.2.1:30053":                               4,
		"udp [fd00::9]:5000 > [fd00::c000:201]:30053":                        4,
		"sctp 192.0.2.9:5000 > 192.0.2.1:30412 init":                         4,
		"tcp 192.0.2.9:5000 > 192.0.2.1:30081 S":                             3,
		"tcp [fd00::9]:5000 > [fd00::c000:201]:30081 S":                      3,
		"udp 192.0.2.9:5000 > 192.0.2.1:30054":                               3,
		"tcp 192.0.2.8:5000 > 10.244.2.13:8080 S for=192.0.2.2:30080":        3,
		"tcp [fd00::8]:5000 > [fd00::a:b]:8080 S for=[fd00::c000:202]:30080": 3,
		"udp 192.0.2.8:5000 > 10.244.2.13:5353 for=192.0.2.2:30053":          3,
	} {
		in, err := parsePacket(text)
		if err != nil {
			t.Fatal(err)
		}
		for room := range needs + 1 {
			r.empty()
			r.leave(room)
			becomes, answered := r.begins(in)
			left := roomAtAll - len(r.translations())
			fits, drops := room == needs, becomes == "dropped"
			if fits && (left != 0 || !answered || drops) {
				t.Errorf("%s becomes %s, and has %d of %d translations; it is answered: %t", in, becomes, room-left, needs, answered)
			}
			if !fits && (left != room || answered || drops == in.service().IsValid()) { // TOLD packets are not translated
				t.Errorf("%s becomes %s, and leaves %d translations, where there is room for %d; it is answered: %t",
					in, becomes, room-left, room, answered)
			}
		}
	}
}

// A flow leaves nothing, either, if no port of the node is free, or if the node has no address. One that another node has
// told of leaves nothing if it would need another port. The client's flow for another Service stays.
func TestFlow_notLaid(t *testing.T) {
	r := newRoomRun(t)
	nothing := func() {}
	for _, c := range []struct {
		name, before string
		change       func()
		packet       string
	}{
		{
			"no room beside another Service", "tcp 192.0.2.6:5000 > 203.0.113.1:80 S", func() { r.leave(0) },
			"tcp 192.0.2.6:5000 > 203.0.113.2:80 S",
		},
		{
			"room for one beside another Service", "tcp 192.0.2.7:5000 > 203.0.113.1:80 S", func() { r.leave(1) },
			"tcp 192.0.2.7:5000 > 203.0.113.2:80 S",
		},
		{
			"told of another Service", "tcp 192.0.2.8:5000 > 10.244.2.13:8080 S for=192.0.2.2:30080", nothing,
			"tcp 192.0.2.8:5000 > 10.244.2.13:8080 S for=203.0.113.1:80",
		},
		{
			"no port", "tcp 192.0.2.8:5000 > 203.0.113.1:80 S", func() { r.takePorts("10.244.2.13:8080") },
			"tcp 192.0.2.9:5000 > 192.0.2.1:30080 S",
		},
		{
			"no address", "tcp 192.0.2.5:5000 > 203.0.113.1:80 S", r.loseAddress,
			"tcp 192.0.2.9:5000 > 192.0.2.1:30080 S",
		},
	} {
		r.empty()
		r.sent("lan " + c.before)
		c.change()
		before := r.flows()
		in, err := parsePacket(c.packet)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.through("lan", in); (got == "dropped") == in.service().IsValid() {
			t.Errorf("%s: %s becomes %s", c.name, in, got)
		}
		if after := r.flows(); after != before || !strings.Contains(before, ":5000") {
			t.Errorf("%s: %s leaves\n%s\nbefore it there were\n%s", c.name, in, after, before)
		}
	}
}

const (
	leavingRows = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:s cluster 10.244.1.11:38412 local
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat never
frontend 192.0.2.1:30412/sctp any forward default/web:s cluster snat never
`
	opened = `
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 S
out tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA  -> tcp 192.0.2.1:30080 > 192.0.2.9:4000 SA
lan tcp 192.0.2.9:4001 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4001 > 10.244.1.11:8080 S
lan sctp 192.0.2.9:4000 > 192.0.2.1:30412 init -> sctp 192.0.2.9:4000 > 10.244.1.11:38412 init`
)

// A client that begins a connection does not reach a backend that has left, not even from a port that had one there.
func TestFlow_left(t *testing.T) {
	for name, c := range map[string]struct{ rows, packets string }{
		"another backend": {strings.ReplaceAll(leavingRows, "10.244.1.11", "10.244.1.12"), `
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 A    -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 A
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4000 > 10.244.1.12:8080 S
lan tcp 192.0.2.9:4001 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4001 > 10.244.1.12:8080 S
lan sctp 192.0.2.9:4000 > 192.0.2.1:30412 init -> sctp 192.0.2.9:4000 > 10.244.1.12:38412 init`},
		"the same": {leavingRows + "backend default/web:http cluster 10.244.1.12:8080 local\n", `
lan tcp 192.0.2.9:4001 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4001 > 10.244.1.11:8080 S`},
		"no Service": {"", `
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 A    -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 A
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S    -> the same
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 A    -> the same
lan sctp 192.0.2.9:4000 > 192.0.2.1:30412 init -> the same`},
		"no backends": {"frontend 192.0.2.1:30080/tcp any reject default/web:http\n", `
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S    -> back tcp 192.0.2.1:30080 > 192.0.2.9:4000 RA ack=6 empty`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newPacketRun(t, leavingRows)
			r.play(strings.TrimSpace(opened))
			r.change(c.rows)
			r.play(strings.TrimSpace(c.packets))
		})
	}
}

// The programs answer refused packets. Of a flood they answer so many in a second at most, whatever processors get it.
func TestFlow_answersBound(t *testing.T) {
	r := newPacketRun(t, "frontend 192.0.2.1:81/tcp any reject default/web:none\n"+
		"frontend 192.0.2.1:81/udp any reject default/web:none\n")
	cpus := ownThread(t)
	cpus = cpus[:min(len(cpus), 4)]
	for kind, c := range map[uint32]struct {
		packet string
		most   uint64
	}{
		0: {"tcp 192.0.2.9:4000 > 192.0.2.1:81 S", 10_000},
		1: {"udp 192.0.2.9:4000 > 192.0.2.1:81", 1_000},
	} {
		in, err := parsePacket(c.packet)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			sent, ago uint64
			want      int // of three for each processor
		}{{0, 0, 3 * len(cpus)}, {c.most - 1, 0, 1}, {c.most, 0, 0}, {c.most, 1, 3 * len(cpus)}} {
			if got := r.answersAfter(kind, in, x.sent, x.ago, cpus); got != x.want {
				t.Errorf("%s, %d answers %d s ago: %d more, want %d", in, x.sent, x.ago, got, x.want)
			}
		}
	}
}

// ownThread gives the test a thread of its own, which may be moved to any of the processors that it returns.
func ownThread(t *testing.T) (cpus []int) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	all, cpus := allowedCPUs(t)
	t.Cleanup(func() {
		if err := unix.SchedSetaffinity(0, &all); err != nil {
			t.Error(err)
		}
	})
	return cpus
}

// allowedCPUs are those that this thread may use.
func allowedCPUs(t *testing.T) (all unix.CPUSet, cpus []int) {
	t.Helper()
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Error(err)
	}
	for cpu := range len(all) * bits.UintSize {
		if all.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return all, cpus
}

// answersAfter sends three packets to each processor when so many of a kind were answered in a second, and returns how
// many of them are.
func (r packetRun) answersAfter(kind uint32, in packet, sent, ago uint64, cpus []int) int {
	r.Helper()
	for {
		answered, before := 0, second(r)
		if err := r.programs.Maps[packetsMapAnswers].Put(kind, [2]uint64{before - ago, sent}); err != nil {
			r.Fatal(err)
		}
		for _, cpu := range cpus {
			var one unix.CPUSet
			one.Set(cpu)
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				r.Fatal(err)
			}
			for range 3 {
				if r.through("lan", in) != "dropped" {
					answered++
				}
			}
		}
		if second(r) == before { // no other second began meanwhile
			return answered
		}
	}
}

// second is the programs' clock.
func second(t testing.TB) uint64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return uint64(now.Sec)
}

// A port of the node belongs to the flow that has it, until that is over. Then it is free for another plane's client or
// a socket that begins a connection with it.
func TestFlow_yields(t *testing.T) {
	testYields(t, newPacketRun(t, yieldRows))
}

func TestFlow_yieldsNoted(t *testing.T) {
	r := newPacketRun(t, yieldRows)
	s := r.sweep(patience())
	r.before = func() { r.pass(s) }
	testYields(t, r)
}

const yieldRows = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster6 [fd00::a:b]:8080 local
backend default/dns:dns cluster 10.244.1.11:5353 local
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
frontend [fd00::c000:201]:30080/tcp any forward default/web:http cluster6 snat always
frontend 192.0.2.1:30053/udp any forward default/dns:dns cluster snat always
`

func testYields(t *testing.T, r packetRun) {
	t.Helper()
	const over = `
out tcp 10.244.1.11:8080 > 192.0.2.9:4000 FA seq=6 -> tcp 192.0.2.1:30080 > 192.0.2.9:4000 FA seq=6
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 FA seq=6 -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 FA seq=6
out tcp 192.0.2.1:4000 > 10.244.1.11:8080 S     -> the same
pod tcp 10.244.1.11:8080 > 192.0.2.1:4000 SA    -> the same
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 A      -> the same`
	open := []connection{
		r.open("192.0.2.9:4000", "192.0.2.1:30080"), r.open("[fd00::c000:209]:4000", "[fd00::c000:201]:30080"),
		r.lasting(t, "192.0.2.9:4000", "192.0.2.1:30053"),
	}
	for _, c := range open {
		words := map[string]string{"tcp": "S", "udp": ""}[c.protocol]
		for range 2 {
			if src, dst := c.become("out", c.own, c.backend, words); src != c.own || dst != c.backend {
				t.Errorf("somebody else's packet %s > %s becomes %s > %s", c.own, c.backend, src, dst)
			}
			if !c.lives() {
				t.Errorf("%s %s > %s has ended", c.protocol, c.client, c.service)
			}
		}
	}
	r.play(strings.TrimSpace(over))
	shift(t, r, -int(1+patience()[packetsPhaseUDP_LASTING]))
	r.play(`out udp 192.0.2.1:4000 > 10.244.1.11:5353 -> the same
pod udp 10.244.1.11:5353 > 192.0.2.1:4000 -> the same`)
}

// An open connection goes on, whatever packets come by its addresses and ports that its ends have not sent. It goes on
// from then, when it was quiet for long, and when its client begins others.
func TestFlow_forged(t *testing.T) {
	const far, farther = 400_000, 4_294_500_000
	for _, service := range []string{"203.0.113.1:80", "192.0.2.1:30080"} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			r := newPacketRun(t, sharedRows)
			s := r.sweep(patience())
			c := r.open("192.0.2.9:4000", service)
			for _, from := range []string{"the client", "the backend", "the client"} {
				for _, seq := range []uint32{far, farther, far * 1000} {
					for _, flags := range []string{"R", "RA", "FA", "F", "S", "SA", "SR", "SF", "A", "R"} {
						c.forge(from, fmt.Sprintf("%s seq=%d ack=%d", flags, seq, seq))
					}
				}
				shift(t, r, -int(2*patience()[packetsPhaseHALF_CLOSED]))
				r.pass(s)
				if !c.lives() {
					t.Fatalf("%s seems to have sent all that, and it has ended", from)
				}
			}
			for _, from := range []string{"the client", "the backend"} {
				c.forge(from, "R seq=6")
				c.become("lan", c.client, c.service, "S")
				if !c.lives() {
					t.Errorf("after a reset near the sequence of %s, a SYN ends the open connection", from)
				}
			}
			shift(t, r, -1)
			if !c.lives() {
				t.Error("it seems to be reset, and ends though its client goes on")
			}
			shift(t, r, -int(2*patience()[packetsPhaseHALF_CLOSED]))
			r.pass(s)
			if !c.lives() {
				t.Error("it seemed to be reset, went on, and ends like one that is")
			}
			r.change(strings.ReplaceAll(sharedRows, "10.244.1.11", "10.244.1.13"))
			c.become("lan", c.client, c.service, "S")
			if !c.lives() {
				t.Error("its backend has left the Service, and it ends when somebody begins anew")
			}
			c.answer("A")
			shift(t, r, -1)
			c.become("lan", c.client, c.service, "S")
			if !c.lives() {
				t.Error("its backend answers who begins anew, and it ends when somebody does so once more")
			}
			c.become("lan", c.client, c.service, "S")
			shift(t, r, -1)
			if _, backend := c.become("lan", c.client, c.service, "S"); backend != "10.244.1.13:8080" {
				t.Errorf("its backend does not answer, and who begins anew reaches %s", backend)
			}
			d := r.open("192.0.2.9:4001", service)
			d.ask("R seq=6")
			r.change(strings.ReplaceAll(sharedRows, "10.244.1.11", "10.244.1.14"))
			if d.ask("S"); d.backend != "10.244.1.14:8080" {
				t.Errorf("it was reset, its backend has left, and who begins anew reaches %s", d.backend)
			}
			d.answer("SA")
			d.ask("A ack=6")
			d.ask("R seq=6")
			d.ask("S")
			shift(t, r, -1)
			r.change(strings.ReplaceAll(sharedRows, "10.244.1.11", "10.244.1.15"))
			if d.ask("S"); d.backend != "10.244.1.15:8080" {
				t.Errorf("it was reset, its backend does not answer, and who begins anew reaches %s", d.backend)
			}
		})
	}
}

// forge sends a packet as if one of the ends did.
func (c *connection) forge(from, words string) {
	c.Helper()
	var src, dst string
	if from == "the client" {
		src, dst = c.become("lan", c.client, c.service, words)
	} else {
		src, dst = c.become("pod", c.backend, c.own, words)
	}
	c.become("out", src, dst, words)
}

// Errors are translated, and end nothing: whoever gets them knows what it has sent.
func TestFlow_forgedErrors(t *testing.T) {
	r := newPacketRun(t, sharedRows)
	s := r.sweep(patience())
	open := []connection{r.open("192.0.2.9:4000", "192.0.2.1:30080"), r.lasting(t, "192.0.2.9:4000", "203.0.113.1:53")}
	for range 20 {
		r.sent(
			"lan icmp 192.0.2.254:0 > 192.0.2.1:0 unreachable (tcp 192.0.2.1:30080 > 192.0.2.9:4000 A)",
			"lan icmp 192.0.2.254:0 > 192.0.2.1:0 port-unreachable (tcp 192.0.2.1:30080 > 192.0.2.9:4000 A)",
			"lan icmp 192.0.2.254:0 > 203.0.113.1:0 port-unreachable (udp 203.0.113.1:53 > 192.0.2.9:4000)",
			"pod icmp 10.244.1.11:0 > 192.0.2.1:0 protocol-unreachable (tcp 192.0.2.1:4000 > 10.244.1.11:8080 A)",
		)
	}
	waitTick(t)
	r.pass(s)
	for _, c := range open {
		if !c.lives() {
			t.Errorf("%s %s > %s has ended", c.protocol, c.client, c.service)
		}
	}
}
