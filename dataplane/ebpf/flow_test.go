package ebpf

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
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
	if err := r.programs.Maps[packetsMapActivity].Put(uint32(0), packetsActivity{}); err != nil {
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

// Who begins a connection does not reach a backend that has left, not even from a port that had one there.
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

// What is refused is answered, and of a flood not more than so many in a second.
func TestFlow_answersBound(t *testing.T) {
	r := newPacketRun(t, "frontend 192.0.2.1:81/tcp any reject default/web:none\n"+
		"frontend 192.0.2.1:81/udp any reject default/web:none\n")
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
			dropped   bool
		}{{c.most - 1, 0, false}, {c.most, 0, true}, {c.most, 1, false}} {
			got, sent := r.afterAnswers(kind, in, x.sent, x.ago)
			if (got == "dropped") != x.dropped {
				t.Errorf("%s, %d answers %d s ago: %s", in, x.sent, x.ago, got)
			}
			want := x.sent + 1
			if x.ago > 0 {
				want = 1
			}
			if sent != want {
				t.Errorf("%s, %d answers %d s ago: counted are %d", in, x.sent, x.ago, sent)
			}
		}
	}
}

// afterAnswers sends a packet to processors that all have given so many answers in a second, and returns how many the
// one has given that got it.
func (r packetRun) afterAnswers(kind uint32, in packet, sent, ago uint64) (string, uint64) {
	r.Helper()
	m := r.programs.Maps[packetsMapAnswers]
	cpus, err := ebpf.PossibleCPU()
	for err == nil {
		before := second(r)
		values := make([][2]uint64, cpus)
		for i := range values {
			values[i] = [2]uint64{before - ago, sent}
		}
		if err = m.Put(kind, values); err != nil {
			break
		}
		got := r.through("lan", in)
		if err = m.Lookup(kind, &values); err != nil || second(r) != before { // another second began meanwhile
			continue
		}
		for _, v := range values {
			if v != [2]uint64{before - ago, sent} {
				return got, v[1]
			}
		}
		r.Fatal("nobody has counted")
	}
	r.Fatal(err)
	return "", 0
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
