package study

import (
	"strconv"
	"strings"
	"time"
)

// Progress is how far a run has come.
type Progress struct {
	Doing string
	// Cell is the one that is measured: an experiment with its case and size; empty: none is yet.
	Cell string
	Done int // turns that are over
	// Left is how many more there are, as far as is known, and for how long: until all is decided, or the time is over.
	Left int
	For  time.Duration
}

func (l *lab) tell(what string, t task) {
	if l.Progress == nil {
		return
	}
	p := Progress{Doing: what, Cell: t.name()}
	for _, g := range l.groups {
		p.For += time.Duration(len(l.needed(g)))*l.clock.mean(time.Second, "") + l.cost(g)
		for _, t := range g.cells {
			for _, c := range t.contenders {
				p.Left += l.wants(t, c)
				p.Done += l.journal.of(l.row(t, c, 0).turns()).turns
			}
		}
	}
	if left := max(time.Until(l.until), 0); !l.until.IsZero() && left < p.For { // there is not time for all of it
		p.Left = int(float64(p.Left) * left.Seconds() / p.For.Seconds())
		p.For = left
	}
	l.Progress(p)
}

// name is the cell's, for progress messages.
func (t task) name() string { return PlaceOf(t.experiment, t.Case, t.Size) }

// PlaceOf is what a cell is called.
func PlaceOf(experiment, of string, size int) string {
	if of != "" {
		experiment += ", " + of
	}
	if size > 0 {
		experiment += ", " + Number(size)
	}
	return experiment
}

// estimate is what things took: the means by the names of cells and experiments, and at "" that of starts.
type estimate map[string]struct {
	sum time.Duration
	n   int
}

func (e estimate) took(d time.Duration, names ...string) {
	for _, name := range names {
		m := e[name]
		m.sum, m.n = m.sum+d, m.n+1
		e[name] = m
	}
}

// remember has the clock know what turns took before.
func (l *lab) remember() {
	for _, r := range l.journal.rows {
		if r.Kernel == l.kernel {
			l.clock.took(time.Duration(r.Took*float64(time.Second)), PlaceOf(r.Experiment, r.Case, r.Size), r.Experiment)
		}
	}
}

// mean is that of the first name that has one.
func (e estimate) mean(otherwise time.Duration, names ...string) time.Duration {
	for _, name := range names {
		if m := e[name]; m.n > 0 {
			return m.sum / time.Duration(m.n)
		}
	}
	return otherwise
}

// turn is what one will take: what those of the same cell did, or of the same experiment, or what is said of it.
func (e estimate) turn(t task) time.Duration {
	if t.Takes > 0 {
		return e.mean(t.takes(), t.name())
	}
	return e.mean(t.takes(), t.name(), t.experiment)
}

// Number has its thousands apart.
func Number(n int) string {
	text := strconv.Itoa(n)
	least := len(strings.TrimLeft(text, "0123456789")) // after the sign
	for i := len(text) - 3; i > least; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
