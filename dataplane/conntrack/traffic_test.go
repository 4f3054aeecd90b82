package conntrack

import (
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// TestTraffic_left: however many backends a pool has had, those that it has now are counted.
func TestTraffic_left(t *testing.T) {
	s, err := model.ParseState(`
		frontend 10.96.0.10:80/tcp any forward default/web cluster snat never
		pool default/web cluster
		backend default/web cluster 10.244.1.2:80`)
	if err != nil {
		t.Fatal(err)
	}
	sums := &traffic{ended: map[way]dataplane.Sum{}, told: map[way]dataplane.Sum{}}
	end := func(backend netip.AddrPort) {
		sums.end(&tracked.Flow{
			Protocol: model.TCP, To: netip.MustParseAddrPort("10.96.0.10:80"), Answers: backend, Status: tracked.NewTo,
			Sent: tracked.Traffic{Packets: 1, Bytes: 100},
		})
	}
	rows := func() (all []dataplane.Served) {
		c := dataplane.Counters{}
		if err := sums.add(&c, kernel(t), s); err != nil {
			t.Fatal(err)
		}
		return c.Served
	}
	left, addr := uint64(0), netip.MustParseAddr("10.245.0.0")
	for range 2 {
		for range maxWays - 1 {
			addr = addr.Next()
			end(netip.AddrPortFrom(addr, 80))
			left++
		}
		if all := rows(); len(all) != 1 || all[0].Backend.IsValid() || all[0].ToBackend.Packets != left {
			t.Errorf("of %d backends that have left: %v", left, all)
		}
	}
	b := netip.MustParseAddrPort("10.244.1.2:80")
	end(b)
	if all := rows(); !slices.ContainsFunc(all, func(row dataplane.Served) bool { return row.Backend == b }) {
		t.Errorf("with one that serves: %v", all)
	}
	if n := len(sums.ended) + len(sums.told); n != 4 {
		t.Errorf("%d sums are remembered", n)
	}
}
