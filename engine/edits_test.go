package engine

import (
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
)

// TestEngine_logsEdits wants a line for each change of a Service, and no more of a busy one than its share.
func TestEngine_logsEdits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.send(web(1, "10.244.1.2"))
		r.start(nil)
		r.converged()
		r.send(web(1, "10.244.1.2", "10.244.1.3"))
		r.converged()
		r.send(web(2, "10.244.1.2"))
		r.converged()
		for i := range 3 * maxEdits {
			r.send(web(10+i, "10.244.1.2"))
		}
		r.converged()
		bubble.Pass(2 * time.Minute)
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.stop()
		var edits []string
		for line := range strings.SplitSeq(r.log.String(), "\n") {
			if strings.Contains(line, "in force") {
				edits = append(edits, regexp.MustCompile(`.*msg=|took=.*`).ReplaceAllString(line, ""))
			}
		}
		if len(edits) < 3 || len(edits) > 2*maxEdits+3 {
			t.Errorf("%d lines:\n%s", len(edits), strings.Join(edits, "\n"))
		}
		if !strings.Contains(strings.Join(edits, "\n"), "more changes are in force") {
			t.Error("no line says that there were more")
		}
		want := `"a change is in force" service=default/web-1 set=1 deleted=0 `
		if got := edits[0]; got != want {
			t.Errorf("%s, not %s", got, want)
		}
	})
}
