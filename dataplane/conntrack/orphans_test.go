package conntrack_test

import (
	"errors"
	"os"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestOrphans(t *testing.T) { testOrphans(t, outcomestest.Orphans.Run) }

func TestCloseIdle(t *testing.T) { testOrphans(t, outcomestest.Orphans.RunIdle) }

func testOrphans(t *testing.T, run func(outcomestest.Orphans, dataplane.Dataplane)) {
	for name, newPlane := range map[string]dataplane.New{
		"nftables": nftables.New, "iptables": iptables.New(iptables.Options{Backend: iptables.NFTables}),
	} {
		for _, snat := range []string{"never", "always"} {
			t.Run(name+" snat "+snat, func(t *testing.T) {
				t.Parallel()
				bed, read := outcomestest.NewOrphansBed(t, false), 0
				c := dataplane.Config{Fault: func(operation string) error {
					if operation == name+" list" {
						read++
					}
					return nil
				}}
				var p dataplane.Dataplane
				err := bed.Do(testbed.Node, func() (err error) {
					if snat == "always" { // an idle connection is forgotten as soon as one that is not acknowledged
						const timeout = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
						if err := os.WriteFile(timeout, []byte("120"), 0); err != nil {
							return err
						}
					}
					p, err = conntrack.Wrap(newPlane)(c)
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := errors.Join(p.Remove(t.Context()), p.Close()); err != nil {
						t.Error(err)
					}
				})
				run(outcomestest.Orphans{
					TB: t, Bed: bed, SNAT: snat, From: []testbed.Place{testbed.Node, "client", testbed.Outside},
				}, p)
				read = 0
				if _, err := p.Audit(t.Context(), model.NewState(), dataplane.Quick); err != nil || read > 0 {
					t.Errorf("after the process has changed tables of its own, the audit has read %d tables, %v", read, err)
				}
			})
		}
	}
}
