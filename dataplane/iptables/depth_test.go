package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// TestPlane_deep has what makes the longest ways through chains: nf_tables takes sixteen of them.
func TestPlane_deep(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := deepState()
		check(t, s.Validate())
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		for i, f := range p.families {
			t.Logf("%d: %d chains in nat, %d in filter", i, len(f.known[nat]), len(f.known[filter]))
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
	})
}

// deepState has thousands of Services, each with a NodePort on several addresses, allowed sources and scopes, and
// pools with affinity, one of them large. Other addresses share ever more bits with those of the NodePorts.
func deepState() *model.State {
	random := rand.New(rand.NewPCG(1, 1))
	s := model.NewState()
	nodes := []string{"192.0.2.1", "10.0.0.1", "172.17.0.1", "2001:db8::1", "fd00:10::1"}
	for i := range 3000 {
		for _, v6 := range []bool{false, true} {
			id := model.PoolID{Service: fmt.Sprintf("default/s%d:", i), V6: v6}
			allow := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
			address := netip.AddrFrom4([4]byte{10, 96 + byte(random.IntN(4)), byte(random.IntN(256)), byte(random.IntN(256))})
			backend := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, byte(n >> 8), byte(n)}) }
			if v6 {
				allow = []netip.Prefix{netip.MustParsePrefix("2001:db8:1::/48")}
				a := netip.MustParseAddr("2001:db8:9::").As16()
				for j := 8; j < 16; j++ {
					a[j] = byte(random.IntN(256))
				}
				address = netip.AddrFrom16(a)
				backend = func(n int) netip.Addr {
					return netip.AddrFrom16([16]byte{0xfd, 1, 14: byte(n >> 8), 15: byte(n)})
				}
			}
			f := model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.Always, Allow: allow}
			s.Frontends[model.Key{Addr: address, Port: uint16(1 + i), Protocol: model.TCP}] = f
			s.Guards[host(address)] = model.Reject
			for _, n := range nodes {
				if a := netip.MustParseAddr(n); a.Is6() == v6 {
					port := uint16(30000 + random.IntN(2768))
					k := model.Key{Addr: a, Port: port, Protocol: model.TCP}
					s.Frontends[k] = f
					k.Scope = model.Internal
					s.Frontends[k] = f
					if i < 16 {
						addBranches(s, a, i, f)
					}
				}
			}
			pool := model.Pool{Affinity: 0}
			count := 2
			if i == 0 {
				count = 1000
			}
			for e := range count {
				pool.Backends = append(pool.Backends, model.Backend{Addr: backend(e), Port: 80, Local: true, Weight: 1})
			}
			if i < 3 {
				pool.Affinity = 1e9
			}
			s.Pools[id] = pool
		}
	}
	return s
}

// addBranches adds addresses that share so many bits with another one, from none to all, and then differ.
func addBranches(s *model.State, a netip.Addr, i int, f model.Frontend) {
	for bit := range a.BitLen() - 4 {
		b := a.As16()
		b[15] ^= byte(i)
		b = branch(b, 128-a.BitLen()+bit)
		k := model.Key{Addr: netip.AddrFrom16(b), Port: 80, Protocol: model.TCP}
		if a.Is4() {
			k.Addr = netip.AddrFrom4([4]byte(b[12:]))
		}
		s.Frontends[k] = f
	}
}
