package takeover_test

import (
	"strings"
	"testing"

	"fairlead.dev/fairlead/takeover"
)

// sharedChains are some that both kube-proxy and Fairlead make in a back end of iptables, and what only kube-proxy
// makes.
const sharedChains = `*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
COMMIT
`

const canary = "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"

// TestSpare: where the chains are the caller's, only the canary tells that kube-proxy is there.
func TestSpare(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"legacy", "nft"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, backend)
			w.run(sharedChains, "iptables-restore", "--noflush")
			before := w.run("", "iptables-save", "-t", "nat") + w.run("", "iptables-save", "-t", "filter")
			excluded := "iptables-" + backend
			to := w.takeoverWith(takeover.Config{Spare: func(backend string) bool { return backend == excluded }})
			returned := func(want bool) {
				t.Helper()
				if got, err := to.Returned(t.Context()); got != want || err != nil {
					t.Errorf("glance: %t, %v; want %t", got, err, want)
				}
			}
			w.expectLeft(to, "")
			returned(false)
			w.run(canary, "iptables-restore", "--noflush")
			returned(true)
			w.expectLeft(to, "1 chain ("+excluded+" ip mangle)\n")
			w.remove(to)
			w.expectLeft(to, "")
			returned(false)
			after := w.run("", "iptables-save", "-t", "nat") + w.run("", "iptables-save", "-t", "filter")
			if without(after) != without(before) {
				t.Errorf("there was\n%s\nand is\n%s", before, after)
			}
			excluded = "" // they are not the caller's any more
			returned(true)
			w.expectLeft(to, "1 chain (iptables-"+backend+" ip filter)\n1 chain (iptables-"+backend+" ip nat)\n")
			w.remove(to)
			w.expectLeft(to, "")
		})
	}
}

// without leaves out the time, which iptables-save prints.
func without(text string) (kept string) {
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") {
			kept += line
		}
	}
	return kept
}
