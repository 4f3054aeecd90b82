package takeover

import (
	"fmt"
	"strings"
	"testing"
)

func TestOwnedChain(t *testing.T) {
	t.Parallel()
	for chain, where := range map[string]string{ // the tables in which it is kube-proxy's
		"KUBE-SERVICES":              "nat filter mangle",
		"KUBE-PROXY-CANARY":          "nat filter mangle",
		"KUBE-SVC-NPX46M4PTMTKRN6Y":  "nat filter mangle",
		"KUBE-XLB-NPX46M4PTMTKRN6Y":  "nat filter mangle",
		"KUBE-SVC-NPX46M4PTMTKRN6":   "",
		"KUBE-SVC-npx46m4ptmtkrn6y":  "",
		"KUBE-SVC-NPX46M4PTMTKRN6Y1": "",
		"KUBE-FIREWALL":              "nat", // in filter it is kubelet's
		"KUBE-MARK-DROP":             "",
		"KUBE-KUBELET-CANARY":        "",
		"KUBE-IPTABLES-HINT":         "",
		"KUBE-HOSTPORTS":             "",
		"KUBE-HP-NPX46M4PTMTKRN6Y":   "",
		"KUBE-ROUTER-FORWARD":        "",
		"KUBE-PORTALS-HOST":          "nat filter mangle",
	} {
		var owned []string
		for _, table := range tables {
			if ownedChain(table, chain) {
				owned = append(owned, table)
			}
		}
		if got := strings.Join(owned, " "); got != where {
			t.Errorf("%s is kube-proxy's in %q, should be in %q", chain, got, where)
		}
	}
}

func TestParseFlow(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"TCP C0000209 C350 0A60000A 0050 0AF40102 1F90 ESTABLISHED     899": "6 192.0.2.9:50000 10.96.0.10:80",
		"UDP fd00:0000:0000:0000:0000:0000:c000:0209 C350 fd00:0000:0000:0000:0000:0000:0a60:000b 0035 " +
			"fd00:0000:0000:0000:0000:0000:0af4:0102 14E9 UDP             299": "17 [fd00::c000:209]:50000 [fd00::a60:b]:53",
		"Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData": "",
		"": "",
	} {
		got := ""
		if f, ok := parseFlow(line); ok {
			got = fmt.Sprintf("%d %s %s", f.protocol, f.client, f.assigned)
		}
		if got != want {
			t.Errorf("%q is %q, should be %q", line, got, want)
		}
	}
}
