package ebpf

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// Rows come and go anywhere. Packets to their addresses, and to those beside them, meet what the model says. When most
// rows have gone, the programs do not look for rows in their regions any more.
func TestRegions(t *testing.T) {
	chance := seeded(t)
	r := newPacketRun(t, "")
	s := r.rows
	for range 12 {
		next := scatter(chance, s)
		if err := r.tables.apply(next, model.Diff(s, next)); err != nil {
			t.Fatal(err)
		}
		s = next
		for _, a := range around(s) {
			r.expectVerdict(s, netip.AddrPortFrom(a, 80))
		}
	}
	empty := model.NewState()
	if err := r.tables.apply(empty, model.Diff(s, empty)); err != nil {
		t.Fatal(err)
	}
	for _, a := range around(s) {
		r.expectVerdict(empty, netip.AddrPortFrom(a, 80))
	}
	if n := r.tables.regions.marked(); n != 0 {
		t.Errorf("there is no row, and %d regions are said to have some", n)
	}
}

// A cleared bit hides rows, and audits report these.
func TestRegions_audit(t *testing.T) {
	r := newPacketRun(t, "frontend 10.96.0.10:80/tcp any reject default/web:none\nguard 10.97.0.0/16 drop\n")
	for _, want := range []int{0, 2} {
		drifts, err := r.tables.audit(r.rows, true)
		if err != nil {
			t.Fatal(err)
		}
		if len(drifts) != want {
			t.Errorf("%d drifts, want %d: %v", len(drifts), want, drifts)
		}
		clear(r.tables.regions)
	}
}

// A guard of more addresses than there are regions concerns all.
func TestRegions_all(t *testing.T) {
	for _, prefix := range []string{"0.0.0.0/0", "32.0.0.0/3", "2000::/3"} {
		r := make(regions, int(packetsRegionREGIONS)/64)
		r.add(netip.MustParsePrefix(prefix))
		if n := r.marked(); n != int(packetsRegionREGIONS) {
			t.Errorf("%s: %d regions", prefix, n)
		}
	}
}

func (r regions) marked() (n int) {
	for _, word := range r {
		n += bits.OnesCount64(word)
	}
	return n
}

// scatter takes most rows away and makes new ones, in both families.
func scatter(chance *rand.Rand, s *model.State) *model.State {
	next := s.Clone()
	for key := range next.Frontends {
		if chance.IntN(4) > 0 {
			delete(next.Frontends, key)
		}
	}
	for prefix := range next.Guards {
		if chance.IntN(4) > 0 {
			delete(next.Guards, prefix)
		}
	}
	for range 20 {
		key := model.Key{Addr: anyAddr(chance), Port: 80, Protocol: model.TCP}
		next.Frontends[key] = model.Frontend{Service: "default/none:http", Verdict: model.Reject}
		host := anyAddr(chance)
		next.Guards[netip.PrefixFrom(host, host.BitLen())] = model.Reject
	}
	for range 3 {
		a := anyAddr(chance)
		next.Guards[netip.PrefixFrom(a, a.BitLen()-1-chance.IntN(20)).Masked()] = model.Drop
	}
	return next
}

// anyAddr is one from outside, or of a network of which many are.
func anyAddr(chance *rand.Rand) netip.Addr {
	a := [4]byte{10, byte(96 + chance.IntN(2)), byte(chance.Uint32()), byte(chance.Uint32())}
	if chance.IntN(3) == 0 {
		a[0], a[1] = byte(1+chance.IntN(99)), byte(chance.Uint32())
	}
	if chance.IntN(2) == 0 {
		return netip.AddrFrom4(a)
	}
	b := [16]byte{0: 0xfd, 7: byte(chance.IntN(3)), 15: 1}
	copy(b[11:], a[:])
	return netip.AddrFrom16(b)
}

// around are the addresses that rows are about, and those beside them.
func around(s *model.State) (out []netip.Addr) {
	add := func(first, last netip.Addr) { out = append(out, first.Prev(), first, last, last.Next()) }
	for key := range s.Frontends {
		add(key.Addr, key.Addr)
	}
	for p := range s.Guards {
		add(p.Addr(), lastOf(p))
	}
	return slices.DeleteFunc(out, func(a netip.Addr) bool { return !a.IsValid() })
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// expectVerdict sends a packet that begins a connection. No row of these forwards.
func (r packetRun) expectVerdict(s *model.State, to netip.AddrPort) {
	r.Helper()
	from := netip.MustParseAddr("192.0.2.9")
	if to.Addr().Is6() {
		from = netip.MustParseAddr("2001:db8::9")
	}
	in, err := parsePacket(fmt.Sprintf("tcp %s > %s S", netip.AddrPortFrom(from, 4000), to))
	if err != nil {
		r.Fatal(err)
	}
	have := map[string]model.Verdict{"the same": model.Pass, "dropped": model.Drop}
	got, known := have[r.through("lan", in)]
	if !known {
		got = model.Reject
	}
	want := s.Lookup(model.Packet{Protocol: model.TCP, Source: from, Destination: to, Interface: "eth0"}).Verdict
	if got != want {
		r.Errorf("%s: %s, want %s", in, got, want)
	}
}
