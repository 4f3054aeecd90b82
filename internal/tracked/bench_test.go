package tracked_test

import (
	"net"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// BenchmarkList reads all flows of UDP, and has the kernel pass over all but those to one destination, or of one backend.
func BenchmarkList(b *testing.B) {
	const flows = 100_000
	bed := newBed(b)
	c := dialNode(b, bed)
	err := bed.Do(testbed.Node, func() error {
		for n := range flows {
			s, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 1, byte(n>>8), byte(n)), Port: 7000 + n>>16})
			if err != nil {
				return err
			}
			_, _ = s.Write([]byte("?")) // no process listens there
			if err := s.Close(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	all := tracked.Filter{Protocol: model.UDP}
	to, answers := all, all
	to.To, answers.Answers = netip.MustParseAddrPort("127.1.0.1:7000"), netip.MustParseAddrPort("127.1.0.1:7000")
	for _, x := range []struct {
		name   string
		filter tracked.Filter
	}{{"all", all}, {"to", to}, {"answers", answers}} {
		b.Run(x.name, func(b *testing.B) {
			for b.Loop() {
				if _, err := tracked.List(c, func(*tracked.Flow) bool { return false }, x.filter); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
