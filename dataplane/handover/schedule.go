package handover

import "time"

// Schedule plans looks whether connections have ended that need objects in the kernel: soon at first, when short
// connections end, and then ever more rarely. The zero value plans none.
type Schedule struct {
	since, look time.Time
	pause       time.Duration
}

const (
	minPause = time.Second
	maxPause = 30 * time.Second
)

// Next plans the next look, after this pause at least. The first call begins the Schedule.
func (d *Schedule) Next(atLeast time.Duration) {
	now := time.Now()
	if d.pause = min(2*d.pause, maxPause); d.since.IsZero() {
		d.since, d.pause = now, minPause
	}
	d.look = now.Add(max(d.pause, atLeast))
}

// Began reports whether there are connections to look for.
func (d *Schedule) Began() bool { return !d.since.IsZero() }

// Due reports whether it is time for a planned look.
func (d *Schedule) Due() bool { return !d.look.IsZero() && !time.Now().Before(d.look) }

// Over reports whether the connections have had their time.
func (d *Schedule) Over(limit time.Duration) bool { return d.Began() && time.Since(d.since) > limit }
