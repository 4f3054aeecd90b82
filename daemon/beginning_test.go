package daemon

import (
	"errors"
	"fmt"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/eventually"
)

func TestBeginning(t *testing.T) {
	t.Parallel()
	b := &beginning{inForce: make(chan struct{})}
	for _, r := range []engine.Round{
		{Verb: engine.Synced, Err: errors.New("no")},
		{Verb: engine.Applied},
		{Verb: engine.Applied, Err: dataplane.ErrPartial},
	} {
		b.Round(r)
		select {
		case <-b.inForce:
			t.Fatalf("%+v is not all rules", r)
		default:
		}
	}
	b.Round(engine.Round{Verb: engine.Synced, Err: fmt.Errorf("%w: one row", dataplane.ErrPartial)})
	eventually.Receive(t, "rules are in force", b.inForce)
}
