package ebpf_test

import (
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/outcomestest"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// TestOutcomes has the node and a pod ask by sockets, and a client outside by packets.
func TestOutcomes(t *testing.T) {
	for _, c := range []struct {
		name, snat string
		options    ebpf.Options
	}{
		{"sockets", "never", ebpf.Options{}},
		{"hidden", "always", ebpf.Options{}},
		{"node only", "never", ebpf.Options{OnlyNode: true}},
		{"no places", "never", ebpf.Options{Sizes: ebpf.Sizes{Sockets: 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			bed := cluster{outcomestest.NewBed(t, true), t, filepath.Join(testbed.NeedBPFFS(t), "fairlead")}
			p := bed.openAs(c.options)
			t.Cleanup(func() { check(t, p.Close()) })
			check(t, p.Sync(t.Context(), outcomestest.Rows(t, c.snat)))
			outcomestest.Run(t, bed.Bed, func(answers bool, f func(model.Outcome)) error {
				return p.Outcomes(t.Context(), answers, f)
			})
		})
	}
}
