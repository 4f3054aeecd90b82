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
				Experiments: experiments, Depth: study.Quick, Contenders: study.Contenders([]string{"nftables"}),
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

// promised are the figures of each contender in each cell, a line each.
func promised(e study.Experiment) string {
	var figures, lines []string
	for _, f := range e.Figures {
		figures = append(figures, f.Name)
	}
	slices.Sort(figures)
	seen := map[string]bool{}
	for _, c := range e.Cells(study.Quick) {
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
