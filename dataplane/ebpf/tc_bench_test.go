package ebpf

import (
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkFlows is what packets cost that begin a flow, and those of others while there is none. BenchmarkPackets has
// the packets of flows that are known; clocks are part of these figures, too.
func BenchmarkFlows(b *testing.B) {
	const (
		stranger = "tcp 192.0.2.9:4000 > 192.0.2.1:22 A"
		asks     = "tcp 192.0.2.9:4000 > 192.0.2.1:22 S"
		passes   = "tcp 192.0.2.9:4000 > 198.51.100.7:22 S"
		hidden   = "tcp 192.0.2.9:4000 > 192.0.2.1:30080 S"
		kept     = "tcp 192.0.2.9:4000 > 203.0.113.1:80 S"
		refused  = "tcp 192.0.2.9:4000 > 10.96.0.10:80 S"
	)
	for _, c := range []struct {
		name, program, packet string
		idle                  bool // no flow has been there
	}{
		{"stranger/no flows/ingress", packetsProgFromAnywhere, stranger, true},
		{"stranger/no flows/egress", packetsProgLeave, stranger, true},
		{"stranger/flows/ingress", packetsProgFromAnywhere, stranger, false},
		{"stranger/flows/egress", packetsProgLeave, stranger, false},
		{"stranger begins/no flows/ingress", packetsProgFromAnywhere, asks, true},
		{"stranger begins elsewhere/no flows/ingress", packetsProgFromAnywhere, passes, true},
		{"stranger begins/flows/ingress", packetsProgFromAnywhere, asks, false},
		{"new/client kept", packetsProgFromAnywhere, kept, false},
		{"new/client hidden", packetsProgFromAnywhere, hidden, false},
		{"refused", packetsProgFromAnywhere, refused, false},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := newPacketRunWith(b, sweptRows+"guard 10.96.0.10/32 reject\n", packetOptions{Translations: 1 << 18})
			s := r.sweep(patience())
			if c.idle {
				atomic.StoreUint32(&s.activity.Busy, 0)
			} else {
				r.sent("lan tcp 198.51.100.9:4000 > 203.0.113.1:80 S")
				r.pass(s)
			}
			p, err := parsePacket(c.packet)
			if err != nil {
				b.Fatal(err)
			}
			frame := p.bytes()
			var total time.Duration
			for i := 0; b.Loop(); i++ {
				binary.BigEndian.PutUint16(frame[34:], uint16(1024+i%30000)) // the port; the checksum is not read
				binary.BigEndian.PutUint16(frame[28:], uint16(i/30000))      // of the address
				_, took, err := r.programs.Programs[c.program].Benchmark(frame, 1, nil)
				if err != nil {
					b.Fatal(err)
				}
				total += took
			}
			b.ReportMetric(float64(total.Nanoseconds())/float64(b.N), "ns/packet")
		})
	}
}

// BenchmarkSweep is a full table, of flows that are not over, looked through once.
func BenchmarkSweep(b *testing.B) {
	const places = 1 << 18
	r := newPacketRunWith(b, sweptRows, packetOptions{Translations: places})
	s := r.sweep(patience())
	for i := range uint32(places) {
		key := packetsTuple{Hook: packetsHookINGRESS, Protocol: 6}
		key.Src.Addr.Word[3] = i
		at, err := now()
		if err != nil {
			b.Fatal(err)
		}
		value := packetsTranslation{State: packetsStateANSWERED, Last: at}
		if err := s.maps[packetsMapTranslations].Put(key, value); err != nil {
			b.Fatal(err)
		}
	}
	var calls int
	for b.Loop() {
		s.swept = false
		for more := true; more; more = s.passing {
			if _, err := s.step(); err != nil {
				b.Fatal(err)
			}
			calls++
		}
	}
	b.ReportMetric(float64(s.kept), "translations")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(calls), "µs/call")
}
