package nftables

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// Whatever weights are, slots are few, and a backend gets what its weight says: to the slot where weights are small, and else
// but for one connection in a hundred.
func TestSpread(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for range 2000 {
		backends := make([]model.Backend, 1+random.IntN(1<<random.IntN(9)))
		most := 1 + random.IntN(256)
		total, divisor := 0, 0
		for i := range backends {
			backends[i] = model.Backend{Addr: address(false, 10, 244, byte(i>>8), byte(i)), Port: 80, Weight: uint16(1 + random.IntN(most))}
			if random.IntN(2) == 0 {
				backends[i].Weight = uint16(most)
			}
			total, divisor = total+int(backends[i].Weight), gcd(int(backends[i].Weight), divisor)
		}
		slots := spread(backends)
		got, elements := sharesOf(slots)
		bound := max(2048, 40*len(backends))
		if elements > bound+len(backends) {
			t.Fatalf("%d elements for %d backends, at most %d are wanted: %v", elements, len(backends), bound, backends)
		}
		away := 0.0
		for _, b := range backends {
			away += math.Abs(got[b.AddrPort()]-float64(b.Weight)/float64(total)) / 2
		}
		if limit := map[bool]float64{true: 1e-9, false: 0.01}[total/divisor <= bound]; away > limit {
			t.Fatalf("%.2g of all connections go elsewhere than weights say: %v", away, backends)
		}
	}
}

// sharesOf is which part of all connections each backend gets.
func sharesOf(slots []share) (got map[netip.AddrPort]float64, elements int) {
	got = map[netip.AddrPort]float64{}
	for _, s := range slots {
		elements += s.slots
	}
	for _, s := range slots {
		got[s.AddrPort] = float64(s.slots) / float64(elements)
	}
	return got, elements
}

// Each size has a number of its own, which leaves the bits of classes free, and is at most a ninth larger than what it
// is for.
func TestSize(t *testing.T) {
	seen, last := map[uint32]size{}, size{}
	for slots := 1; slots <= 1<<21; slots++ {
		for i := range 4 {
			s := sizeOf(slots, i&1 == 1, i&2*(mostShards-1)/2)
			if s == last {
				continue
			}
			if other, taken := seen[s.id()]; taken && other != s {
				t.Fatalf("%+v and %+v have the number %#x", s, other, s.id())
			}
			seen[s.id()] = s
			if s.id()&^(sizeMask|mostShards-1) != 0 || s.slots < slots || s.slots > slots+slots/8 || s.slots > exactSizes && s.below() >= slots {
				t.Fatalf("%d slots: %+v with the number %#x, below it %d", slots, s, s.id(), s.below())
			}
		}
	}
}
