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
	for seed := range uint64(18) {
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
		}
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
