package answer

import (
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/engine"
)

// The lines of status agree with each other and with /healthz, and count one thing as one.
func TestStatus_text(t *testing.T) {
	now := time.Now()
	ill := Status{engine.Report{Now: now, Status: engine.Status{
		NodeEligible: true, LastProgrammed: now, WaitingSince: now.Add(-2 * time.Minute), Failures: 1, Error: "this\nand that",
		Rows:   engine.Rows{Frontends: 1, Pools: 2, Guards: 1, HealthChecks: 1},
		Undone: &engine.Undone{Since: now, Repairs: 1, Next: now},
	}}}
	ill.Node = "n1"
	text := ill.String()
	for _, want := range []string{
		"healthy          no: ", "n1, load balancers should not use it: it is not healthy\n", "last correct     20",
		"failures         1 in a row: this\n                 and that\n", "soon after 1 repair", "1 frontend, 2 pools, 1 guard, 1 health check\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
