package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"fairlead.dev/fairlead/model"
)

// find follows the rules for a destination and returns where it ends.
func find(chains map[string][]rule, chain string, k model.Key) string {
	for _, r := range chains[chain] {
		if r.dst.IsValid() && !r.dst.Contains(k.Addr) || r.protocol != 0 && r.protocol != k.Protocol ||
			r.ports != (ports{}) && (k.Port < r.ports.first || k.Port > r.ports.last) {
			continue
		}
		if _, ok := chains[r.do.name]; ok {
			return find(chains, r.do.name, k)
		}
		return r.do.name
	}
	return ""
}

// TestDispatch_changes compares a tree after each of many random changes with one that is made at once, and
// looks destinations up in it.
func TestDispatch_changes(t *testing.T) {
	high := false // there were prefixes without chains
	for seed := range uint64(24) {
		random := rand.New(rand.NewPCG(seed, 1))
		v6 := seed%3 == 0
		width := 1 + random.IntN(16)
		address := func() netip.Addr {
			b := netip.MustParseAddr("fd00::a60:0").As16()
			n := random.IntN(1 << width)
			b[14], b[15] = byte(n>>8), byte(n)
			if random.IntN(20) == 0 {
				b[12] = byte(random.IntN(256))
			}
			if seed%4 == 0 {
				b = branch(b, random.IntN(128))
			}
			if v6 {
				return netip.AddrFrom16(b)
			}
			return netip.AddrFrom4([4]byte(b[12:]))
		}
		wanted := map[model.Key][]rule{}
		d := newDispatch(v6, chainServices, "KUBE-IP-")
		kernel := map[string][]rule{}
		for range 25 {
			change := map[model.Key][]rule{}
			for range 1 + random.IntN(1+int(seed)) {
				k := model.Key{Addr: address(), Protocol: model.TCP, Port: uint16(1 + random.IntN(65535))}
				if random.IntN(3) == 0 {
					k.Protocol = model.UDP
				}
				change[k] = []rule{{protocol: k.Protocol, ports: ports{k.Port, k.Port}, do: goes(fmt.Sprint("to ", random.IntN(3)))}}
				if random.IntN(4) == 0 { // the same port on several addresses, many ports on one
					for range 10 {
						k.Addr = address()
						change[k] = change[model.Key{Addr: k.Addr, Protocol: k.Protocol, Port: k.Port}]
						if change[k] == nil {
							change[k] = []rule{{protocol: k.Protocol, ports: ports{k.Port, k.Port}, do: goes("shared")}}
						}
					}
				}
			}
			for k := range wanted {
				if random.IntN(10) == 0 {
					change[k] = nil
				}
			}
			for k, rules := range change {
				if wanted[k] = rules; rules == nil {
					delete(wanted, k)
				}
			}
			e := newEdit()
			d.change(change, e)
			e.settle()
			maps.Copy(kernel, e.set)
			maps.DeleteFunc(kernel, func(chain string, _ []rule) bool { return e.gone[chain] })
			compareDispatch(t, seed, v6, wanted, kernel)
			high = high || slices.Max(append(slices.Collect(maps.Values(d.addresses.heights)), 0)) > maxAddresses+2
			if n := longestWay(kernel, chainServices); n > mostChains {
				t.Fatalf("seed %d: a way through %d chains", seed, n)
			}
		}
	}
	if !high {
		t.Error("no tree was high")
	}
}

func compareDispatch(t *testing.T, seed uint64, v6 bool, wanted map[model.Key][]rule, kernel map[string][]rule) {
	t.Helper()
	fresh := newDispatch(v6, chainServices, "KUBE-IP-")
	e := newEdit()
	fresh.change(wanted, e)
	if len(wanted) == 0 {
		e.set[chainServices] = nil
	}
	if !reflect.DeepEqual(printed(kernel), printed(e.set)) {
		t.Fatalf("seed %d: changes led to\n%v\nbut at once it is\n%v", seed, printed(kernel), printed(e.set))
	}
	for k, rules := range wanted {
		if got := find(kernel, chainServices, k); got != rules[0].do.name {
			t.Fatalf("seed %d: %v leads to %q, want %q", seed, k, got, rules[0].do.name)
		}
	}
	for name, rules := range kernel {
		if name == chainServices || begins(name, portsPrefix) {
			continue // a root has the rules of all prefixes that have no chain
		}
		if len(rules) > 1<<stride*maxHere*maxPorts+1 {
			t.Errorf("seed %d: chain %s has %d rules", seed, name, len(rules))
		}
		if len(name) > 28 {
			t.Errorf("chain %s has too long a name", name)
		}
	}
}

