package userspace

import (
	"bytes"
	"testing"

	"fairlead.dev/fairlead/internal/nft"
)

// Where packets are redirected, the rules have no expression that a kernel without TPROXY may lack, too.
func TestChains_redirected(t *testing.T) {
	for _, redirectAll := range []bool{false, true} {
		for _, f := range nft.Families {
			var tx nft.Transaction
			table := newTable(f, 1<<15, listening{redirectAll: redirectAll}, &tx)
			if err := table.Structure(table.chains()); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"socket", "fib", "tproxy"} {
				if has := bytes.Contains(tx.B, append([]byte(name), 0)); has == redirectAll {
					t.Errorf("%s, all are redirected: %t: has %s: %t", f.Name, redirectAll, name, has)
				}
			}
		}
	}
}
