package testbed

import (
	"fmt"
	"net/netip"
	"strings"
)

// The address plan. Every IPv4 address has an IPv6 twin, see EmbedV6.
//
//	192.0.2.0/24      the LAN: node .1, node-b .2, outside .9, gateway .254
//	10.244.1.0/24     pods on node
//	10.244.2.0/24     pods on node-b
//	10.96.0.0/16      ClusterIPs
//	203.0.113.0/24    load balancers
//	198.51.100.0/24   external IPs
const (
	lanCIDR     = "192.0.2.0/24"
	clusterCIDR = "10.244.0.0/16"
	serviceCIDR = "10.96.0.0/16"
	lbCIDR      = "203.0.113.0/24"
	extCIDR     = "198.51.100.0/24"

	nodeAddr, podsOnNode   = "192.0.2.1", "10.244.1.0/24"
	nodeBAddr, podsOnNodeB = "192.0.2.2", "10.244.2.0/24"
	outsideAddr            = "192.0.2.9"
	gatewayAddr            = "192.0.2.254"
)

// ClusterCIDRs are the ranges of all pods, IPv4 first.
func ClusterCIDRs() []netip.Prefix { return bothPrefixes(clusterCIDR) }

// ClusterCIDR is the same as proxies take it: separated by commas.
func ClusterCIDR() string {
	var all []string
	for _, c := range ClusterCIDRs() {
		all = append(all, c.String())
	}
	return strings.Join(all, ",")
}

// OwnCIDRs are the ranges of pods and machines.
func OwnCIDRs() []netip.Prefix { return append(ClusterCIDRs(), bothPrefixes(lanCIDR)...) }

// ServiceCIDRs are the ranges of ClusterIPs, IPv4 first.
func ServiceCIDRs() []netip.Prefix { return bothPrefixes(serviceCIDR) }

// LoadBalancerCIDRs are the ranges from which load balancers get their addresses, IPv4 first.
func LoadBalancerCIDRs() []netip.Prefix { return bothPrefixes(lbCIDR) }

// ExternalCIDRs are the ranges meant for a Service's externalIPs, IPv4 first.
func ExternalCIDRs() []netip.Prefix { return bothPrefixes(extCIDR) }

// PodCIDRs are the ranges of the pods on a node, IPv4 first; nil if the place is no node.
func PodCIDRs(node Place) []netip.Prefix {
	cidr, ok := map[Place]string{Node: podsOnNode, NodeB: podsOnNodeB}[node]
	if !ok {
		return nil
	}
	return bothPrefixes(cidr)
}

// EmbedV6 is the IPv6 twin of an IPv4 address: fd00::/96 with the address in its last 32 bits.
// It returns IPv6 addresses as they are.
func EmbedV6(a netip.Addr) netip.Addr {
	if !a.Is4() {
		return a
	}
	v6 := [16]byte{0: 0xfd}
	v4 := a.As4()
	copy(v6[12:], v4[:])
	return netip.AddrFrom16(v6)
}

func embedPrefix(p netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(EmbedV6(p.Addr()), p.Bits()+96)
}

func bothPrefixes(s string) []netip.Prefix {
	v4 := netip.MustParsePrefix(s)
	return []netip.Prefix{v4, embedPrefix(v4)}
}

func bothAddrs(s string) []netip.Addr {
	v4 := netip.MustParseAddr(s)
	return []netip.Addr{v4, EmbedV6(v4)}
}

// addrOf picks the address of one family; the zero Addr if there is none.
func addrOf(addrs []netip.Addr, v6 bool) netip.Addr {
	for _, a := range addrs {
		if a.Is6() == v6 {
			return a
		}
	}
	return netip.Addr{}
}

// freePodAddr finds the first unused pair of addresses on a node. The range's first two are left out, which real
// clusters give to the network itself and to the node.
func freePodAddr(node Place, used map[netip.Addr]string) ([]netip.Addr, error) {
	cidr := PodCIDRs(node)[0]
	for a := cidr.Addr().Next().Next(); cidr.Contains(a.Next()); a = a.Next() {
		if used[a] == "" && used[EmbedV6(a)] == "" {
			return []netip.Addr{a, EmbedV6(a)}, nil
		}
	}
	return nil, fmt.Errorf("no free pod address on %s: all of %s are taken", node, cidr)
}
