// Package bubble lets time pass in a bubble of testing/synctest, whose clock stands still while anything runs: an hour
// there takes no time. Outside of a bubble its functions panic, so that no test sleeps with them.
//
//	test ──Pass──► clock ──► timers of the goroutines under test ──► all of them wait again ──► test
//	                 ▲
//	fake ──Work──────┘
package bubble

import (
	"testing/synctest"
	"time"
)

// Pass advances the clock, and returns when all other goroutines of the bubble wait for something. One goroutine of a
// bubble may call it, that of the test.
func Pass(d time.Duration) {
	synctest.Wait() // panics outside of a bubble
	time.Sleep(d)
	synctest.Wait()
}

// Work is what a fake does that takes so much time. Any goroutine may call it.
func Work(d time.Duration) {
	if time.Now().Year() >= 2020 { // the clock of a bubble begins in 2000
		panic("bubble: Work outside of a bubble of testing/synctest")
	}
	time.Sleep(d)
}
