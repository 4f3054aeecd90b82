package outcomes_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/outcomes"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

// Each connection is told as what it was, once, and answers only when they are asked for. The tables go with the socket.
func TestWatch(t *testing.T) {
	t.Parallel()
	bed := newBed(t, 0)
	outcomestest.Run(t, bed, open(t, bed).Take)
}

func open(t *testing.T, bed *testbed.Bed) *outcomes.Watch {
	t.Helper()
	w := &outcomes.Watch{}
	err := bed.Do(testbed.Node, func() (err error) {
		w.Network, err = namespace.Here()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		again := outcomes.Watch{Network: w.Network}
		if err := again.Take(false, nil); err != nil {
			t.Errorf("the tables have not gone with the socket: %v", err)
		}
		if err := errors.Join(again.Close(), w.Network.Close()); err != nil {
			t.Error(err)
		}
	})
	return w
}

// newBed has so many Services beside those of the test.
func newBed(t testing.TB, others int) *testbed.Bed {
	t.Helper()
	bed := outcomestest.NewBed(t, false)
	err := bed.Do(testbed.Node, func() error {
		p, err := nftables.New(dataplane.Config{})
		if err != nil {
			return err
		}
		t.Cleanup(func() {
			if err := errors.Join(p.Remove(context.Background()), p.Close()); err != nil {
				t.Error(err)
			}
		})
		rows := outcomestest.Rows(t, "never")
		outcomestest.AddServices(rows, others)
		return p.Sync(t.Context(), rows)
	})
	if err != nil {
		t.Fatal(err)
	}
	return bed
}
