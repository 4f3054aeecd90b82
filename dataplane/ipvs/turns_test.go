package ipvs

import (
	"slices"
	"testing"
)

// Virtual servers are made from the last one listed to the first; what is left of them after somebody has deleted most
// is no list to go by.
func TestPlaces(t *testing.T) {
	t.Parallel()
	var p places
	p.note([]serverKey{port(7), port(3), port(9), port(5)})
	p.note([]serverKey{port(5)})
	got, want := []serverKey{port(3), port(5), port(7), port(9)}, []serverKey{port(5), port(9), port(3), port(7)}
	if slices.SortFunc(got, p.compare); !slices.Equal(got, want) {
		t.Errorf("made in the order %v, want %v", got, want)
	}
	p.note([]serverKey{port(5), port(3)})
	if p.compare(port(3), port(5)) >= 0 {
		t.Error("the list of most is not what it goes by")
	}
}

// Of more virtual servers than can be looked at, each has its turn before any has its second one; what begins to drain
// meanwhile waits for nobody.
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
		seen := map[serverKey]bool{}
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
