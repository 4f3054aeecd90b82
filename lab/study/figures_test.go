package study_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// TestFigures has each experiment done once, with few Services: every turn must give all the figures that its description
// promises, and a request that is not answered is a failure.
func TestFigures(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"connect", "rules", "lookup", "http", "schedulers"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			experiments, err := study.Choose([]string{name})
			if err != nil {
				t.Fatal(err)
			}
			r, err := study.Run(t.Context(), study.Options{
				Experiments: experiments, Depth: study.Standard, Contenders: study.Contenders([]string{"nftables"}),
				Sizes: []int{20}, Most: 100, Rounds: 1, Dir: t.TempDir(), Program: []string{fairlead},
			})
			if err != nil {
				t.Fatal(err)
			}
			want, got := promised(experiments[0]), given(r)
			if got != want {
				t.Errorf("figures:\n got %s\nwant %s", got, want)
			}
			for _, row := range r.Rows {
				if _, there := row.Figures["cpu.proxy"]; there != (row.Contender == "nftables") {
					t.Errorf("%s has a proxy's processor time: %t", row.Contender, there)
				}
			}
		})
	}
}

// TestRun_needs has a judge ask for more turns of some contenders.
func TestRun_needs(t *testing.T) {
	t.Parallel()
	experiments, err := study.Choose([]string{"lookup"})
	if err != nil {
		t.Fatal(err)
	}
	const wanted = 10
	r, err := study.Run(t.Context(), study.Options{
		Experiments: experiments, Contenders: study.Contenders([]string{"nftables"}), Sizes: []int{20}, Dir: t.TempDir(),
		Program: []string{fairlead},
		Judge: func(r *study.Result) study.Needs {
			needs := study.Needs{}
			for at, n := range countOf(r) {
				if at.Contender != "direct again" && at.Case == "last Service" {
					needs.Add(at, study.Need{Rounds: wanted - n})
				}
			}
			return needs
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for at, n := range countOf(r) {
		want := map[bool]int{true: wanted, false: 1}[at.Contender != "direct again" && at.Case == "last Service"]
		if n != want {
			t.Errorf("%s, %s has %d rounds, want %d", at.Contender, at.Case, n, want)
		}
	}
}

// countOf is how many turns there are of each kind.
func countOf(r *study.Result) map[study.Turns]int {
	n := map[study.Turns]int{}
	for _, row := range r.Rows {
		n[study.Turns{
			Experiment: row.Experiment, Kernel: row.Kernel, Case: row.Case, Size: row.Size, Contender: row.Contender,
		}]++
	}
	return n
}

// promised are the figures of each contender in each cell, a line each.
func promised(e study.Experiment) string {
	var figures, lines []string
	for _, f := range e.Figures {
		figures = append(figures, f.Name)
	}
	slices.Sort(figures)
	seen := map[string]bool{}
	for _, c := range e.Cells(study.Standard) {
		if c.Cluster.Services*c.Cluster.Endpoints > 100 && e.Axis != "Services" || seen[c.Case] {
			continue
		}
		seen[c.Case] = true
		for _, who := range []string{"direct", "direct again", "nftables"} {
			lines = append(lines, fmt.Sprintf("%s, %s: %s", c.Case, who, strings.Join(figures, " ")))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// given are those that there are.
func given(r *study.Result) string {
	var lines []string
	for _, row := range r.Rows {
		var figures []string
		for name := range row.Figures {
			if strings.HasPrefix(name, "cpu.") { // of all experiments in which processes live on
				continue
			}
			figures = append(figures, name)
		}
		slices.Sort(figures)
		line := fmt.Sprintf("%s, %s: %s", row.Case, row.Contender, strings.Join(figures, " "))
		if row.Failed != "" || row.Figures["failed"] > 0 {
			line += fmt.Sprintf(" (%s, %g failed)", row.Failed, row.Figures["failed"])
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
