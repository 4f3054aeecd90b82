package engine

import (
	"maps"
	"runtime"
	"time"
)

// Some planes pay for every change in proportion to all rows: the kernel copies a legacy table of iptables,
// and one of nf_tables it checks as a whole. Where changes come all the time, that would take a processor
// away from the node. So a change that took long to program is followed by a rest, in which what comes is
// gathered. The first change after a quiet time does not wait.
//
// The rest is a matter of the namespaces whose changes took long. Others do not wait for it, unless there is no end of
// them: then all wait for a while, so that the next turn has what came of many.
//
//	turn ─► cost ─┬─ each namespace's part ─► its own rest ─┐
//	              └─ all of it ─► the rest of all, shorter ─┴─► when the next changes of a namespace may go

// budget keeps work to a share of one CPU: after each piece of work comes a rest of share times its length. credit of
// rest may be postponed, so that a single long piece does not delay the next. No rest is longer than longest.
type budget struct {
	share           int
	credit, longest time.Duration
	free            time.Duration // work that is shorter needs no rest

	paid time.Time // when all so far will have had their rest
}

// rest is how long the next one has to wait after one that took so long.
func (b *budget) rest(took time.Duration) time.Duration {
	if took < b.free {
		took = 0
	}
	now := time.Now()
	if b.paid.Before(now) {
		b.paid = now
	}
	owed := min(b.paid.Sub(now)+time.Duration(b.share)*took, b.credit+b.longest)
	b.paid = now.Add(owed)
	return max(0, owed-b.credit)
}

// throttle is a budget, and the time until which its work has to rest.
type throttle struct {
	budget
	until time.Time
}

// charge adds the time of a piece of work. The rest begins when the work is done.
func (l *throttle) charge(took time.Duration, done bool) {
	if rest := l.rest(took); done {
		l.until = time.Now().Add(rest)
	}
}

// restFree is what a turn may take without a rest.
const restFree = 4 * time.Millisecond

// rests say from when on the changes of whom may go.
type rests struct {
	own map[string]*throttle // of the namespaces that rest, or did not long ago
	all throttle
	max time.Duration // how long a rest is at most
}

func newRests() rests {
	return rests{
		own: map[string]*throttle{},
		all: throttle{budget: budget{share: 2, credit: 3 * time.Second, free: restFree}},
	}
}

// limit sets how long a rest is at most.
func (r *rests) limit(longest time.Duration) { r.max, r.all.longest = longest, longest }

// end ends all rests.
func (r *rests) end() {
	r.all.until = time.Time{}
	clear(r.own)
}

// when is from when on the changes of a namespace may go.
func (r *rests) when(namespace string) time.Time {
	if l := r.own[namespace]; l != nil && l.until.After(r.all.until) {
		return l.until
	}
	return r.all.until
}

// charge adds the time of a turn. Changes that are released together, and take several turns, have one rest afterwards.
func (r *rests) charge(c *cost) {
	now := time.Now()
	maps.DeleteFunc(r.own, func(_ string, l *throttle) bool { return l.paid.Before(now) && l.until.Before(now) })
	sum := c.weight()
	for _, s := range c.shares {
		r.throttle(s.namespace).charge(time.Duration(float64(c.work)*float64(s.weight)/float64(sum)), s.done)
	}
	r.all.charge(c.work, !c.cut)
}

func (r *rests) throttle(namespace string) *throttle {
	l := r.own[namespace]
	if l == nil {
		l = &throttle{budget: budget{share: 8, credit: 250 * time.Millisecond, free: restFree}}
		r.own[namespace] = l
	}
	l.longest = r.max
	return l
}

const (
	// turnGoal is how much longer than a small turn a turn should take that does not empty the queue. Changes in the
	// queue wait for it. But each turn has a fixed price where the kernel works through all rules.
	turnGoal = 160 * time.Millisecond
	// The size of a turn is between these, in rows, roughly.
	minSize, firstSize, maxSize = 1 << 8, 1 << 10, 1 << 18
	// dearSize is the smallest one where even a small turn takes longer than turnGoal.
	dearSize = 1 << 11
)

// pace finds the size of turns: what depends on it should take turnGoal. The rest a turn takes however small it is.
type pace struct {
	size  int
	small time.Duration // how long the last small turn took
}

// newPace knows no small turn, and takes it for a long one.
func newPace() pace { return pace{size: firstSize, small: 2 * turnGoal} }

// took takes in what a turn took that the plane had to apply.
func (p *pace) took(c *cost) {
	took := min(c.took, 2*c.work) // a busy node makes small turns no quicker
	if !c.full {
		if c.weight() <= p.size/8 {
			p.small = took
		}
		return
	}
	least := minSize
	if p.small > turnGoal {
		least = dearSize
	}
	part := max(took-p.small, took/2, 1) // a small turn may have had to wait for something else
	factor := float64(turnGoal) / float64(part)
	size := int(float64(p.size) * min(max(factor, 0.25), 8))
	p.size = min(max(size, min(least, p.size)), maxSize)
}

// cost is what a turn has taken so far. On a busy node much of the time goes by with waiting.
type cost struct {
	took, work time.Duration
	shares     []share
	cut, full  bool // it left something to the next one, as it had no room
}

func (c *cost) weight() (n int) {
	for _, s := range c.shares {
		n += s.weight
	}
	return n
}

// measure adds what f takes.
func (c *cost) measure(clock func() time.Duration, f func()) {
	runtime.LockOSThread() // the clock is the thread's
	defer runtime.UnlockOSThread()
	start, worked := time.Now(), clock()
	f()
	c.took += time.Since(start)
	c.work += clock() - worked
}
