package said_test

import (
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/said"
)

func TestCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, reminder := range []time.Duration{0, time.Hour} {
			condition := said.Condition{Reminder: reminder}
			news := func(what, text string, want bool) {
				t.Helper()
				if got := condition.Changed(text); got != want || !condition.Lasts() {
					t.Errorf("reminder %v: %s is news: %t, lasts: %t", reminder, what, got, condition.Lasts())
				}
			}
			over := func(what string, want bool) {
				t.Helper()
				if got := condition.Cleared(); got != want || condition.Lasts() {
					t.Errorf("reminder %v: %s is over: %t, lasts: %t", reminder, what, got, condition.Lasts())
				}
			}
			over("what never was", false)
			news("the first", "a", true)
			news("the same", "a", false)
			bubble.Pass(time.Hour - time.Nanosecond)
			news("the same a moment before the reminder", "a", false)
			bubble.Pass(time.Nanosecond)
			news("the same after that time", "a", reminder > 0)
			news("another", "b", true)
			over("the other", true)
			over("nothing", false)
			news("the other again", "b", true)
		}
	})
}
