package study

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// Need is how many more rounds would decide something, and whether a published conclusion waits for it.
type Need struct {
	Rounds    int
	Published bool
}

// Needs are those of turns. Where there are none, all is decided.
type Needs map[Turns]Need

// Add keeps the larger need.
func (n Needs) Add(t Turns, more Need) {
	if more.Rounds > 0 {
		n[t] = Need{max(n[t].Rounds, more.Rounds), n[t].Published || more.Published}
	}
}

// FirstRounds is how many each comparison has before anything can be decided.
const FirstRounds = 8

// stage is what time is spent on.
type stage int

// The stages of a run: a look at everything in half of the time, then what published conclusions wait for, then the
// rest. Where the time is short, there is no second one: its comparisons are of many sizes.
const (
	look stage = iota
	published
	rest
)

// wants is how many more turns a contender is to have in a cell now.
func (l *lab) wants(t task, c Contender) int {
	key := l.row(t, c, 0).turns()
	done, need := l.journal.of(key), l.needs[key]
	switch {
	case done.over:
		return 0
	case l.Rounds > 0:
		return max(0, l.Rounds-done.turns)
	case done.turns == 0:
		if l.stage == published {
			return 0
		}
		return FirstRounds
	case l.stage == look:
		return max(0, min(need.Rounds, FirstRounds-done.turns))
	case l.stage == published && !need.Published:
		return 0
	}
	return need.Rounds
}

// wanting are the contenders that are to have turns in a cell.
func (l *lab) wanting(t task) (all []Contender) {
	for _, c := range t.contenders {
		if l.wants(t, c) > 0 {
			all = append(all, c)
		}
	}
	return all
}

// round is how long one of a cell is expected to take.
func (l *lab) round(t task) time.Duration { return time.Duration(len(l.wanting(t))) * l.clock.turn(t) }

// cost is how long all that a group wants is expected to take.
func (l *lab) cost(g *group) (d time.Duration) {
	for _, t := range g.cells {
		for _, c := range t.contenders {
			d += time.Duration(l.wants(t, c)) * l.clock.turn(t)
		}
	}
	return d
}

// judge finds out what is undecided, unless that would take too much of the time.
func (l *lab) judge() {
	const pause = 20 // times as long as it takes, until it is done again
	begin := time.Now()
	if l.Judge == nil || l.Rounds > 0 || begin.Before(l.judged) {
		return
	}
	l.needs = l.Judge(l.journal.result())
	l.judged = time.Now().Add(pause * time.Since(begin))
}

// shortest is the time that is not short. The test kernel and its proxies need as much to start.
const shortest = 5 * time.Minute

// spend adds rounds where something is undecided, until nothing is, or the time is over. It ends with a stage.
func (l *lab) spend(ctx context.Context, until time.Time, last stage) error {
	defer func() { l.until = time.Time{} }()
	short := time.Until(until) < shortest
	for l.stage = look; l.stage <= last; l.stage++ {
		if l.stage == published && short {
			continue
		}
		l.until = until
		if l.stage == look && l.Rounds == 0 {
			l.until = time.Now().Add(time.Until(until) / 2)
		}
		for rows := -1; rows < len(l.journal.rows) && (!l.limited() || time.Now().Before(l.until)); {
			rows = len(l.journal.rows)
			if err := l.pass(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// limited reports whether time may be too short for something. It is never too short for the very first round.
func (l *lab) limited() bool { return l.Rounds == 0 && len(l.journal.rows) > 0 }

// pass visits each group that wants turns, and gives it its share of the time that is left. At first those in which
// there is more to see come first; later those that want less, so that they leave time for the others.
func (l *lab) pass(ctx context.Context) error {
	const worth = 3 // the least share, in starts of all proxies
	l.judge()
	groups, costs, all := l.byValue(), map[*group]time.Duration{}, time.Duration(0)
	for _, g := range groups {
		costs[g] = l.cost(g)
		all += costs[g]
	}
	groups = slices.DeleteFunc(groups, func(g *group) bool { return costs[g] == 0 })
	if l.stage != look {
		slices.SortStableFunc(groups, func(a, b *group) int { return cmp.Compare(costs[a], costs[b]) })
	}
	for i, g := range groups {
		left := time.Until(l.until)
		share := left / time.Duration(len(groups)-i)
		if l.stage == look {
			share = time.Duration(float64(left) * float64(costs[g]) / float64(all))
			all -= costs[g]
		}
		start := time.Duration(len(l.Contenders)) * l.clock.mean(time.Second, "")
		if left < start && l.limited() {
			continue
		}
		if err := l.measure(ctx, g, time.Now().Add(min(max(share, worth*start), left))); err != nil {
			return err
		}
	}
	return nil
}

// byValue are the groups in an order in which the first few are of as many experiments as can be.
func (l *lab) byValue() (all []*group) {
	seen := map[string]bool{}
	news := func(g *group) int {
		some := map[string]bool{}
		for _, t := range g.cells {
			if !seen[t.experiment] && len(l.wanting(t)) > 0 {
				some[t.experiment] = true
			}
		}
		return len(some)
	}
	for left := slices.Clone(l.groups); len(left) > 0; {
		g := slices.MaxFunc(left, func(a, b *group) int { return cmp.Compare(news(a), news(b)) })
		left = slices.DeleteFunc(left, func(o *group) bool { return o == g })
		all = append(all, g)
		for _, t := range g.cells {
			seen[t.experiment] = true
		}
	}
	return all
}

// next is the cell of a group that has had the least time, of those for which a round is left. The end is when another
// cell is next. nil: there is none.
func (l *lab) next(g *group, until time.Time) (best *task, end time.Time) {
	var least, stay time.Duration
	left, n := time.Until(until), 0
	for i := range g.cells {
		t := &g.cells[i]
		round := l.round(*t)
		if round == 0 || l.limited() && round > left {
			continue
		}
		n++
		if spent := l.clock[t.name()].sum + round; best == nil || spent < least {
			best, least, stay = t, spent, round
		}
	}
	const worth = 4 // the least stay, in rounds: each has begun with one that does not count
	return best, time.Now().Add(max(left/time.Duration(max(n, 1)), min(worth*stay, left)))
}
