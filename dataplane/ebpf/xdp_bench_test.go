package ebpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"fairlead.dev/fairlead/lab/testbed"
)

// BenchmarkPackets is what a packet costs in each of the programs. To those of tc comes what the stack does between them,
// and an skb; the one for drivers finds route and neighbour itself. Clocks are part of every figure: "nothing" is a
// program that does nothing.
func BenchmarkPackets(b *testing.B) {
	bed := fastBed(b, testbed.Spec{})
	s := &station{packetRun: newPacketRun(b, fastRows), runs: map[string]int{}}
	s.eth0 = accelerate(b, bed, s.packetRun, "eth0")
	// Packets come from the device that test runs are said to come from, lo, whose address is zero.
	if err := s.programs.Maps[packetsMapOutside].Put(uint32(1), packetsOutlet{}); err != nil {
		b.Fatal(err)
	}
	for name, kind := range map[string]ebpf.ProgramType{"nothing/tc": ebpf.SchedCLS, "nothing/xdp": ebpf.XDP} {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
		})
		if err != nil {
			b.Fatal(err)
		}
		defer p.Close()
		b.Run(name, func(b *testing.B) { repeat(b, bed, p, make([]byte, 64)) })
	}
	for _, c := range []struct {
		name, opens, packet string
		action              uint32 // by which the program for drivers ends
	}{
		{"tcp", "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S", "tcp 192.0.2.9:4000 > 192.0.2.1:30080 A", xdpRedirect},
		{"tcp6", "tcp [fd00::c000:209]:4000 > [fd00::c000:201]:30080 S",
			"tcp [fd00::c000:209]:4000 > [fd00::c000:201]:30080 A", xdpRedirect},
		{"udp", "udp 192.0.2.9:4000 > 192.0.2.1:30053", "udp 192.0.2.9:4000 > 192.0.2.1:30053",
			xdpRedirect},
		{"answer", "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S", "tcp 10.244.2.13:8080 > 192.0.2.1:4000 A", xdpRedirect},
		{"stranger", "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S", "tcp 192.0.2.9:4000 > 192.0.2.1:22 A", xdpPass},
		{"dropped", "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S", "tcp 192.0.2.9:4000 > 203.0.113.3:80 S", xdpDrop},
	} {
		arrives, leaves := s.frames(b, bed, c.opens, c.packet)
		do(b, bed, testbed.Node, func() error {
			action, err := s.programs.Programs[packetsProgFromOutside].Run(&ebpf.RunOptions{Data: arrives})
			if action != c.action {
				b.Errorf("%s: action %d; want %d", c.name, action, c.action)
			}
			return err
		})
		for _, p := range []struct {
			name, program string
			frame         []byte
		}{
			{"ingress", packetsProgFromAnywhere, arrives}, {"egress", packetsProgLeave, leaves},
			{"xdp", packetsProgFromOutside, arrives},
		} {
			b.Run(c.name+"/"+p.name, func(b *testing.B) { repeat(b, bed, s.programs.Programs[p.program], p.frame) })
		}
	}
}

// frames are the packet as it arrives and as it gets to egress, after one that begins the flow.
func (s *station) frames(b *testing.B, bed *testbed.Bed, opens, packet string) (arrives, leaves []byte) {
	b.Helper()
	do(b, bed, testbed.Node, func() error {
		if err := addNeighbours(s.eth0); err != nil {
			return err
		}
		for _, text := range []string{opens, packet} {
			p, err := parsePacket(text)
			if err != nil {
				return err
			}
			arrives = p.bytes()
			in := ebpf.RunOptions{Data: arrives, DataOut: make([]byte, 500)}
			if _, err := s.programs.Programs[packetsProgFromAnywhere].Run(&in); err != nil {
				return err
			}
			leaves = in.DataOut
		}
		return nil
	})
	return arrives, leaves
}

// repeat runs a program once for each packet, for it changes what it is given. The kernel says how long that took.
func repeat(b *testing.B, bed *testbed.Bed, p *ebpf.Program, frame []byte) {
	var total time.Duration
	do(b, bed, testbed.Node, func() error {
		for b.Loop() {
			_, took, err := p.Benchmark(frame, 1, nil)
			if err != nil {
				return err
			}
			total += took
		}
		return nil
	})
	b.ReportMetric(float64(total.Nanoseconds())/float64(b.N), "ns/packet")
}
