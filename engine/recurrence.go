package engine

import (
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
)

// Another program may undo every repair, as a second proxy does. Repairing again at once does not help, and costs both
// programs a processor. So repairs that do not hold come ever more rarely. The first few come at once: a firewall that
// is loaded anew takes some steps.
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

// recurrence follows external changes that recur after repairs. The zero value: there are none.
type recurrence struct {
	began, last time.Time // of the repairs that did not hold
	repairs     int
	broken      bool                       // the last one is known to be undone
	by          []dataplane.ExternalChange // external changes known to be the last cause
}

// found takes in that the kernel is not as it should be. It returns when that may be repaired.
func (r *recurrence) found(now time.Time) time.Time {
	if !r.broken && now.Sub(r.last) >= repairHolds {
		*r = recurrence{}
	}
	r.broken = r.repairs > 0
	return r.last.Add(r.pause())
}

// whole takes in that the kernel is as it should be. It returns whether that has lasted.
func (r *recurrence) whole(now time.Time) bool {
	if r.broken { // another program has repaired it
		r.broken, r.last = false, now
	}
	if now.Sub(r.last) < repairHolds {
		return false
	}
	*r = recurrence{}
	return true
}

// repaired takes in a repair.
func (r *recurrence) repaired(now time.Time, by []dataplane.ExternalChange) {
	if r.repairs == 0 {
		r.began = now
	}
	r.repairs++
	r.last, r.broken = now, false
	if dataplane.Authors(by) != "" {
		r.by = slices.Clone(by)
	}
}

func (r *recurrence) pause() time.Duration {
	if r.repairs == 0 {
		return 0
	}
	doublings := min(max(0, r.repairs-promptRepairs), 10)
	return min(firstPause<<doublings, LongestPause)
}

// lasts reports whether repairs have become rarer.
func (r *recurrence) lasts() bool { return r.repairs > promptRepairs }

// status is nil as long as no repair was undone.
func (r *recurrence) status() *Undone {
	if r.repairs == 0 || r.repairs == 1 && !r.broken {
		return nil
	}
	return &Undone{
		Since: r.began, Repairs: r.repairs, Rarer: r.lasts(), Next: r.last.Add(r.pause()),
		Author: dataplane.Authors(r.by), Process: process(r.by),
	}
}

// process is the name of the first one that is known.
func process(by []dataplane.ExternalChange) string {
	for _, f := range by {
		if f.Process != "" {
			return f.Process
		}
	}
	return ""
}
