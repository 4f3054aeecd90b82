package handover

import (
	"context"
	"errors"
	"iter"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// staged notes what it is told.
type staged struct {
	none
	told []dataplane.Stage
}

func (p *staged) SetStage(_ context.Context, _ *model.State, to dataplane.Stage) (int, error) {
	p.told = append(p.told, to)
	return 0, nil
}

// idleLoop is a loop that has nothing else to do.
type idleLoop struct{ Turn }

func (l idleLoop) Between(ctx context.Context, f func(context.Context, Turn) error) error {
	return f(ctx, l)
}
func (idleLoop) Stopped() <-chan struct{} { return nil }
func (idleLoop) State() *model.State      { return model.NewState() }
func (idleLoop) Replaced(bool, error)     {}

// TestReplace_back: a plane that is kept knows that another one of its name has its place, and that it has it again.
func TestReplace_back(t *testing.T) {
	h := New(Options{})
	var planes []*Plane
	var notes []*staged
	for _, settings := range []string{"before", "after"} {
		p := &staged{}
		notes = append(notes, p)
		planes = append(planes, &Plane{Name: "userspace", Settings: settings, Dataplane: p, Process: p})
	}
	h.Start(planes[0])
	for _, settings := range []string{"after", "before"} {
		if err := h.Sync(t.Context(), model.NewState()); err != nil {
			t.Fatal(err)
		}
		next, err := h.Reopen(dataplane.Config{}, settings, func(dataplane.Config) (*Plane, error) { return planes[1], nil })
		if err == nil {
			err = h.Replace(t.Context(), idleLoop{}, next)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range [][]dataplane.Stage{
		{dataplane.Standby, dataplane.Active}, {dataplane.Active, dataplane.Standby},
	} {
		if !slices.Equal(notes[i].told, want) {
			t.Errorf("%v is told %v, want %v", planes[i].Settings, notes[i].told, want)
		}
	}
}

// TestSwitch_whileTheFirstSyncEnds: a Sync that meets the end of a failed switch leaves the leftovers to the next audit.
func TestSwitch_whileTheFirstSyncEnds(t *testing.T) {
	removed, failed := false, errors.New("the plane cannot be opened")
	h := New(Options{Drivers: []dataplane.Driver{{
		Name:    "old",
		Inspect: func() (dataplane.Leftover, error) { return dataplane.Leftover{Rules: !removed}, nil },
		Sessions: func(ctx context.Context, _ dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
			return none{}.Sessions(ctx, s)
		},
		Remove: func(context.Context, dataplane.Config) error {
			removed = true
			return nil
		},
	}}})
	h.Start(&Plane{Name: "new", Dataplane: none{}})
	err := h.Switch(t.Context(), nil, func() (*Plane, error) { return nil, failed }, nil)
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	h.mu.Lock() // as the switch does at that moment
	err = h.Sync(t.Context(), model.NewState())
	h.mu.Unlock()
	if _, audited := h.Audit(t.Context(), model.NewState(), dataplane.Quick); err != nil || audited != nil || !removed {
		t.Errorf("%v, %v; leftovers are removed: %t", err, audited, removed)
	}
}
