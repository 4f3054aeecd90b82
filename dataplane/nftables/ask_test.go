package nftables

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed/nstest"
	"fairlead.dev/fairlead/model"
)

// Where there are many slots a new process asks for those to which frontends lead. It finds what is missing, and what
// is different.
func TestPlane_asksForSlots(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		text := "frontend 10.96.0.11:80/tcp any forward default/large:http cluster snat never\n" +
			"pool default/large:http cluster\n" + example
		for i := range 1100 { // more than are asked for at once, and their size is rounded up
			text += fmt.Sprintf("backend default/large:http cluster 10.245.%d.%d:80\n", i>>8, i&255)
		}
		s := parse(t, text)
		first := newPlane(t, dataplane.Config{})
		check(t, first.Sync(context.Background(), s))
		large := first.tables[0].pools[model.PoolID{Service: "default/large:http"}].number
		check(t, first.Close())

		p := newPlane(t, dataplane.Config{})
		defer p.Close()
		p.askFrom = 1
		drifts := func() (lines []string) {
			r, err := p.Audit(context.Background(), s, dataplane.Full)
			check(t, err)
			for _, d := range r.Drifts {
				lines = append(lines, d.String())
			}
			return lines
		}
		if got := drifts(); len(got) > 0 {
			t.Errorf("where nothing has changed it finds %q", got)
		}
		slot := func(i int, verb, backend string) {
			runNFT(t, verb, "element", "ip", "fairlead", "slots", fmt.Sprintf("{ 0:%x . %d%s }", large, i, backend))
		}
		slot(3, "delete", "")
		slot(600, "delete", "")
		slot(600, "add", " : 10.9.9.9 . 80")
		if got := strings.Join(drifts(), "\n"); !strings.Contains(got, "slot 3") || !strings.Contains(got, "slot 600") ||
			strings.Count(got, "\n") != 1 {
			t.Errorf("of a missing slot and a different one it finds\n%s", got)
		}
		check(t, p.Sync(context.Background(), s))
		slot(1100, "add", " : 10.9.9.9 . 80") // one that the pool does not have yet
		if got := drifts(); len(got) == 0 {
			t.Error("it does not find the slot behind the last one")
		}
	})
}
