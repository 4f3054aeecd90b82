package daemon

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/model"
)

// While another plane is programmed beside it, the one in force takes nothing of that for something left, also when it
// is time to look again whether connections have ended.
func TestHeir_waits(t *testing.T) {
	t.Parallel()
	removed := 0
	other := plane{Driver: dataplane.Driver{
		Name:    "other",
		Inspect: func() (dataplane.Leftover, error) { return dataplane.Leftover{Rules: true}, nil },
		Remove: func(context.Context, dataplane.Config) error {
			removed++
			return nil
		},
	}}
	inner, err := (&memory.Kernel{}).New(dataplane.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &heir{
		opened: opened{Dataplane: inner, inner: inner}, self: plane{Driver: dataplane.Driver{Name: userspacePlane}},
		others: func() []plane { return []plane{other} }, log: slog.New(slog.DiscardHandler), cleared: func() {},
	}
	h.wait()
	h.retired = retired{since: time.Now(), look: time.Now().Add(-time.Second)}
	if err := h.Sync(t.Context(), model.NewState()); err != nil {
		t.Error(err)
	}
	if _, err := h.Audit(t.Context(), model.NewState(), dataplane.Quick); err != nil {
		t.Error(err)
	}
	if removed != 0 {
		t.Errorf("removed %d times what another plane was about to serve by", removed)
	}
	h.doubt()
	if err := h.Sync(t.Context(), model.NewState()); err != nil || removed != 1 {
		t.Errorf("removed %d times what that has left in the end: %v", removed, err)
	}
}
