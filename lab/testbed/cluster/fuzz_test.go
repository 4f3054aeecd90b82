package cluster

import (
	"path/filepath"
	"testing"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/testbed"
)

// Whatever the manifests hold, nothing panics, memory is bounded, and each Service has its addresses for itself.
func FuzzPlan(f *testing.F) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, part := range archive.Files {
			f.Add(part.Data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := New(&testbed.Bed{}) // a closed one: nothing starts
		for range 2 {
			var r *Result
			var services []*service
			allocs.Bound(t, len(data), func() { r, services, _ = c.plan([]Manifest{{"fuzz", data}}) })
			c.publish(r, services)
			owner := map[string]string{}
			for _, s := range services {
				for _, addr := range s.clusterIPs() {
					if other := owner[addr.String()]; other != "" {
						t.Errorf("%s belongs to %s and %s", addr, other, s.key())
					}
					owner[addr.String()] = s.key()
				}
			}
		}
	})
}
