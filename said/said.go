// Package said keeps a log and Events short: what lasts is not said again and again, and of a long list only the first
// few are named. The status has all of it.
//
//	something is wrong ──► Changed ── true ──► say what ── Bounded, Brief ──► the first few "and 1234 more"
//	all is well ─────────► Cleared ── true ──► say that it is over
package said

import "time"

// Condition is one thing that may be wrong, and what was said of it last. The zero value is well. It belongs to one
// goroutine at a time.
type Condition struct {
	// Reminder is how long the same may last without being a change again; 0: for ever.
	Reminder time.Duration

	text string // empty: all is well
	at   time.Time
}

// Changed reports whether what is wrong now must be said: it was not, or something else was. The text is not empty.
func (t *Condition) Changed(text string) bool {
	if text == t.text && (t.Reminder == 0 || time.Since(t.at) < t.Reminder) {
		return false
	}
	t.text, t.at = text, time.Now()
	return true
}

// Failed takes in an error, or that there is none, and reports whether the error must be said.
func (t *Condition) Failed(err error) bool {
	if err == nil {
		t.Cleared()
		return false
	}
	return t.Changed(err.Error())
}

// Lasts reports whether something was wrong the last time.
func (t *Condition) Lasts() bool { return t.text != "" }

// Cleared takes in that all is well, and reports whether something was wrong before.
func (t *Condition) Cleared() bool {
	was := t.Lasts()
	t.text = ""
	return was
}
