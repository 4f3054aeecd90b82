package bubble_test

import (
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
)

func TestPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, worked := time.Now(), false
		go func() {
			bubble.Work(time.Hour)
			worked = true
		}()
		bubble.Pass(time.Hour)
		if took := time.Since(began); took != time.Hour || !worked {
			t.Errorf("after %v the work of an hour is done: %t", took, worked)
		}
	})
}

func TestOutside(t *testing.T) {
	for name, wait := range map[string]func(time.Duration){"Pass": bubble.Pass, "Work": bubble.Work} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("it does not panic")
				}
			}()
			wait(time.Nanosecond)
		})
	}
}
