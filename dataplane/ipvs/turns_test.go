package ipvs

import (
	"testing"

	"fairlead.dev/fairlead/internal/ipvs"
)

// Of more virtual servers than can be looked at, each has its turn before any has its second one. A server that begins
// to drain meanwhile does not wait.
func TestDrains_turns(t *testing.T) {
	t.Parallel()
	const servers = 5*maxLooked/2 + 1
	var d drains
	for n := range servers {
		d.begin(port(n))
	}
	if n := len(d.begun()); n != servers || len(d.begun()) > 0 {
		t.Errorf("%d virtual servers are fresh, want %d, once", n, servers)
	}
	for round := range 3 {
		seen := map[ipvs.Key]bool{}
		for looks := 0; len(seen) < servers; looks++ {
			keys := d.next()
			if len(keys) > maxLooked || looks > servers/maxLooked+1 {
				t.Fatalf("round %d, look %d: %d at once, %d seen", round, looks, len(keys), len(seen))
			}
			for _, key := range keys {
				if seen[key] {
					t.Errorf("round %d: %s has its turn twice", round, key)
				}
				seen[key] = true
			}
		}
	}
	for n := range servers {
		d.end(port(n))
	}
	if len(d.looked) > 0 || len(d.next()) > 0 {
		t.Error("something still drains")
	}
}
