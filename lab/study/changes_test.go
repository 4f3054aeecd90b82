package study_test

import (
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// TestChanges has the experiments in which something changes be done once each, with few Services: all figures must be
// there, and be what they can be.
func TestChanges(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"update":    "nftables, nftables again",
		"bandwidth": "direct, nftables, userspace",
		"footprint": "nftables, nftables again, userspace",
		"jitter":    "direct, nftables, userspace",
		"rolling":   "direct, nftables, userspace",
		"switch":    "direct, nftables → userspace, userspace → nftables",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := small(t, name)
			var contenders []study.Contender
			for _, c := range study.Contenders([]string{"nftables", "userspace"}) {
				if c.Kind != study.Again && (name != "update" || c.Plane != "userspace") {
					contenders = append(contenders, c)
				}
			}
			r, err := study.Run(t.Context(), study.Options{
				Experiments: []study.Experiment{e}, Depth: study.Standard, Contenders: contenders, Rounds: 1, Dir: t.TempDir(),
				Program: []string{fairlead},
			})
			if err != nil {
				t.Fatal(err)
			}
			var all []string
			for _, row := range r.Rows {
				all = append(all, row.Contender)
				check(t, e, row)
			}
			slices.Sort(all)
			if got := strings.Join(slices.Compact(all), ", "); got != want {
				t.Errorf("%s take part instead of %s", got, want)
			}
		})
	}
}

// small is an experiment with few Services, and of its cells the second one, if it has more than one.
func small(t *testing.T, name string) study.Experiment {
	t.Helper()
	all, err := study.Choose([]string{name})
	if err != nil {
		t.Fatal(err)
	}
	e := all[0]
	cells := e.Cells(study.Standard)
	c := cells[min(1, len(cells)-1)]
	c.Cluster.Services = 40
	e.Cells = func(study.Depth) []study.Cell { return []study.Cell{c} }
	return e
}

// check looks for all figures.
func check(t *testing.T, e study.Experiment, row study.Row) {
	t.Helper()
	if row.Failed != "" {
		t.Errorf("%s: %s", row.Contender, row.Failed)
		return
	}
	for _, f := range e.Figures {
		value, there := row.Figures[f.Name]
		mayLack := f.Name == "took" && row.Contender == "direct" ||
			f.Unit == study.Seconds && row.Figures["lost share"] > 0.01
		if !there && !mayLack {
			t.Errorf("%s has no %q", row.Contender, f.Name)
		}
		// The machine's memory shrinks when others give some back. All other figures are of something that takes time or
		// room, or that is counted.
		mayBeNothing := f.Unit == study.Count || f.Unit == study.Share || f.Unit == study.BitRate || f.Name == "kernel"
		if there && !mayBeNothing && value <= 0 {
			t.Errorf("%s: %s is %g %s", row.Contender, f.Name, value, f.Unit)
		}
	}
	for name := range row.Figures {
		own := slices.ContainsFunc(e.Figures, func(f study.Figure) bool { return f.Name == name })
		if !own && !strings.HasPrefix(name, "cpu.") { // those are of all experiments
			t.Errorf("%s has %q, which nobody has described", row.Contender, name)
		}
	}
}
