package bench

import "time"

// letPass lets time pass that an experiment prescribes: for a rest between two changes, until the next one of a rate is
// due, or during a measurement.
func letPass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the time itself is what is wanted, and no event ends it
}
