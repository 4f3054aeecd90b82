package takeover_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/takeover"
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
				if err := w.reaches(try{"client", late.clusterIP(v6), late.modelProtocol()}); err != nil {
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

// expectFirst uses both translators at once, and is an error if kube-proxy's is not asked first. Fairlead's leftovers
// must not stand in the way of a kube-proxy that comes back.
func (w *world) expectFirst(l *load) {
	w.Helper()
	for _, tool := range []string{"iptables", "ip6tables"} {
		w.run("", tool, "-t", "nat", "-Z", "KUBE-SERVICES")
	}
	l.await(200)
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		for _, rule := range strings.Split(w.run("", tool, "-c", "-t", "nat"), "\n") {
			if strings.Contains(rule, "-j KUBE-S") && strings.Contains(rule, "dport") && strings.HasPrefix(rule, "[0:0]") {
				w.Errorf("Fairlead's rule goes before kube-proxy's: %s", rule)
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
			eventually.Equal(t, "kube-proxy beside Fairlead has made", strings.TrimPrefix(c.left, "\n"), func() string {
				l.await(1)
				return w.find(to)
			})
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
				"1 chain KUBE-MARK-MASQ (iptables-BACKEND ip nat): another program's rule in chain CNI-HOSTPORT jumps to it; if that " +
					"rule is not needed, delete it (see iptables-BACKEND -t nat -S CNI-HOSTPORT) and run fairlead clean\n")
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

// TestLooking: a look makes no objects.
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

// closed are ways to let nothing pass through FORWARD that no rule accepts.
var closed = map[string]string{
	"policy": "-P FORWARD DROP",
	"reject": "-A FORWARD -j REJECT",
	"drop":   "-A FORWARD -j DROP",
}

// TestForward: where FORWARD lets nothing pass but what pods send, KUBE-FORWARD is what lets
// connections to NodePorts, and answers to them, pass.
func TestForward(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"legacy", "nft"} {
		for name, rule := range closed {
			t.Run(backend+"/"+name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, backend)
				for i, tool := range []string{"iptables", "ip6tables"} {
					w.run("", tool, "-A", "FORWARD", "-s", testbed.ClusterCIDRs()[i].String(), "-j", "ACCEPT")
					w.run("", append([]string{tool}, strings.Fields(rule)...)...)
				}
				before := w.forward()
				to, cleaner := w.keeper(), w.takeover(0)
				w.expectBlocked(to, "iptables-"+backend+" ip\niptables-"+backend+" ip6\n")
				p := w.startKubeProxy("iptables")
				l := w.startLoad(steady)
				l.await(50)
				p.stop()
				w.expectBlocked(to, "")
				during := w.forward()
				f := w.startFairlead()
				w.remove(to)
				l.await(200)
				l.endShort()
				l.endLong()
				w.expectLeft(to, strings.ReplaceAll(forwardStays, "BACKEND", backend))
				w.expectBlocked(to, "")
				if got := w.forward(); !strings.Contains(got, "-j KUBE-FORWARD") ||
					!strings.Contains(during, "-j KUBE-SERVICES") || strings.Contains(got, "-j KUBE-SERVICES") {
					t.Errorf("there were\n%s\nand are\n%s", during, got)
				}
				w.remove(to)
				w.expectLeft(to, strings.ReplaceAll(forwardStays, "BACKEND", backend))
				if name == "policy" { // the test opens FORWARD
					w.run("", "iptables", "-P", "FORWARD", "ACCEPT")
					if left := w.find(to); !strings.Contains(left, "1 chain (iptables-"+backend+" ip filter)\n") {
						t.Errorf("with an open FORWARD there is\n%s", left)
					}
					w.run("", "iptables", "-P", "FORWARD", "DROP")
				}
				w.remove(cleaner)
				w.expectLeft(to, "")
				if got := w.forward(); got != before {
					t.Errorf("there were\n%s\nand are\n%s", before, got)
				}
				w.expectBlocked(to, "iptables-"+backend+" ip\niptables-"+backend+" ip6\n")
				f.clean()
			})
		}
	}
}

// forwardStays is what there is when the rest is gone.
const forwardStays = `1 chain KUBE-FORWARD (iptables-BACKEND ip filter): without it, chain FORWARD would drop packets of Services; ` +
	`have the CNI plug-in, or your own rules, accept packets from and to pods, then delete its rule in FORWARD ` +
	`(see iptables-BACKEND -S FORWARD)
1 chain KUBE-FORWARD (iptables-BACKEND ip6 filter): without it, chain FORWARD would drop packets of Services; ` +
	`have the CNI plug-in, or your own rules, accept packets from and to pods, then delete its rule in FORWARD ` +
	`(see ip6tables-BACKEND -S FORWARD)
1 counter (nfacct): chain KUBE-FORWARD counts with it
`

func (w *world) forward() string {
	w.Helper()
	return w.run("", "iptables", "-S", "FORWARD") + w.run("", "ip6tables", "-S", "FORWARD")
}

// keeper is a takeover that keeps KUBE-FORWARD.
func (w *world) keeper() *takeover.Takeover {
	w.Helper()
	return w.takeoverWith(takeover.Config{Log: w.logger(), KeepForward: true})
}

func (w *world) expectBlocked(t *takeover.Takeover, want string) {
	w.Helper()
	blocked, err := t.Blocked(w.Context())
	got := ""
	for _, b := range blocked {
		got += b + "\n"
	}
	if err != nil || got != want {
		w.Errorf("blocked is\n%s instead of\n%s (%v)", got, want, err)
	}
}
