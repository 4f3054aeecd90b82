package said_test

import (
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/said"
)

func TestTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, reminder := range []time.Duration{0, time.Hour} {
			trouble := said.Trouble{Reminder: reminder}
			news := func(what, text string, want bool) {
				t.Helper()
				if got := trouble.News(text); got != want || !trouble.Lasts() {
					t.Errorf("reminder %v: %s is news: %t, lasts: %t", reminder, what, got, trouble.Lasts())
				}
			}
			over := func(what string, want bool) {
				t.Helper()
				if got := trouble.Over(); got != want || trouble.Lasts() {
					t.Errorf("reminder %v: %s is over: %t, lasts: %t", reminder, what, got, trouble.Lasts())
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
