package takeover_test

import (
	"regexp"
	"strings"
)

// foreign are rules of other programs in iptables: kubelet, a firewall with chains and counts, and a program whose
// chain's name begins like kube-proxy's.
const foreign = `*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-SEPARATE - [0:0]
:SITE-FORWARD - [0:0]
:SITE-LOG - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
[0:0] -A KUBE-FIREWALL ! -s LOOPBACK -d LOOPBACK -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
[4:240] -A FORWARD -s NOBODY -j SITE-FORWARD
[7:420] -A SITE-FORWARD -s NOBODY -p tcp -m multiport --dports 22,443 -m comment --comment "site rule" -j SITE-LOG
[3:180] -A SITE-FORWARD -s NOBODY -g SITE-LOG
[2:120] -A SITE-FORWARD -s NOBODY
[1:60] -A SITE-LOG -s NOBODY -m limit --limit 5/min -j ACCEPT
[9:540] -A KUBE-SEPARATE -s NOBODY -j RETURN
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:SITE-NAT - [0:0]
:KUBE-MARK-DROP - [0:0]
[5:300] -A POSTROUTING -s NOBODY -j SITE-NAT
[6:360] -A SITE-NAT -s NOBODY -m statistic --mode random --probability 0.5 -j ACCEPT
COMMIT
`

// foreignTable is what others have in nftables.
const foreignTable = `table inet site {
	chain filter {
		type filter hook forward priority filter - 5; policy accept;
		ip saddr 198.18.0.7 counter packets 11 bytes 660 drop
	}
}
`

func (w *world) addForeign() {
	w.Helper()
	for tool, addresses := range map[string][2]string{
		"iptables-restore":  {"198.18.0.7/32", "127.0.0.0/8"},
		"ip6tables-restore": {"2001:db8::7/128", "::1/128"},
	} {
		w.run(strings.NewReplacer("NOBODY", addresses[0], "LOOPBACK", addresses[1]).Replace(foreign), tool, "-c")
	}
	w.run(foreignTable, "nft", "-f", "-")
	w.run("", "ipset", "create", "KUBE-SITE", "hash:ip")
}

// passing are counters that traffic changes, and times.
var passing = regexp.MustCompile(`(?m)^#.*\n|^\[\d+:\d+\] (-A (?:INPUT|OUTPUT|KUBE-FIREWALL))|(^:\w+ ACCEPT) .*|(counter) packets \d+ bytes \d+ (jump KUBE-FIREWALL)`)

// snapshot is all that can be seen of what the takeover deals with.
func (w *world) snapshot() map[string]string {
	w.Helper()
	seen := map[string]string{}
	for _, c := range []string{"iptables-save -c", "ip6tables-save -c", "nft list ruleset",
		"ipset list",
		"ip -o address show", "ip route show table local", "ip -6 route show table local"} {
		out := w.run("", strings.Fields(c)...)
		seen[c] = passing.ReplaceAllString(out, "$1$2$3 $4")
	}
	return seen
}

// expect compares with an earlier snapshot.
func (w *world) expect(before map[string]string) {
	w.Helper()
	for c, now := range w.snapshot() {
		if now != before[c] {
			w.Errorf("%s: was\n%s\nis now\n%s", c, before[c], now)
		}
	}
}
