package takeover_test

import (
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/takeover"
)

// BenchmarkLooking is the cost of a look without anything of kube-proxy's: on an empty node, and beside 10,000 chains
// of another program.
func BenchmarkLooking(b *testing.B) {
	for _, backend := range []string{"legacy", "nft"} {
		for _, n := range []int{0, 10_000} {
			b.Run(fmt.Sprintf("backend=%s/chains=%d", backend, n), func(b *testing.B) {
				bed := testbed.Need(b, testbed.Spec{})
				var rules strings.Builder
				rules.WriteString("*nat\n")
				for i := range n {
					fmt.Fprintf(&rules, ":SITE-%d - [0:0]\n-A SITE-%d -p tcp --dport 80 -j ACCEPT\n", i, i)
				}
				rules.WriteString("COMMIT\n")
				c := bed.Command(b.Context(), testbed.Node, "/usr/sbin/xtables-"+backend+"-multi", "iptables-restore")
				c.Stdin = strings.NewReader(rules.String())
				if out, err := c.CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				var to *takeover.Takeover
				err := bed.Do(testbed.Node, func() (err error) {
					to, err = takeover.New(takeover.Config{KeepForward: true})
					return err
				})
				if err != nil {
					b.Fatal(err)
				}
				defer to.Close()
				b.Run("find", func(b *testing.B) {
					for b.Loop() {
						if found, err := to.Find(b.Context()); err != nil || len(found) > 0 {
							b.Fatal(found, err)
						}
					}
				})
				b.Run("glance", func(b *testing.B) {
					for b.Loop() {
						if back, err := to.Returned(b.Context()); err != nil || back {
							b.Fatal(back, err)
						}
					}
				})
			})
		}
	}
}
