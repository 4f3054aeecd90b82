package xt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
)

func own(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }

// rule appends one that is told apart by a number, and returns it in words: where it leads, or that it returns.
func rule(r *Rules, number uint32, to string) string {
	binary.NativeEndian.PutUint32(r.Begin(), number)
	switch to {
	case "":
		r.Verdict(Return)
	case Next:
		r.Verdict(len(r.B) - Header + verdictTarget)
	default:
		r.Jump(to)
	}
	return fmt.Sprintf("%d %s", number, to)
}

// words are what a table says, chain by chain, and the numbers of all entries.
func words(t *Table) (chains []string, numbers []uint32) {
	for _, c := range t.Chains {
		chain := c.Name
		for e := range t.Entries(c) {
			number := binary.NativeEndian.Uint32(e.Bytes)
			numbers = append(numbers, number)
			if number != 0 {
				chain += fmt.Sprintf(", %d %s", number, e.To)
			}
		}
		chains = append(chains, chain)
	}
	return chains, numbers
}

// startTable is table nat as the kernel hands it out where iptables has sorted it: a chain of the caller comes first.
func startTable(t testing.TB, v6 bool) *Table {
	t.Helper()
	r, info := &Rules{Layout: LayoutOf(v6), B: make([]byte, Header)}, Info{}
	for h, name := range HookNames {
		info.Hooks[h], info.Underflows[h] = noHook, noHook
		if name == "FORWARD" {
			continue
		}
		info.ValidHooks |= 1 << h
		info.Hooks[h] = uint32(len(r.B) - Header)
		if name == "OUTPUT" {
			rule(r, 1, "")
			rule(r, 2, Next)
			rule(r, 3, "")
		}
		info.Underflows[h] = uint32(len(r.B) - Header)
		r.Begin()
		r.Verdict(Accept)
	}
	for _, chain := range []string{"KUBE-OLD", "SITE-B", "SITE-A"} {
		r.head(chain)
		rule(r, uint32(r.n), "")
		rule(r, uint32(r.n), Next)
		r.Begin()
		r.Verdict(Return)
	}
	r.head(errorTarget)
	info.Number, info.Size = uint32(r.n), uint32(len(r.B)-Header)
	return parsed(t, v6, info, r.B)
}

