package nft

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

func TestFlatten_agreesWithLookup(t *testing.T) {
	r := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for range 200 {
		s := model.NewState()
		for range r.IntN(8) {
			a := address(10, byte(r.IntN(2)), byte(r.IntN(2)), byte(r.IntN(4)))
			p, _ := a.Prefix(r.IntN(32))
			s.Guards[p] = model.Reject + model.Verdict(r.IntN(2))
		}
		spans := Flatten(s.Guards, Families[0])
		for range 50 {
			a := address(byte(9+r.IntN(3)), byte(r.IntN(3)), byte(r.IntN(3)), byte(r.IntN(6)))
			want := s.Lookup(model.Packet{Protocol: model.TCP, Source: a, Destination: netip.AddrPortFrom(a, 1)}).Verdict
			got := model.Pass
			for verdict, list := range spans {
				for _, s := range list {
					if !a.Less(s.First) && !s.Last.Less(a) {
						got = verdict
					}
				}
			}
			if got != want {
				t.Fatalf("%s: %s, want %s\n%s", a, got, want, s)
			}
		}
	}
}

func address(a ...byte) netip.Addr { return netip.AddrFrom4([4]byte(a)) }
