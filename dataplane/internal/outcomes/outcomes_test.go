package outcomes_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/outcomes"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

// Each connection is told as what it was, once, and answers only when they are asked for. The tables go with the socket.
func TestWatch(t *testing.T) {
	t.Parallel()
	bed := newBed(t, 0)
	outcomestest.Run(t, bed, open(t, bed).Take)
}

// An error that comes back is no answer.
func TestWatch_unreachable(t *testing.T) {
	t.Parallel()
	bed := newBed(t, 0)
	w, told := open(t, bed), map[string]bool{}
	take := func() error {
		return w.Take(true, func(o model.Outcome) { told[fmt.Sprintf("%s %s %s", o.Protocol, o.To, o.Result)] = true })
	}
	eventually.Nil(t, "outcomes are told", func() error {
		err := take()
		if err == nil && len(told) == 0 {
			probe := testbed.Probe{From: "client", Protocol: model.UDP, To: netip.MustParseAddrPort("10.96.0.4:53")}
			_, err = bed.Probe(t.Context(), probe)
			err = errors.Join(err, take())
		}
		if err == nil && len(told) == 0 {
			err = errors.New("nothing is told")
		}
		return err
	})
	if len(told) != 1 || !told["udp 10.96.0.4:53 refused"] {
		t.Errorf("told is %v", told)
	}
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
		rows, err := model.ParseState(outcomestest.Rows(t, "never").String() +
			"frontend 10.96.0.4:53/udp any forward default/closed cluster snat never\n")
		if err != nil {
			return err
		}
		outcomestest.AddServices(rows, others)
		return p.Sync(t.Context(), rows)
	})
	if err != nil {
		t.Fatal(err)
	}
	return bed
}