func printed(chains map[string][]rule) (lines []string) {
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		lines = append(lines, fmt.Sprintf("%s: %s\n", name, chains[name]))
	}
	return lines
}

// branch is an address that shares so many bits with another one, and then differs.
func branch(b [16]byte, bits int) [16]byte {
	b[bits/8] ^= 0x80 >> (bits % 8)
	return b
}

// mostChains is through how many chains a packet may go to find its row: the kernel takes sixteen on the whole way.
const mostChains = 1 + maxAddresses + 1 + maxPortRanges

// longestWay is through how many chains a packet may go from one on.
func longestWay(chains map[string][]rule, chain string) (n int) {
	for _, r := range chains[chain] {
		if _, ok := chains[r.do.name]; ok {
			n = max(n, longestWay(chains, r.do.name))
		}
	}
	return n + 1
}

// deepCase adds destinations, most of which make long ways.
type deepCase struct {
	rules int // of a chain at most
	make  func(add func(b [16]byte, port uint16))
}

func deepCases() map[string]deepCase {
	base := netip.MustParseAddr("2001:db8::a60:0").As16()
	random := rand.New(rand.NewPCG(1, 1))
	return map[string]deepCase{
		"each a bit longer": {200, func(add func([16]byte, uint16)) {
			for n := range 128 {
				for i := range 16 {
					b := branch(base, n)
					b[15] = byte(i)
					add(b, 80)
				}
			}
		}},
		"two ways at each stride": {1200, func(add func([16]byte, uint16)) {
			for n := range 1 << 13 {
				b := base
				for i := range 13 {
					if n>>i&1 != 0 {
						b = branch(b, 80+stride*i)
					}
				}
				add(b, 80)
			}
		}},
		"random": {200, func(add func([16]byte, uint16)) {
			for range 20_000 {
				b := base
				b[13], b[14], b[15] = byte(random.IntN(16)), byte(random.IntN(256)), byte(random.IntN(256))
				add(b, uint16(1+random.IntN(65535)))
			}
		}},
		"all ports": {600, func(add func([16]byte, uint16)) {
			for i := range 65535 {
				add(base, uint16(1+i))
			}
		}},
		"ports at the end of the longest prefixes": {300, func(add func([16]byte, uint16)) {
			for n := range 128 {
				for i := range 2000 {
					if b := branch(base, n); n < 12 || i%100 == 0 {
						add(b, uint16(30000+i))
					}
				}
			}
		}},
	}
}

// TestDispatch_depth has what makes long ways: prefixes, of addresses and of ports, each a bit longer than the last one.
// However many there are, no way has too many chains, and no chain has so many rules that finding the row takes long.
func TestDispatch_depth(t *testing.T) {
	for name, c := range deepCases() {
		for _, v6 := range []bool{false, true} {
			wanted := map[model.Key][]rule{}
			c.make(func(b [16]byte, port uint16) {
				k := model.Key{Addr: netip.AddrFrom16(b), Protocol: model.TCP, Port: port}
				if !v6 {
					k.Addr = netip.AddrFrom4([4]byte(b[12:]))
				}
				wanted[k] = []rule{{protocol: k.Protocol, ports: ports{port, port}, do: goes(fmt.Sprint("to ", k))}}
			})
			d, e := newDispatch(v6, chainServices, "KUBE-IP-"), newEdit()
			d.change(wanted, e)
			chains := e.settle().set
			if n := longestWay(chains, chainServices); n > mostChains {
				t.Errorf("%s, IPv6 %t: a way through %d chains, more than %d", name, v6, n, mostChains)
			}
			most := 0
			for _, rules := range chains {
				most = max(most, len(rules))
			}
			if most > c.rules {
				t.Errorf("%s, IPv6 %t: a chain of %d rules, more than %d", name, v6, most, c.rules)
			}
			for k, rules := range wanted {
				if got := find(chains, chainServices, k); got != rules[0].do.name {
					t.Fatalf("%s: %v leads to %q, want %q", name, k, got, rules[0].do.name)
				}
			}
		}
	}
}

// TestDispatch_names: chains of the ports of different addresses must not be the same.
func TestDispatch_names(t *testing.T) {
	d := newDispatch(false, chainServices, "KUBE-IP-")
	names := map[string]netip.Addr{}
	for i := range 200_000 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		_, ports := d.portTree(a)
		name := ports.name(at{rowKey(model.TCP, 0), 8})
		if other, ok := names[name]; ok {
			t.Fatalf("%s and %s have chain %s", a, other, name)
		}
		names[name] = a
	}
}