func parsed(t testing.TB, v6 bool, info Info, raw []byte) *Table {
	t.Helper()
	table, err := Parse(LayoutOf(v6), info, raw, own)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// dice makes changes of a table at random, and keeps account of what it should say.
type dice struct {
	*rand.Rand
	v6     bool
	number uint32
	others []string // chains, in their order
	rules  map[string][]string
}

func newDice(t *testing.T, v6 bool, table *Table) *dice {
	d := &dice{Rand: rand.New(rand.NewPCG(sample.Seed(t), 0)), v6: v6, number: 1000, rules: map[string][]string{}}
	chains, _ := words(table)
	for i, c := range table.Chains {
		d.rules[c.Name] = strings.Split(chains[i], ", ")[1:]
		if !c.Own {
			d.others = append(d.others, c.Name)
		}
	}
	return d
}

func (d *dice) some(r *Rules, to []string) (rules []string) {
	for range d.IntN(6) {
		d.number++
		rules = append(rules, rule(r, d.number, to[d.IntN(len(to))]))
	}
	return rules
}

// change sets some chains, edits one of the kernel's, and deletes chains to which nothing leads any more.
func (d *dice) change(t *Table) *Change {
	c := &Change{Set: map[string]*Rules{}, Add: map[string]*Rules{}}
	to := append(slices.Sorted(maps.Keys(d.rules)), "")
	to = slices.DeleteFunc(to, func(name string) bool { return name != "" && !own(name) })
	for range d.IntN(8) {
		name := fmt.Sprintf("KUBE-PODS-%03d", d.IntN(200))
		c.Set[name] = NewChain(t.Layout, name)
		d.rules[name] = d.some(c.Set[name], to)
	}
	if d.IntN(4) == 0 {
		d.edit(t, c, to)
	}
	used := map[string]bool{}
	for _, rules := range d.rules {
		for _, r := range rules {
			_, to, _ := strings.Cut(r, " ")
			used[to] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.rules)) {
		if c.Set[name] == nil && strings.Contains(name, "-") && !used[name] && d.IntN(20) == 0 {
			c.Gone = append(c.Gone, name)
			delete(d.rules, name)
			d.others = slices.DeleteFunc(d.others, func(o string) bool { return o == name })
		}
	}
	return c
}

// edit changes a chain of the kernel.
func (d *dice) edit(t *Table, c *Change, to []string) {
	s := t.byName[[]string{"PREROUTING", "OUTPUT"}[d.IntN(2)]]
	var kept []string
	for e := range t.Entries(s) {
		number := binary.NativeEndian.Uint32(e.Bytes)
		switch {
		case number == 0: // the policy
		case d.IntN(3) == 0:
			c.Remove = append(c.Remove, Place{s.Name, e.At})
		default:
			kept = append(kept, fmt.Sprintf("%d %s", number, e.To))
		}
	}
	c.Add[s.Name] = &Rules{Layout: t.Layout}
	d.rules[s.Name] = append(d.some(c.Add[s.Name], to), kept...)
}

func (d *dice) words() (chains []string) {
	ours := slices.DeleteFunc(slices.Sorted(maps.Keys(d.rules)), func(name string) bool { return !own(name) })
	for _, name := range slices.Concat(d.others, ours) {
		chains = append(chains, strings.Join(append([]string{name}, d.rules[name]...), ", "))
	}
	return chains
}

// A table that is changed again and again says what it should, others' chains first, and each entry that stays keeps its
// counters.
func TestTable_Apply(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		table := startTable(t, v6)
		d := newDice(t, v6, table)
		for i := range 300 {
			_, before := words(table)
			c := d.change(table)
			if err := table.Apply(c); err != nil {
				t.Fatalf("IPv6 %t: change %d: %v", v6, i, err)
			}
			got, numbers := words(table)
			again, _ := words(parsed(t, v6, table.Info, slices.Clone(table.raw)))
			if want := d.words(); !slices.Equal(got, want) || !slices.Equal(again, want) {
				t.Fatalf("IPv6 %t: change %d: have\n%s\nread again\n%s\nwant\n%s", v6, i, strings.Join(got, "\n"),
					strings.Join(again, "\n"), strings.Join(want, "\n"))
			}
			for to, from := range table.kept {
				if from != added && numbers[to] != before[from] || from == added && numbers[to] > 0 && numbers[to] <= 1000 {
					t.Fatalf("IPv6 %t: change %d: entry %d gets the counters of entry %d", v6, i, to, from)
				}
			}
		}
		if len(d.rules) < 20 {
			t.Errorf("IPv6 %t: only %d chains in the end", v6, len(d.rules))
		}
	}
}

// A rule that leads to a chain that does not exist is refused before the kernel sees it.
func TestTable_ApplyRefused(t *testing.T) {
	set := func(name, to string) map[string]*Rules {
		r := NewChain(LayoutOf(false), name)
		rule(r, 1, to)
		return map[string]*Rules{name: r}
	}
	for name, c := range map[string]*Change{
		"a new rule leads to no chain":               {Set: set("KUBE-A", "KUBE-C")},
		"a chain goes to which another one leads":    {Gone: []string{"KUBE-B"}},
		"a rule of the kernel's chain leads nowhere": {Add: set("PREROUTING", "KUBE-C")},
	} {
		table := startTable(t, false)
		first := &Change{Set: set("KUBE-A", "KUBE-B")}
		first.Set["KUBE-B"] = NewChain(table.Layout, "KUBE-B")
		if err := table.Apply(first); err != nil {
			t.Fatal(err)
		}
		var missing *MissingChain
		if err := table.Apply(c); !errors.As(err, &missing) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Jumps to where no chain begins are refused: no program makes them, and they would not follow what moves.
func TestParse_jumpIntoAChain(t *testing.T) {
	table := startTable(t, false)
	for at, e := range table.entries(table.byName["OUTPUT"]) {
		if at == 0 {
			binary.NativeEndian.PutUint32(e[table.verdictAt(e):], uint32(table.byName["SITE-A"].offset+4))
		}
	}
	if _, err := Parse(table.Layout, table.Info, bytes.Clone(table.raw), own); err == nil {
		t.Error("it is taken")
	}
}
