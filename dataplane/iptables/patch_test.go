package iptables

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/xtables"
)

// emptyTable is table nat as a kernel hands it out that has no rules.
func emptyTable(t testing.TB, v6 bool) *blob {
	t.Helper()
	e, info := entryEncoder{v6: v6, b: make([]byte, xtables.Header)}, xtables.Info{}
	for h, name := range xtables.HookNames {
		if name == "FORWARD" {
			continue
		}
		info.ValidHooks |= 1 << h
		info.Hooks[h] = uint32(len(e.b) - xtables.Header)
		info.Underflows[h] = info.Hooks[h]
		e.verdict(xtables.Accept)
	}
	e.head(xtables.ErrorTarget)
	b, err := parseBlob(tableID{v6, "nat"}, info, e.b)
	check(t, err)
	return b
}

// dice makes changes of a table at random.
type dice struct {
	*rand.Rand
	v6     bool
	chains map[string][]rule // that there are
}

func (d *dice) name() string { return fmt.Sprintf("KUBE-PODS-%03d", d.IntN(200)) }

func (d *dice) rules(upTo int) (rules []rule) {
	a := netip.MustParseAddr("192.0.2.1")
	if d.v6 {
		a = netip.MustParseAddr("2001:db8::1")
	}
	names := slices.Sorted(maps.Keys(d.chains))
	for range d.IntN(upTo) {
		r := rule{protocol: model.TCP, do: target{verb: dnat, to: netip.AddrPortFrom(a, uint16(d.IntN(1<<16)))}}
		switch d.IntN(3) {
		case 0:
			r.comment = fmt.Sprint("rule ", d.IntN(1000))
		case 1:
			if len(names) > 0 {
				r.do = goes(names[d.IntN(len(names))])
			}
		}
		rules = append(rules, r)
	}
	return rules
}

// change sets some chains, and takes away such to which nothing leads any more.
func (d *dice) change(id tableID) *change {
	c := &change{table: id, set: map[string][]rule{}, known: map[string]bool{}}
	for range d.IntN(8) {
		name := d.name()
		c.set[name] = d.rules(6)
		_, c.known[name] = d.chains[name]
	}
	maps.Copy(d.chains, c.set)
	used := map[string]bool{}
	for _, rules := range d.chains {
		for _, r := range rules {
			used[r.do.chainName()] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.chains)) {
		if _, set := c.set[name]; !set && !used[name] && d.IntN(20) == 0 {
			c.gone = append(c.gone, name)
			delete(d.chains, name)
		}
	}
	return c
}

// A blob that is patched again and again is the one that would be made from nothing.
func TestBlob_patch(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		d := &dice{rand.New(rand.NewPCG(sample.Seed(t), 0)), v6, map[string][]rule{}}
		b := emptyTable(t, v6)
		first := &change{table: b.id, set: map[string][]rule{chainIn: nil}, add: []baseRule{{"PREROUTING", rule{do: jumpTo(chainIn)}}}}
		b, err := b.after(first, nil)
		check(t, err)
		for i := range 500 {
			c := d.change(b.id)
			want, err := b.changed(c, nil)
			check(t, err)
			check(t, b.patch(c, nil))
			if err := same(b, want); err != nil {
				t.Fatalf("IPv6 %t: change %d: %v", v6, i, err)
			}
		}
		if len(d.chains) < 10 {
			t.Errorf("IPv6 %t: only %d chains in the end", v6, len(d.chains))
		}
	}
}

// same says what differs between two blobs.
func same(got, want *blob) error {
	if !bytes.Equal(got.raw[xtables.Header:], want.raw[xtables.Header:]) {
		return fmt.Errorf("%d bytes differ from %d", len(got.raw), len(want.raw))
	}
	rows := func(b *blob) (rows []string) {
		for _, s := range b.segments {
			rows = append(rows, fmt.Sprint(s.name, s.offset, len(s.bytes), s.entries, s.first, b.byName[s.name] == s))
		}
		return append(rows, fmt.Sprint(b.Info, b.foreign, b.ordered, b.kept))
	}
	if g, w := rows(got), rows(want); !slices.Equal(g, w) {
		return fmt.Errorf("segments\n%s\nwant\n%s", g, w)
	}
	return nil
}

// What leads to a chain that is not there is refused before the kernel sees it.
func TestBlob_patchRefused(t *testing.T) {
	there := map[string][]rule{"KUBE-PODS-A": {{do: goes("KUBE-PODS-B")}}, "KUBE-PODS-B": nil}
	for name, c := range map[string]*change{
		"a rule to a chain that there is not":     {set: map[string][]rule{"KUBE-PODS-A": {{do: goes("KUBE-PODS-C")}}}},
		"a chain goes to which another one leads": {gone: []string{"KUBE-PODS-B"}},
	} {
		b, err := emptyTable(t, false).changed(&change{set: there}, nil)
		check(t, err)
		if err := b.patch(c, nil); !refused(err) {
			t.Errorf("%s: %v, want it refused", name, err)
		}
	}
}
