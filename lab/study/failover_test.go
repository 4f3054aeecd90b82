package study_test

import (
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/study"
)

// TestFailover has each failure happen for two seconds. After it no client fails.
func TestFailover(t *testing.T) {
	t.Parallel()
	names, _ := study.Failures()
	contenders := slices.DeleteFunc(study.Contenders([]string{"nftables"}), func(c study.Contender) bool {
		return c.Kind != study.Fairlead
	})
	o := study.FailoverOptions{
		Program: []string{fairlead}, Contenders: contenders, Failures: names, Health: []string{"off"}, Rate: 60,
		Timeout: time.Second, Event: 500 * time.Millisecond, Removal: 2500 * time.Millisecond, End: 4 * time.Second,
	}
	rows, err := study.Failover(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		t.Logf("%+v", r)
		if r.Lacking != "" || r.Attempts < 200 || r.Failed == 0 != (r.Failure == "slow") || r.WorstSecond > r.Failed {
			t.Errorf("%s: %+v", r.Failure, r)
		}
		if last := (o.Removal - o.Event).Seconds() + 0.5; r.LastFailure > last || r.AfterRemoval > r.Failed {
			t.Errorf("%s: clients failed %.1f s after the event, and %d after the removal", r.Failure, r.LastFailure, r.AfterRemoval)
		}
		names = slices.DeleteFunc(names, func(name string) bool { return name == r.Failure })
	}
	if len(names) > 0 {
		t.Errorf("%v are missing", names)
	}
}
