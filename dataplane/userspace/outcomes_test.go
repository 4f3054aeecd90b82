package userspace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestOutcomes(t *testing.T) { byEachWay(t, testOutcomes) }

func testOutcomes(t *testing.T, way userspace.Redirect) {
	t.Parallel()
	n := &node{TB: t, bed: outcomestest.NewBed(t, false)}
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.Driver(userspace.Options{Redirect: way}, legacyTables(), nil).Open(dataplane.Config{})
		return err
	})
	t.Cleanup(func() { n.plane.Close() })
	n.resync(outcomestest.Rows(t, "never"))
	outcomestest.Run(t, n.bed, func(answers bool, f func(model.Outcome)) error {
		return n.plane.Outcomes(t.Context(), answers, f)
	})
}

// TestOutcomes_tried has connections and flows of which one backend is not there.
func TestOutcomes_tried(t *testing.T) {
	n := start(t, userspace.Options{})
	n.nft("add table ip unplugged\n" +
		"add chain ip unplugged out { type filter hook postrouting priority 0; }\n" +
		"add rule ip unplugged out ip daddr 10.244.1.11 tcp dport 8080 drop\n")
	n.sync("tcp", "10.244.1.11:8080", "10.244.2.13:8080")
	n.told(true)
	begun := time.Now()
	if who := n.answers(model.TCP); who != "pod-b" {
		t.Fatal(who)
	}
	n.told(true, "tcp 10.244.2.13:8080 answered", "tcp 10.244.1.11:8080 unanswered")
	if took := time.Since(begun); took < time.Second {
		t.Errorf("a backend that has not answered for %v may be slow", took)
	}
	n.sync("udp", "10.244.1.11:9", "10.244.2.13:5353")
	if who := n.answers(model.UDP); who != "pod-b" {
		t.Fatal(who)
	}
	n.told(false, "udp 10.244.1.11:9 refused", "udp 10.244.2.13:5353 answered")
}

// TestOutcomes_silentFlow has a client send again and again. Two datagrams at once, as of resolvers, are no failure.
func TestOutcomes_silentFlow(t *testing.T) {
	n := start(t, userspace.Options{})
	backend := n.silent()
	n.sync("udp", backend)
	n.told(false)
	client := n.datagrams("client", "10.244.1.20:0")
	send := func() {
		t.Helper()
		if _, err := client.WriteToUDPAddrPort([]byte("?"), netip.MustParseAddrPort(service)); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	var all []model.Outcome
	eventually.Taking(time.Second).True(t, "silence is told", func() bool {
		send()
		err := n.plane.Outcomes(t.Context(), false, func(o model.Outcome) { all = append(all, o) })
		return err != nil || len(all) > 0
	})
	if took := time.Since(begun); took < time.Second || all[0].Result != model.Unanswered {
		t.Errorf("after %v it was told: %v", took, all)
	}
	send()
	n.told(false)
}

// told waits for these outcomes, in whatever order, and no others.
func (n *node) told(answers bool, want ...string) {
	n.Helper()
	var all []string
	eventually.Nil(n, "outcomes are told", func() error {
		err := n.plane.Outcomes(n.Context(), answers, func(o model.Outcome) {
			all = append(all, fmt.Sprintf("%s %s %s", o.Protocol, o.Backend, o.Result))
		})
		slices.Sort(all)
		slices.Sort(want)
		if err == nil && !slices.Equal(all, want) {
			err = fmt.Errorf("told: %v; want %v", all, want)
		}
		return err
	})
}

// TestOutcomes_takenBack: what was told before the plane came into force is not told afterwards.
func TestOutcomes_takenBack(t *testing.T) {
	n := start(t, userspace.Options{})
	s := n.sync("tcp", "10.244.1.11:9")
	n.told(false)
	refused := func() {
		t.Helper()
		if who := n.answers(model.TCP); who == "pod-a" {
			t.Fatal(who)
		}
	}
	refused()
	n.told(false, "tcp 10.244.1.11:9 refused")
	refused()
	for _, stage := range []dataplane.Stage{dataplane.Draining, dataplane.Standby, dataplane.Active} {
		if stage == dataplane.Active {
			n.resync(s)
		}
		if _, err := n.plane.SetStage(t.Context(), s, stage); err != nil {
			t.Fatal(err)
		}
	}
	n.told(false)
	refused()
	n.told(false, "tcp 10.244.1.11:9 refused")
}
