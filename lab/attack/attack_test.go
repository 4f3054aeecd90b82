package attack

import (
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// attack is one thing that is tried. The table has its texts.
type attack struct {
	name  string
	who   actor
	does  string  // what is tried
	stops string  // what stops it
	on    []plane // to which it applies; nil: to all
	api   bool    // the objects come from an API server
	flags []string
	act   func(*stage)
	told  []string                      // what the log and the status name
	look  func(*stage) (wrong []string) // at what else must be, before the attack ends
}

// actor is the party that carries out an attack.
type actor string

const (
	aTenant    actor = "tenant"
	aClient    actor = "client"
	aPod       actor = "pod"
	aUser      actor = "local user"
	anOperator actor = "operator"
	theServer  actor = "API server"
)

func (a attack) appliesTo(p plane) bool { return a.on == nil || slices.Contains(a.on, p) }

// parts is in how many runs all cells are tried.
const parts = 10

// cell is an attack on a data plane.
type cell struct {
	attack
	on plane
}

// cells are those of this run.
func cells(t *testing.T) (all []cell) {
	for _, a := range attacks {
		for _, p := range planes {
			if a.appliesTo(p) {
				all = append(all, cell{a, p})
			}
		}
	}
	return sample.Of(t, parts, all)
}

// TestAttacks tries them, each plane's one after the other. IPVS is tried in the test kernel where this one has none.
func TestAttacks(t *testing.T) {
	t.Cleanup(func() { measured.write(t) })
	for _, p := range planes {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			if _, err := os.Stat("/proc/net/ip_vs"); p == ipvs && err != nil {
				out := vm.Replay(t, "IPVS", "^TestAttacks$/^ipvs$/"+chosen())
				t.Log(out)
				measured.parse(out)
				return
			}
			// It never rests, so that what takes long there is the machine's doing.
			control := newStage(t, nftables, false, "--iptables-min-sync-period=0s").change()
			for _, c := range cells(t) {
				if c.on == p {
					t.Run(c.name, func(t *testing.T) { c.test(t, control) })
				}
			}
		})
	}
}

// chosen is the pattern of attacks that -run has; empty: all.
func chosen() string {
	parts := strings.SplitN(flag.Lookup("test.run").Value.String(), "/", 3)
	if len(parts) < 3 {
		return ""
	}
	return parts[2]
}

func (c cell) test(t *testing.T, control *changes) {
	v := c.try(newStage(t, c.on, c.api, c.flags...), control)
	line := v.line(c)
	t.Log(line)
	measured.parse(line)
	for _, wrong := range v.wrong {
		t.Error(wrong)
	}
}
