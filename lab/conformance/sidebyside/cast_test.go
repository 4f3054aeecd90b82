package sidebyside

import (
	"net/netip"

	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

type member = conformance.Member

var cast = conformance.Cast()

// hostPod is a pod in the node's own network.
const hostPod = "host"

// clients are where probes come from.
var clients = []testbed.Place{"client", "pod-a", farPod, testbed.Node, testbed.NodeB, testbed.Outside}

// farPod is a client whose address is a pod's, but none of this node.
const farPod testbed.Place = "pod-c"

// nodeAddrs are the addresses of the node, the second of which is none that it would choose.
var nodeAddrs = []string{"192.0.2.1", "192.0.2.101"}

// Ports that pods serve; those of the host network serve others.
const (
	podTCP, podTCP2, podTCP3 = 8080, 8081, 9090
	podUDP                   = 5353
	podSCTP                  = 7000
	hostTCP, hostUDP         = 6443, 6053
)

var hasSCTP = testbed.HasProtocol(model.SCTP)

// both are an IPv4 address and its IPv6 twin.
func both(v4 string) []netip.Addr {
	a := netip.MustParseAddr(v4)
	return []netip.Addr{a, testbed.EmbedV6(a)}
}

// in is an IPv4 address or its twin.
func in(v6 bool, v4 string) string {
	if v6 {
		return both(v4)[1].String()
	}
	return v4
}
