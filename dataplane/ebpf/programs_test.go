package ebpf

import (
	"fmt"
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/model"
)

// The kernel takes the programs whatever it can do.
func TestProgram(t *testing.T) {
	lack.Need(t, lack.Root)
	retvals := []bool{false}
	if features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil { // Linux 5.18
		retvals = append(retvals, true)
	}
	for _, retval := range retvals {
		for _, netns := range []uint64{0, 7} {
			p := &Plane{hasSetRetval: retval, netns: netns}
			c, err := p.loadSockets(newSet(t, model.NewState()).sets)
			if err != nil {
				t.Errorf("retval %t, netns %d: %+v", retval, netns, err)
				continue
			}
			t.Logf("outcomes of sockets: %t", p.cannotTell == nil)
			c.Close()
		}
	}
}

// Slots and their aliases give the shares that the weights ask for.
func TestFill(t *testing.T) {
	for _, weights := range [][]uint16{{1}, {1, 1, 1}, {1, 2}, {7, 1, 1, 1}, {65535, 1}, {3, 3, 5, 9, 1, 100, 2}} {
		backends, total := []model.Backend{}, 0.0
		for i, w := range weights {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)
			backends = append(backends, model.Backend{Addr: a.Addr(), Port: a.Port(), Weight: w})
			total += float64(w)
		}
		slots := make([]objectsSlot, len(weights))
		fill(slots, backends)
		got := make([]float64, len(weights))
		for i, s := range slots {
			keeps := (float64(s.Share) + 1) / (1 << 32)
			if s.Share != math.MaxUint32 {
				keeps = float64(s.Share) / (1 << 32)
			}
			got[i] += keeps
			got[s.Alias] += 1 - keeps
		}
		for i, w := range weights {
			if want := float64(w) / total * float64(len(weights)); math.Abs(got[i]-want) > 1e-6 {
				t.Errorf("%v: backend %d gets %v of a slot, not %v", weights, i, got[i], want)
			}
		}
	}
}

// Ranges do not overlap, and those that were given back are used again.
func TestSpans(t *testing.T) {
	s := newSpans(1000)
	owner := map[uint32]string{}
	take := func(name string, n uint32) uint32 {
		first, ok := s.take(n)
		if !ok {
			t.Fatalf("no room for %s", name)
		}
		for i := first; i < first+n; i++ {
			if owner[i] != "" {
				t.Fatalf("%s and %s share %d", owner[i], name, i)
			}
			owner[i] = name
		}
		return first
	}
	for round := range 20 {
		firsts := map[uint32]uint32{}
		for n := uint32(1); n < 30; n++ {
			firsts[n] = take(fmt.Sprintf("%d in round %d", n, round), n)
		}
		for n, first := range firsts {
			s.discard(first, n)
			for i := first; i < first+n; i++ {
				delete(owner, i)
			}
		}
		s.settle()
	}
	if _, ok := s.take(1000); ok {
		t.Error("there is more than was given")
	}
}
