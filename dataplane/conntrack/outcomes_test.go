package conntrack_test

import (
	"context"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// The tables in which the kernel tells outcomes are no reason to read all rules.
func TestOutcomes_ownTables(t *testing.T) {
	for name, plane := range map[string]dataplane.New{
		"nftables": nftables.New, "iptables": iptables.New(iptables.Options{Backend: iptables.NFTables}),
	} {
		t.Run(name, func(t *testing.T) { testOwnTables(t, plane, name+" list") })
	}
}

func testOwnTables(t *testing.T, plane dataplane.New, reads string) {
	bed, read := testbed.Need(t, testbed.Spec{}), 0
	c := dataplane.Config{Fault: func(operation string) error {
		if operation == reads {
			read++
		}
		return nil
	}}
	var p dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = conntrack.Wrap(plane)(c)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s, ctx := model.NewState(), context.Background()
	if err := p.Sync(ctx, s); err != nil {
		t.Fatal(err)
	}
	if read == 0 {
		t.Fatalf("the first Sync has no step %q", reads)
	}
	read = 0
	for _, answers := range []bool{false, true, false} {
		if err := p.Outcomes(ctx, answers, func(model.Outcome) {}); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Audit(ctx, s, dataplane.Quick); err != nil || read > 0 {
			t.Fatalf("with answers %t: the audit has read %d tables, %v", answers, read, err)
		}
	}
}
