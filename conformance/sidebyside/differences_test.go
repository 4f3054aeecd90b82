package sidebyside

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/testbed"
)

// What kube-proxy's modes are called in a KubeProxyConfiguration.
const (
	nftables = "nftables"
	iptables = "iptables"
)

// difference is one that is meant: docs/differences.md says why. The case testdata/NAME.txtar shows it.
type difference struct {
	name    string
	mode    string // of kube-proxy; empty: all
	applies func(c contrast) bool
}

// What became of a probe that no backend answered.
var (
	refused     = testbed.Refused.String()
	unreachable = testbed.Unreachable.String()
	timedOut    = testbed.TimedOut.String()
)

var differences = []difference{
	{"unused-port", iptables, func(c contrast) bool {
		return c.kind == unusedPort && c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{"unallocated-address", iptables, func(c contrast) bool {
		return slices.Contains([]kind{unallocated, otherProxys}, c.kind) && c.theirs.are(unreachable) && c.ours.are(timedOut)
	}},
	{"no-endpoints-from-node", iptables, func(c contrast) bool {
		return slices.Contains([]kind{externalIP, loadBalancer}, c.kind) && c.from == testbed.Node &&
			c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{"source-ranges-no-endpoints", iptables, func(c contrast) bool {
		return c.kind == loadBalancer && len(c.service.Spec.LoadBalancerSourceRanges) > 0 &&
			(c.theirs.are(refused) || c.from == testbed.Node && c.theirs.are(unreachable)) && c.ours.are(timedOut)
	}},
	{"no-local-endpoints-elsewhere", iptables, func(c contrast) bool {
		return slices.Contains([]kind{nodePort, localNodePort}, c.kind) && externalLocal(c.service) &&
			c.theirs.are(timedOut) && c.ours.are(refused)
	}},
	{"remote-hairpin", iptables, func(c contrast) bool {
		theirs, ours := maps.Clone(c.theirs), maps.Clone(c.ours)
		for _, a := range nodeIPs {
			delete(theirs, fmt.Sprintf("%s sees %s", c.from, a))
		}
		delete(theirs, timedOut)
		delete(ours, timedOut)
		return c.from == "pod-c" && len(theirs) < len(c.theirs) && same(theirs, ours)
	}},
}

func externalLocal(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// nodeIPs are the node's addresses of choice.
var nodeIPs = both(nodeAddrs[0])

// explain is the difference that a contrast is, or nil.
func explain(c contrast) *difference {
	for i := range differences {
		if d := &differences[i]; (d.mode == "" || d.mode == c.mode) && d.applies(c) {
			return d
		}
	}
	return nil
}
