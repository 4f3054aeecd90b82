package study

import (
	"strconv"
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
		p.Left += time.Duration(len(l.needed(g))) * l.clock.start()
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

// name is the cell's, for who waits.
func (t task) name() string {
	name := t.experiment
	if t.Case != "" {
		name += ", " + t.Case
	}
	if t.Size > 0 {
		name += ", " + number(t.Size)
	}
	return name
}

// estimate knows what things took.
type estimate struct {
	cells, experiments map[string]mean
	starts             mean
}

// mean is that of durations.
type mean struct {
	sum time.Duration
	n   int
}

func (m mean) plus(d time.Duration) mean { return mean{m.sum + d, m.n + 1} }

func (m mean) value() time.Duration { return m.sum / time.Duration(m.n) }

func (e *estimate) took(t task, d time.Duration) {
	if e.cells == nil {
		e.cells, e.experiments = map[string]mean{}, map[string]mean{}
	}
	e.cells[t.name()] = e.cells[t.name()].plus(d)
	e.experiments[t.experiment] = e.experiments[t.experiment].plus(d)
}

func (e *estimate) started(d time.Duration) { e.starts = e.starts.plus(d) }

// turn is what one will take: what those of the same cell did, or of the same experiment, or what is said of it.
func (e *estimate) turn(t task) time.Duration {
	if m := e.cells[t.name()]; m.n > 0 {
		return m.value()
	}
	if m := e.experiments[t.experiment]; m.n > 0 && t.Takes == 0 {
		return m.value()
	}
	return t.takes()
}

// start is what the beginning of a site will take.
func (e *estimate) start() time.Duration {
	if e.starts.n > 0 {
		return e.starts.value()
	}
	return time.Second
}

// number has its thousands apart.
func number(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
