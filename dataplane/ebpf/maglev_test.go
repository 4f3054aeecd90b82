package ebpf

import (
	"math"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/model"
)

func backendsOf(weights ...uint16) (out []model.Backend) {
	for i, w := range weights {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i / 250), byte(1 + i%250)}), 8080)
		out = append(out, model.Backend{Addr: a.Addr(), Port: a.Port(), Weight: w})
	}
	return out
}

func ones(n int) (weights []uint16) {
	for range n {
		weights = append(weights, 1)
	}
	return weights
}

// table is who has each slot.
func table(backends []model.Backend) []netip.AddrPort {
	p := model.Pool{Scheduler: "mh", Backends: backends}
	slots := make([]objectsSlot, slotsFor(p, len(backends)))
	spread(slots, p, backends)
	var owners []netip.AddrPort
	for _, s := range slots {
		owners = append(owners, s.Backend.addrPort())
	}
	return owners
}

// Each backend has its share of the slots, by weight.
func TestMaglev_shares(t *testing.T) {
	for name, weights := range map[string][]uint16{
		"one": {1}, "two": ones(2), "ten": ones(10), "many": ones(300), "weights": {1, 2, 3, 100}, "extreme": {65535, 6553, 655},
	} {
		backends, total, got := backendsOf(weights...), 0.0, map[netip.AddrPort]float64{}
		owners := table(backends)
		for _, w := range weights {
			total += float64(w)
		}
		for _, o := range owners {
			got[o]++
		}
		for i, b := range backends {
			want := float64(weights[i]) / total * float64(len(owners))
			if math.Abs(got[b.AddrPort()]-want) > 2 {
				t.Errorf("%s: backend %d has %v of %d slots, not %.1f", name, i, got[b.AddrPort()], len(owners), want)
			}
		}
	}
}

// A backend whose weight is too small for a slot counts with another one of its pool, whatever is in the slots behind.
func TestMaglev_none(t *testing.T) {
	p := model.Pool{Scheduler: "mh", Backends: backendsOf(65535, 1)}
	size := slotsFor(p, 2)
	tables := tables{slots: make([]objectsSlot, size)}
	spread(tables.slots, p, p.Backends)
	for i, b := range p.Backends {
		if at, ok := tables.firstSlots(0, p)[endpoint(b.AddrPort())]; !ok || at >= size {
			t.Errorf("backend %d counts in slot %d of %d (%t)", i, at, size, ok)
		}
	}
}

// When one of n backends goes, its clients find others, and of those of others few do: at most three in a hundred.
func TestMaglev_disruption(t *testing.T) {
	for _, n := range []int{2, 5, 10, 40, 300} {
		backends := backendsOf(ones(n)...)
		before := table(backends)
		for _, gone := range []int{0, n / 2, n - 1} {
			after := table(append(append([]model.Backend(nil), backends[:gone]...), backends[gone+1:]...))
			moved := 0
			for i := range before {
				if before[i] != backends[gone].AddrPort() && before[i] != after[i] {
					moved++
				}
			}
			if part := float64(moved) / float64(len(before)); part > 0.03 {
				t.Errorf("backend %d of %d goes, and %.1f %% of the clients of others move", gone, n, 100*part)
			}
		}
	}
}
