package engine

import (
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
)

// Another program may undo every repair, as a second proxy does. To go on repairing at once helps nobody, and costs
// both of them, and the node, a processor. So repairs that do not hold come ever more rarely. The first few do not: a
// firewall that is loaded anew takes some steps.
//
//	drift ─► repair ─► held for a while ─► all is well
//	  ▲         └────► undone ─► pause ─┐
//	  └─────────────────────────────────┘

const (
	// repairHolds is how long a repair must have held to count as one that holds.
	repairHolds = 5 * time.Second
	// promptRepairs come as soon as the first pause is over, which doubles afterwards up to the longest.
	promptRepairs = 4
	firstPause    = 500 * time.Millisecond
	// LongestPause is how long the next repair waits at most.
	LongestPause = 30 * time.Second
)

// quarrel is about repairs that do not hold. The zero value is peace.
type quarrel struct {
	began, last time.Time // of the repairs that did not hold
	repairs     int
	broken      bool                // the last one is known to be undone
	by          []dataplane.Foreign // who is known to have done it last
}

// found takes in that the kernel is not as it should be. It returns when that may be repaired.
func (q *quarrel) found(now time.Time) time.Time {
	if !q.broken && now.Sub(q.last) >= repairHolds {
		*q = quarrel{}
	}
	q.broken = q.repairs > 0
	return q.last.Add(q.pause())
}

// whole takes in that the kernel is as it should be. It returns whether that has lasted.
func (q *quarrel) whole(now time.Time) bool {
	if q.broken { // somebody else has repaired it
		q.broken, q.last = false, now
	}
	if now.Sub(q.last) < repairHolds {
		return false
	}
	*q = quarrel{}
	return true
}

// repaired takes in a repair.
func (q *quarrel) repaired(now time.Time, by []dataplane.Foreign) {
	if q.repairs == 0 {
		q.began = now
	}
	q.repairs++
	q.last, q.broken = now, false
	if dataplane.By(by) != "" {
		q.by = slices.Clone(by)
	}
}

func (q *quarrel) pause() time.Duration {
	if q.repairs == 0 {
		return 0
	}
	doublings := min(max(0, q.repairs-promptRepairs), 10)
	return min(firstPause<<doublings, LongestPause)
}

// lasts reports whether repairs have become rarer.
func (q *quarrel) lasts() bool { return q.repairs > promptRepairs }

// status is nil as long as no repair was undone.
func (q *quarrel) status() *Undone {
	if q.repairs == 0 || q.repairs == 1 && !q.broken {
		return nil
	}
	return &Undone{
		Since: q.began, Repairs: q.repairs, Rarer: q.lasts(), Next: q.last.Add(q.pause()),
		By: dataplane.By(q.by), Process: process(q.by),
	}
}

// process is the name of the first one that is known.
func process(by []dataplane.Foreign) string {
	for _, f := range by {
		if f.Process != "" {
			return f.Process
		}
	}
	return ""
}
