package takeover_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// steady is the time between two attempts of each kind.
const steady = 10 * time.Millisecond

// Chains that kube-proxy makes for the Services, in both families.
const chains = `
1 chain (BACKEND ip mangle)
1 chain (BACKEND ip6 mangle)
16 chains (BACKEND ip nat)
16 chains (BACKEND ip6 nat)
2 counters (nfacct)
6 chains (BACKEND ip filter)
6 chains (BACKEND ip6 filter)
`

const kubeProxyTables = `
1 table (nftables ip kube-proxy)
1 table (nftables ip6 kube-proxy)
`

// modes are those that this kernel can have, with the back end of their iptables.
var modes = []struct{ name, mode, backend, left string }{
	{"iptables-legacy", "iptables", "legacy", strings.ReplaceAll(chains, "BACKEND", "iptables-legacy")},
	{"iptables-nft", "iptables", "nft", strings.ReplaceAll(chains, "BACKEND", "iptables-nft")},
	{"nftables", "nftables", "nft", kubeProxyTables},
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	for _, c := range modes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, c.backend)
			w.addForeign()
			before := w.snapshot()
			p := w.startKubeProxy(c.mode)
			l := w.startLoad(steady)
			l.await(100)
			p.stop()
			to := w.takeover(0)
			w.expectLeft(to, c.left)
			f := w.startFairlead()
			if c.mode == "iptables" {
				w.expectFirst(l)
			}
			l.await(100)
			w.remove(to)
			l.await(200)
			for _, v6 := range []bool{false, true} { // kube-proxy's last word was to refuse it
				if err := w.eventually(try{"client", late.clusterIP(v6), late.modelProtocol()}); err != nil {
					t.Error(err)
				}
			}
			l.endShort()
			l.endLong()
			f.audit()
			w.expectLeft(to, "")
			w.remove(to) // nothing
			f.clean()
			w.expect(before)
		})
	}
}

// expectFirst uses both translators at once, and is an error if kube-proxy's is asked for a connection.
func (w *world) expectFirst(l *load) {
	w.Helper()
	for _, tool := range []string{"iptables", "ip6tables"} {
		w.run("", tool, "-t", "nat", "-Z", "KUBE-SERVICES")
	}
	l.await(200)
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		for _, rule := range strings.Split(w.run("", tool, "-c", "-t", "nat"), "\n") {
			if strings.Contains(rule, "-j KUBE-S") && strings.Contains(rule, "dport") && !strings.HasPrefix(rule, "[0:0]") {
				w.Errorf("kube-proxy's rule goes before Fairlead's: %s", rule)
			}
		}
	}
}

// TestGoingBack is the way back in both orders: first fairlead clean, or first kube-proxy.
func TestGoingBack(t *testing.T) {
	t.Parallel()
	for _, c := range modes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, c.backend)
			w.addForeign()
			before := w.snapshot()
			w.startFairlead().clean()
			w.expect(before)
			to := w.takeover(0)

			p := w.startKubeProxy(c.mode) // it returns when all is served
			p.stop()
			w.expectLeft(to, c.left)
			w.remove(to)
			w.expect(before)

			f := w.startFairlead()
			p = w.startKubeProxy(c.mode)
			l := w.startLoad(steady)
			for end := time.Now().Add(patience); w.find(to) != strings.TrimPrefix(c.left, "\n"); {
				if time.Now().After(end) {
					t.Fatalf("kube-proxy beside Fairlead has only made\n%s", w.find(to))
				}
				l.await(1)
			}
			l.await(100)
			f.clean()
			l.await(200)
			p.stop()
			l.await(200)
			l.endShort()
			l.endLong()
			w.expectLeft(to, c.left)
			w.remove(to)
			w.expect(before)
		})
	}
}

// TestUsedByOthers: a chain to which a rule of others jumps stays, with the chains it needs.
func TestUsedByOthers(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"legacy", "nft"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, backend)
			w.run(`*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-SEP-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:CNI-HOSTPORT - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -j CNI-HOSTPORT
-A KUBE-SERVICES -j KUBE-SVC-ABCDEFGHIJKLMNOP
-A KUBE-SVC-ABCDEFGHIJKLMNOP -j KUBE-SEP-ABCDEFGHIJKLMNOP
-A KUBE-SEP-ABCDEFGHIJKLMNOP -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A CNI-HOSTPORT -j KUBE-MARK-MASQ
COMMIT
`, "iptables-restore")
			to := w.takeover(0)
			stays := strings.NewReplacer("BACKEND", backend).Replace(
				"1 chain KUBE-MARK-MASQ (iptables-BACKEND ip nat): a rule of chain CNI-HOSTPORT jumps to it, which kube-proxy did " +
					"not make; if nobody needs that rule, delete it (see iptables-BACKEND -t nat -S CNI-HOSTPORT) and run fairlead clean\n")
			w.expectLeft(to, stays+strings.ReplaceAll("3 chains (iptables-BACKEND ip nat)\n", "BACKEND", backend))
			w.remove(to)
			w.expectLeft(to, stays)
			want := "-P PREROUTING ACCEPT\n-P INPUT ACCEPT\n-P OUTPUT ACCEPT\n-P POSTROUTING ACCEPT\n" +
				"-N CNI-HOSTPORT\n-N KUBE-MARK-MASQ\n-A PREROUTING -j CNI-HOSTPORT\n-A CNI-HOSTPORT -j KUBE-MARK-MASQ\n" +
				"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n"
			if got := w.run("", "iptables", "-t", "nat", "-S"); got != want {
				t.Errorf("there is\n%s", got)
			}
		})
	}
}

// TestManyChains takes more than one transaction.
func TestManyChains(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"legacy", "nft"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, backend)
			w.addForeign()
			before := w.snapshot()
			text := ":KUBE-SERVICES - [0:0]\n"
			rules := "-A PREROUTING -j KUBE-SERVICES\n-I PREROUTING 1 -j KUBE-SERVICES\n"
			for i := range 2500 {
				chain := "KUBE-SVC-" + strings.NewReplacer("0", "A", "1", "B", "8", "I", "9", "J").Replace(fmt.Sprintf("%016d", i))
				text += ":" + chain + " - [0:0]\n"
				rules += fmt.Sprintf("-A KUBE-SERVICES -d 10.97.%d.%d -j %s\n-A %s -j RETURN\n", i>>8, i&255, chain, chain)
			}
			w.run("*nat\n"+text+rules+"COMMIT\n", "iptables-restore", "--noflush")
			to := w.takeover(0)
			w.expectLeft(to, "2501 chains (iptables-"+backend+" ip nat)\n")
			w.remove(to)
			w.expect(before)
		})
	}
}

// TestLooking: whoever looks makes nothing.
func TestLooking(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "legacy")
	to := w.takeover(0)
	w.expectLeft(to, "")
	w.remove(to)
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		if got := w.run("", "cat", "/proc/net/"+file); got != "" {
			t.Errorf("%s: %q", file, got)
		}
	}
	if got := w.run("", "nft", "list", "ruleset"); got != "" {
		t.Errorf("there is\n%s", got)
	}
}
