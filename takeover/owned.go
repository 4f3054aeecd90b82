package takeover

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// family is an address family as its parts of the kernel know it.
type family struct {
	name     string // as nft prints it
	number   uint8
	v6       bool
	prefix   string // of the commands ip…tables
	setsName string // how the names of its ip sets begin
}

var families = []family{
	{name: "ip", number: unix.NFPROTO_IPV4, prefix: "ip", setsName: "KUBE-"},
	{name: "ip6", number: unix.NFPROTO_IPV6, v6: true, prefix: "ip6", setsName: "KUBE-6-"},
}

// The tables of iptables in which kube-proxy has chains.
var tables = []string{"nat", "filter", "mangle"}

// entries are the chains to which kube-proxy jumps from built-in chains; the last lines are those of
// kube-proxy 1.26 and older.
var entries = []string{
	"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", forwardChain,
	"KUBE-PROXY-FIREWALL",
	"KUBE-NODE-PORT", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", // mode ipvs
	"KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", // mode userspace
	"KUBE-NODEPORT-CONTAINER", "KUBE-NODEPORT-HOST", "KUBE-NODEPORT-NON-LOCAL",
}

// inner are the other chains with a constant name.
var inner = []string{
	"KUBE-MARK-MASQ", "KUBE-PROXY-CANARY",
	"KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", // mode ipvs
}

// hashed are the beginnings of names that end with a hash of Service, port and endpoint. KUBE-XLB-
// was replaced in 1.24.
var hashed = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-"}

// hashLength is that of the hashes: 16 characters of base 32.
const hashLength = 16

// ownedChain reports whether a chain is kube-proxy's. Kubelet has a KUBE-FIREWALL in the table filter;
// the one in nat was that of mode ipvs until 1.26.
func ownedChain(table, chain string) bool {
	if table == "nat" && chain == "KUBE-FIREWALL" {
		return true
	}
	for _, h := range hashed {
		if hash, ok := strings.CutPrefix(chain, h); ok && isHash(hash) {
			return true
		}
	}
	return slices.Contains(entries, chain) || slices.Contains(inner, chain)
}

func isHash(s string) bool {
	return len(s) == hashLength && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// setNames are the ip sets of mode ipvs, without the beginning that tells the family.
var setNames = []string{
	"LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL",
	"LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW",
	"LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR",
	"NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-UDP",
	"NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH",
	"HEALTH-CHECK-NODE-PORT", "IPVS-IPS",
}

// maxSetName is how long a name of an ip set can be; kube-proxy cuts off what is more.
const maxSetName = 31

func (f family) sets() []string {
	var names []string
	for _, n := range setNames {
		n = f.setsName + n
		names = append(names, n[:min(len(n), maxSetName)])
	}
	return names
}

// nodePortSets are those that hold the NodePorts of a protocol.
func (f family) nodePortSets() map[string]uint8 {
	return map[string]uint8{
		f.setsName + "NODE-PORT-TCP":       unix.IPPROTO_TCP,
		f.setsName + "NODE-PORT-UDP":       unix.IPPROTO_UDP,
		f.setsName + "NODE-PORT-SCTP-HASH": unix.IPPROTO_SCTP,
	}
}

const (
	nftablesTable = "kube-proxy"
	dummyLink     = "kube-ipvs0"
)

// counters are the nfacct objects that the mode iptables has since 1.32.
var counters = []string{invalidCounter, "localhost_nps_accepted_pkts"}

// invalidCounter is that of a rule of KUBE-FORWARD.
const invalidCounter = "ct_state_invalid_dropped_pkts"
