package outcomes_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/outcomes"
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

func open(t *testing.T, bed *testbed.Bed) (w *outcomes.Watch) {
	t.Helper()
	err := bed.Do(testbed.Node, func() (err error) {
		w, err = outcomes.Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		err := bed.Do(testbed.Node, func() error {
			again, err := outcomes.Open()
			if err == nil {
				err = again.Close()
			}
			return err
		})
		if err != nil {
			t.Errorf("the tables have not gone with the socket: %v", err)
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
