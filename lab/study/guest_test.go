package study

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// In the test kernel, too, what grows with the number of Services is measured with several. Of a standard run of
// everything there is what is to be said of IPVS.
func TestGuest_sizes(t *testing.T) {
	for _, depth := range []Depth{Standard, Full} {
		here := newLab(Options{Experiments: Experiments(), Depth: depth, Contenders: everyone()}, This)
		there := newLab(here.guestOptions(time.Now()), Test)
		sizes := map[string][]int{}
		for _, g := range there.groups {
			for _, c := range g.cells {
				if !slices.Contains(sizes[c.experiment], c.Size) {
					sizes[c.experiment] = append(sizes[c.experiment], c.Size)
				}
			}
		}
		for _, e := range Experiments() {
			n := len(sizes[e.Name])
			if (n > 0) != (depth == Full || e.ForIPVS != nil) || n == 1 && e.Axis == servicesAxis {
				t.Errorf("%s: %s has the sizes %v", depth, e.Name, sizes[e.Name])
			}
		}
	}
}

func everyone() []Contender {
	all := Contenders([]string{"nftables", "iptables", "iptables-legacy", "ebpf", "userspace", "ipvs"})
	return append(all, Peers("other", "/usr/bin/other")...)
}

// A contender that cannot run also removes contenders with its data plane, or with changes to it, and no others.
func TestLab_isMissing(t *testing.T) {
	pairs, schedulers := switchExperiment(), schedulersExperiment()
	l := newLab(Options{Experiments: []Experiment{pairs, schedulers}, Depth: Standard, Contenders: everyone()}, This)
	l.journal = &journal{}
	all := names(l)
	l.missing = []Missing{{Contender: "ipvs"}}
	l.leaveOut()
	left := names(l)
	gone := slices.DeleteFunc(all, func(name string) bool { return slices.Contains(left, name) })
	const want = `ipvs dh
ipvs lc
ipvs nq
ipvs rr
ipvs sed
ipvs sh
ipvs → nftables
nftables → ipvs`
	if got := strings.Join(gone, "\n"); got != want {
		t.Errorf("left out are\n%s\nwant\n%s", got, want)
	}
}

// names are those of all contenders that have turns.
func names(l *lab) (all []string) {
	for _, g := range l.groups {
		for _, c := range l.needed(g) {
			all = append(all, c.Name)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Quickly, a program changes from and to nftables, and otherwise, if it has no nftables, between all that it has.
func TestQuickPairs(t *testing.T) {
	var got []string
	all := slices.DeleteFunc(everyone(), func(c Contender) bool {
		return c.Kind == Peer && c.Plane == nftablesPlane ||
			c.Kind == Fairlead && c.Plane != ipvsPlane && c.Plane != nftablesPlane
	})
	for _, c := range quickPairs(all) {
		got = append(got, c.Name)
	}
	const want = "[direct direct again nftables → ipvs ipvs → nftables other iptables → ipvs other ipvs → iptables]"
	if got := fmt.Sprint(got); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
