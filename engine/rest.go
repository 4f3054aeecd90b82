package engine

import (
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// Some planes pay for every change in proportion to all rows: the kernel copies a legacy table of iptables,
// and one of nf_tables it checks as a whole. Where changes come all the time, that would take a processor
// away from the node. So a change that took long to program is followed by a rest, in which what comes is
// gathered. The first change after a quiet time does not wait.
//
//	batch ─► gather ─► held ─► release, when the rest is over ─► Table.Update ─► Apply ─► rest

// budget keeps something to a share of one CPU: each time owes a rest of so many times its length. Up to
// credit is lent, so that a single long one does not delay the next, and no rest is longer than longest.
type budget struct {
	share           int
	credit, longest time.Duration
	free            time.Duration // what does not even take so long owes nothing

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

// rest lets the plane rest after a change.
func (e *Engine) rest(took time.Duration) { e.restEnd = time.Now().Add(e.changes.rest(took)) }

func (e *Engine) endRest() { e.restEnd = time.Time{} }

// processorTime is that of the calling thread; if the kernel does not tell, no time goes by.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// resting reports whether what has come has to wait. It does not for a Sync, which takes as long with it.
func (e *Engine) resting() bool { return !e.dirty && time.Now().Before(e.restEnd) }

// gather keeps a batch until the loop takes it in. It is taken from its source even while the plane rests, as
// only then it is known since when it waits.
func (e *Engine) gather(b service.Batch) {
	e.note(b)
	source.Add(&e.held, b)
	e.holds = true
	if e.resting() {
		e.markHeld()
	}
}

// release is what has been gathered, unless the plane rests.
func (e *Engine) release() (b service.Batch) {
	if !e.resting() {
		b, e.held, e.holds = e.held, service.Batch{}, false
	}
	return b
}

// markHeld has the status say since when changes wait, if they do.
func (e *Engine) markHeld() {
	if e.holds && len(e.arrived) > 0 {
		e.status.queued(e.arrived[0])
	}
}
