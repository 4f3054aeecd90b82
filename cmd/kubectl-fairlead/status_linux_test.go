package main

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/plugin/answer"
)

// TestStatus_many: an error that names ten thousand rows has one line of the table, of the first few.
func TestStatus_many(t *testing.T) {
	r := engine.Report{Healthy: true}
	r.NodeEligible, r.Failures, r.Error = true, 3, strings.Repeat("row: refused\n", 10_000)
	cells := nodeStatus{Node: "node", Status: &answer.Status{Report: r}}.cells()
	text := cells[len(cells)-1]
	if len(text) > 2000 || strings.Contains(text, "\n") || !strings.Contains(text, "in a row: row: refused; row: refused; ") ||
		!strings.HasSuffix(text, "and 9996 more") {
		t.Errorf("%d bytes: %.500s", len(text), text)
	}
}
