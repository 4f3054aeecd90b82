package metrics_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/renamed"
	"fairlead.dev/fairlead/metrics"
)

// meddled is an engine whose repairs a program undoes, and whose plane connects itself.
type meddled struct{ still }

func (meddled) Status() engine.Status {
	return engine.Status{
		WaitingSince: time.Now().Add(-90 * time.Second), AuditUnfinishedSince: time.Now().Add(-7 * time.Second), Failures: 3,
		Partial: true, Undone: &engine.Undone{Since: time.Now().Add(-time.Minute), Process: "nft"},
	}
}

func (m meddled) Do(ctx context.Context, f func(context.Context, engine.View) error) error {
	return f(ctx, engine.View{State: m.state, Plane: dialler{}})
}

type dialler struct{ dataplane.Dataplane }

func (dialler) Counters(context.Context) (dataplane.Counters, error) {
	return dataplane.Counters{
		Dials:  &dataplane.Dials{Failed: 5, Retried: 4, Unanswered: 2},
		Tables: []dataplane.Table{{Name: "connections", Evictions: 6}},
	}, nil
}

// TestOldNames: each renamed metric is there under both names with the same value, and its help names the new one.
func TestOldNames(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		m.Follow(meddled{still{stateOf(1)}})
		text := scrape(t, m.Handler())
		for _, want := range []string{
			`fairlead_consecutive_programming_failures 3`, `fairlead_failures_in_a_row 3`,
			`fairlead_unanswered_connections_total 2`, `fairlead_lost_connections_total 2`,
			`fairlead_partially_programmed 1`, `fairlead_partial 1`,
			`fairlead_retried_connections_total 4`, `fairlead_rescued_connections_total 4`,
			`fairlead_repairs_undone_seconds{author="nft"} 60`, `fairlead_rules_undone_seconds{by="nft"} 60`,
			`fairlead_table_evictions_total{table="connections"} 6`, `fairlead_table_yielded_total{table="connections"} 6`,
			`fairlead_audit_unfinished_seconds 7`, `fairlead_unchecked_seconds 7`,
			`fairlead_oldest_pending_change_seconds 90`, `fairlead_waiting_seconds 90`,
			`# TYPE fairlead_rescued_connections_total counter`,
		} {
			if !strings.Contains(text, "\n"+want+"\n") {
				t.Error("missing:", want)
			}
		}
		for _, n := range renamed.Of(renamed.Metric) {
			if want := "\n# HELP " + n.Old + " Deprecated: use " + n.New + ".\n"; !strings.Contains(text, want) {
				t.Error("missing:", want)
			}
		}
	})
}
