package conntrack_test

import (
	"context"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// The tables in which the kernel tells outcomes are no reason to read all rules.
func TestOutcomes_ownTables(t *testing.T) {
	bed, read := testbed.Need(t, testbed.Spec{}), 0
	c := dataplane.Config{Fault: func(operation string) error {
		if operation == "nftables list" {
			read++
		}
		return nil
	}}
	var p dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = conntrack.Wrap(nftables.New)(c)
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
