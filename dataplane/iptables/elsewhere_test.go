package iptables

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/lab/testbed/nstest"
)

func leftover(t *testing.T) dataplane.Leftover {
	t.Helper()
	found, err := inspect()
	check(t, err)
	return found
}

// otherOne is the back end that is not b.
func otherOne(b Backend) Backend {
	if b == Legacy {
		return NFTables
	}
	return Legacy
}

// A plane takes over from one that used the other back end.
func TestPlane_elsewhere(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		before := parse(t, everything)
		after := parse(t, strings.ReplaceAll(everything, "10.244.2.13", "10.244.2.14")) // and so other ipsets
		tool(t, otherOne(b), "iptables-restore", others, "--counters")
		untouched := foreign(t, otherOne(b))
		p := newPlane(t, Options{Backend: otherOne(b)}, dataplane.Config{})
		check(t, errors.Join(p.Sync(context.Background(), before), p.Close()))
		if got := leftover(t); got != (dataplane.Leftover{Rules: true, LocalnetWasOff: true}) {
			t.Errorf("traces: %+v", got)
		}

		p = newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), after))
		if got := save(t, otherOne(b)); strings.Contains(got, "KUBE-") && !strings.Contains(got, "like KUBE-") {
			t.Errorf("in %s there is left\n%s", otherOne(b), got)
		}
		if got := foreign(t, otherOne(b)); got != untouched {
			t.Errorf("others have\n%s\nnot\n%s", got, untouched)
		}
		if drifts := audit(t, b, after); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		routeLocalnet(t, "1")
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
		routeLocalnet(t, "0") // as before the first of the two
		if got := leftover(t); got != (dataplane.Leftover{}) {
			t.Errorf("traces after Remove: %+v", got)
		}
	})
}

func routeLocalnet(t *testing.T, want string) {
	t.Helper()
	if text, err := os.ReadFile(localnet.File); err != nil || strings.TrimSpace(string(text)) != want {
		t.Errorf("route_localnet: %s, %v; want %s", text, err, want)
	}
}

// The process that cleans up need not know which back end was in use.
func TestClean(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		p := newPlane(t, Options{Backend: b}, dataplane.Config{LocalnetWasOff: true})
		check(t, errors.Join(p.Sync(context.Background(), parse(t, everything)), p.Close()))
		check(t, Driver(Options{}).Remove(context.Background(), dataplane.Config{KeepLocalnet: true}))
		routeLocalnet(t, "1")
		if got := save(t, b); strings.Contains(got, "KUBE-") {
			t.Errorf("Clean left\n%s", got)
		}
		check(t, Driver(Options{}).Remove(context.Background(), dataplane.Config{}))
	})
}

// Where iptables was never used, looking makes no tables.
func TestLeftover_nothing(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		if got := leftover(t); got != (dataplane.Leftover{}) {
			t.Errorf("traces: %+v", got)
		}
		check(t, Driver(Options{}).Remove(context.Background(), dataplane.Config{}))
		for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
			if names, err := os.ReadFile("/proc/thread-self/net/" + file); err == nil && len(names) > 0 {
				t.Errorf("%s: %s", file, names)
			}
		}
	})
}

// comesBack is what kube-proxy does to the table when it starts again: it writes the chains that both have, and
// deletes those that it takes for its own.
const comesBack = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -j KUBE-NODEPORTS
-A KUBE-SVC-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.244.9.9:80
-A KUBE-POSTROUTING -j RETURN
COMMIT
`

// The plane leaves chains that kube-proxy has taken over to it.
func TestPlane_kubeProxyIsBack(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		s := parse(t, everything)
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, p.Sync(context.Background(), s))
		for chain := range strings.SplitSeq(save(t, b, "-t", "nat"), "\n:") {
			name, _, _ := strings.Cut(chain, " ")
			if strings.HasPrefix(name, "KUBE-SVC-") || strings.HasPrefix(name, "KUBE-SEP-") {
				t.Errorf("kube-proxy would delete chain %s, and fail", name)
			}
		}
		tool(t, b, "iptables-restore", comesBack, "--noflush")
		check(t, p.Remove(context.Background()))
		nat := tool(t, b, "iptables-save", "", "-t", "nat")
		for _, kept := range []string{":KUBE-SERVICES", ":KUBE-SVC-", ":KUBE-POSTROUTING", "-A PREROUTING", "-A KUBE-SERVICES -j KUBE-NODEPORTS"} {
			if !strings.Contains(nat, kept) {
				t.Errorf("kube-proxy's %q is gone; there is\n%s", kept, nat)
			}
		}
		if strings.Contains(nat, "KUBE-IP-") || strings.Contains(nat, chainIn) {
			t.Errorf("Remove left\n%s", nat)
		}
		if other := tool(t, b, "iptables-save", "", "-t", "filter"); strings.Contains(other, "KUBE-") {
			t.Errorf("Remove left\n%s", other)
		}
		check(t, p.Sync(context.Background(), s)) // and back again
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
		check(t, errors.Join(p.Remove(context.Background()), p.Close()))
		if left := save(t, b); strings.Contains(left, ":KUBE-") {
			t.Errorf("Remove left\n%s", left)
		}
	})
}

// Others may change a table between the look and the removal.
func TestPlace_changedMeanwhile(t *testing.T) {
	onBoth(t, func(t *testing.T, b Backend) {
		p := newPlane(t, Options{Backend: b}, dataplane.Config{})
		check(t, errors.Join(p.Sync(context.Background(), parse(t, everything)), p.Close()))
		l, err := openPlace(b, p.config)
		check(t, err)
		found, err := l.find()
		check(t, err)
		tool(t, b, "iptables", "", "-t", "nat", "-I", "PREROUTING", "-p", "tcp", "-j", "ACCEPT")
		check(t, errors.Join(l.clear(context.Background(), found), l.close()))
		if got := save(t, b); strings.Contains(got, "KUBE-") || !strings.Contains(got, "-A PREROUTING -p tcp -j ACCEPT") {
			t.Errorf("there is left\n%s", got)
		}
	})
}
