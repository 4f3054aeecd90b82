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
	Cell        string
	Done, Turns int           // turns that are over, and how many there are
	Left        time.Duration // an estimate; 0: not known yet
}

func (l *lab) tell(what string, t task) {
	if l.Progress == nil {
		return
	}
	p := Progress{Doing: what, Cell: t.name()}
	p.add(l)
	if l.elsewhere != nil {
		p.add(l.elsewhere)
	}
	l.Progress(p)
}

// add counts a run's turns.
func (p *Progress) add(l *lab) {
	for _, g := range l.groups {
		p.Left += time.Duration(len(l.needed(g))) * l.clock.mean(time.Second, "")
		for _, t := range g.cells {
			left := 0
			for _, c := range t.contenders {
				left += l.left(t, c)
			}
			p.Turns += t.Rounds * len(t.contenders)
			p.Done += t.Rounds*len(t.contenders) - left
			p.Left += time.Duration(left) * l.clock.turn(t)
		}
	}
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
