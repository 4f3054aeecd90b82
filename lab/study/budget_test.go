package study

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// With the budget of fairlead bench --quick a run of everything ends within three minutes, whatever is undecided. Where
// turns are short, it has compared all contenders then. With the hour of --continue another run goes on from there, and
// compares them everywhere.
func TestRun_quick(t *testing.T) {
	dir := t.TempDir()
	var before []Row
	for _, run := range []struct {
		budget, end time.Duration
		most        time.Duration // that a turn takes where there must be comparisons
	}{{160 * time.Second, 3 * time.Minute, time.Second / 2}, {time.Hour, time.Hour + time.Minute/2, time.Hour}} {
		synctest.Test(t, func(t *testing.T) {
			l := simulated(t, dir)
			if err := l.spend(t.Context(), l.began.Add(run.budget), l.last); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(l.began); took > run.end {
				t.Errorf("%s: it took %s", run.budget, took)
			}
			rows, n := l.journal.rows, len(before)
			if len(rows) <= n || !slices.EqualFunc(rows[:n], before, func(a, b Row) bool {
				return a.turns() == b.turns() && a.Round == b.Round
			}) {
				t.Errorf("%s: there were %d rows, and there are %d", run.budget, n, len(rows))
			}
			for _, e := range l.Experiments {
				if takes, compared := l.has(e.Name); takes <= run.most && !compared {
					t.Errorf("%s: %s has no cell with turns of all contenders", run.budget, e.Name)
				}
			}
			before = slices.Clone(rows)
			if err := l.journal.file.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// simulated is a run of all experiments in which nothing but time passes, and all is undecided. A turn lasts as long as
// its cell says. A proxy needs half a second to start, and as much again for 2,500 Services.
func simulated(t *testing.T, dir string) *lab {
	all := Experiments()
	for i := range all {
		cells := all[i].Cells
		all[i].Cells = func(d Depth) []Cell {
			made := cells(d)
			for i := range made {
				lasts := made[i].takes()
				made[i].Turn = func(context.Context, *Site) (Figures, error) {
					bubble.Work(lasts)
					return Figures{"time": lasts.Seconds()}, nil
				}
			}
			return made
		}
	}
	l := newLab(Options{
		Experiments: all, Depth: Standard, Contenders: Contenders(Planes()),
		Judge: func(r *Result) Needs {
			needs := Needs{}
			for _, row := range r.Rows {
				needs.Add(row.turns(), Need{Rounds: 100, Published: true})
			}
			return needs
		},
	}, This)
	l.open = func(_ context.Context, who Contender, c Cluster, _ *kubernetes.Catalog) *Site {
		bubble.Work(time.Second/2 + time.Duration(c.Services)*time.Millisecond/5)
		return &Site{Contender: who, Cluster: c, Kernel: This}
	}
	var err error
	if l.journal, err = openJournal(dir, nil, Result{}); err != nil {
		t.Fatal(err)
	}
	l.journal.synced = l.began.Add(endOfTime) // no row waits for the disk
	l.remember()
	return l
}

// has says of an experiment how long its shortest turns take, and whether all contenders of a cell have had one.
func (l *lab) has(experiment string) (takes time.Duration, compared bool) {
	takes = time.Hour
	for _, g := range l.groups {
		for _, c := range g.cells {
			if c.experiment != experiment {
				continue
			}
			takes = min(takes, c.takes())
			compared = compared || !slices.ContainsFunc(c.contenders, func(who Contender) bool {
				return l.journal.of(l.row(c, who, 0).turns()).turns == 0
			})
		}
	}
	return takes, compared
}
