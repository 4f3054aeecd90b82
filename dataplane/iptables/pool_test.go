package iptables

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// TestChooser_exact computes with which probability each backend is chosen: its share of the weights, but for
// the 31st bit at each choice, by few tests.
func TestChooser_exact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 2, 3, 10, maxRow, maxRow + 1, 100, 1000, 5000, 20_000} {
		for _, weighted := range []bool{false, true} {
			var backends []model.Backend
			sum := 0
			for i := range n {
				b := model.Backend{Weight: 1}
				if weighted {
					b.Weight = uint16(1 + random.IntN(math.MaxUint16))
				}
				b.Addr, b.Port = netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80
				sum += int(b.Weight)
				backends = append(backends, b)
			}
			chains := map[string][]rule{}
			c := newChooser(hashed("pool"), model.Pool{}, n)
			c.protocol, c.edit = model.TCP, func(chain string, rules []rule) { chains[chain] = rules }
			chains[""] = c.choice(backends)
			chosen := map[netip.AddrPort]float64{}
			tests := expectedTests(chains, "", 1, chosen)
			for _, b := range backends {
				want := float64(b.Weight) / float64(sum)
				if difference := math.Abs(chosen[b.AddrPort()] - want); difference > 1e-8 {
					t.Errorf("%d backends, weighted: %t: %s is chosen with %g, want %g", n, weighted, b.AddrPort(), chosen[b.AddrPort()], want)
				}
			}
			if limit := 7 + 5*math.Log(float64(n))/math.Log(fanOut); tests > limit {
				t.Errorf("%d backends, weighted: %t: %.1f rules on average, more than %.1f", n, weighted, tests, limit)
			}
		}
	}
}

// TestChooser_stable replaces a backend of very many. That changes the chains that lead to either one, and no others.
func TestChooser_stable(t *testing.T) {
	var backends []model.Backend
	for i := range 5001 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 11), byte(i >> 3), byte(i * 31)})
		backends = append(backends, model.Backend{Addr: a, Port: 80, Weight: 1})
	}
	chainsOf := func(backends []model.Backend) map[string][]rule {
		chains := map[string][]rule{}
		c := newChooser(hashed("pool"), model.Pool{}, len(backends))
		c.edit = func(chain string, rules []rule) { chains[chain] = rules }
		chains[""] = c.choice(backends)
		return chains
	}
	was, is := chainsOf(backends[1:]), chainsOf(backends[:5000])
	changed := 0
	for chain, rules := range is {
		if !slices.Equal(rules, was[chain]) {
			changed++
		}
	}
	if all := len(is); changed > 2*maxLevels+1 || all < 300 {
		t.Errorf("%d of %d chains have changed, want %d at most", changed, all, 2*maxLevels+1)
	}
}

// TestChooser_chosen has backends whose addresses would all go to one chain.
func TestChooser_chosen(t *testing.T) {
	var backends []model.Backend
	for i := 0; len(backends) < 3000; i++ {
		a := netip.AddrFrom4([4]byte{byte(10 + i>>24), byte(i >> 16), byte(i >> 8), byte(i)})
		b := model.Backend{Addr: a, Port: 80, Weight: 1}
		if p := locate([]model.Backend{b})[0].parts; p[0]%fanOut == 0 && p[1]%fanOut == 0 && p[2]%fanOut == 0 {
			backends = append(backends, b)
		}
	}
	longest := 0
	c := newChooser(hashed("pool"), model.Pool{}, len(backends))
	c.edit = func(_ string, rules []rule) { longest = max(longest, len(rules)) }
	c.choice(backends)
	if longest > uneven*maxRow {
		t.Errorf("a chain has %d rules", longest)
	}
}

// expectedTests adds up with which probability backends are chosen, and returns how many rules that takes.
func expectedTests(chains map[string][]rule, chain string, p float64, chosen map[netip.AddrPort]float64) (tests float64) {
	for _, r := range chains[chain] {
		tests += p
		taken := p
		if r.chance != 0 {
			taken = p * float64(r.chance) / certain
		}
		if r.do.verb == dnat {
			chosen[r.do.to] += taken
		} else {
			tests += expectedTests(chains, r.do.name, taken, chosen)
		}
		p -= taken
	}
	return tests
}
