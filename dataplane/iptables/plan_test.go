package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// The chains that are laid out quickly are those of a layout from nothing, whatever came and went before. Only the
// chains of pools and of allowed sources are missing.
func TestLayout_quickly(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	full, empty := deepState(), model.NewState()
	for _, v6 := range []bool{false, true} {
		grown := newLayout(v6, dataplane.DefaultMark, Options{})
		grown.all(empty)
		grown.take()
		before := empty
		for range 2 {
			now := some(full, random)
			grown.apply(now, model.Diff(before, now))
			grown.take()
			before = now
			fresh := newLayout(v6, dataplane.DefaultMark, Options{})
			fresh.recorded = grown.recorded
			fresh.all(now)
			edits := fresh.take()
			for n, quickly := range grown.quickly(now) {
				all := edits[n].set
				maps.DeleteFunc(all, func(name string, _ []rule) bool { return begins(name, ofPools()...) })
				if len(quickly[chainInternal]) == 0 { // in the other one it is not there at all
					delete(quickly, chainInternal)
				}
				if want, got := fmt.Sprint(all), fmt.Sprint(quickly); got != want {
					t.Fatalf("IPv6 %t: table %s:\n%s\nwant\n%s", v6, tableNames[n], got, want)
				}
			}
		}
	}
}

func ofPools() []string {
	return []string{kindPods, kindLocal, kindAffinity, kindKnown, kindLimit, "KUBE-PART-"}
}

// some has a random half of the rows.
func some(all *model.State, random *rand.Rand) *model.State {
	s := all.Clone()
	maps.DeleteFunc(s.Frontends, func(model.Key, model.Frontend) bool { return random.IntN(2) == 0 })
	return s
}
