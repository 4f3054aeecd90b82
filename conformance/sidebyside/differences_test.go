package sidebyside

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/testbed"
)

// What kube-proxy's modes are called in a KubeProxyConfiguration.
const (
	nftables = "nftables"
	iptables = "iptables"
)

// difference is one that is meant: docs/differences.md says why, and the case testdata/NAME.txtar shows
// it and in which modes there is it.
type difference struct {
	name    string
	applies func(c contrast) bool
}

// What became of a probe that no backend answered.
var (
	refused     = testbed.Refused.String()
	unreachable = testbed.Unreachable.String()
	timedOut    = testbed.TimedOut.String()
)

var differences = []difference{
	{"unused-port", func(c contrast) bool {
		return c.mode == iptables && c.kind == unusedPort && c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{"unallocated-address", func(c contrast) bool {
		return c.mode == iptables && (c.kind == unallocated || c.kind == otherProxys) &&
			c.theirs.are(unreachable) && c.ours.are(timedOut)
	}},
	{"no-endpoints-from-node", func(c contrast) bool {
		return c.mode == iptables && (c.kind == externalIP || c.kind == loadBalancer) && c.from == testbed.Node &&
			c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{"source-ranges-no-endpoints", func(c contrast) bool {
		return c.mode == iptables && c.kind == loadBalancer && len(c.service.Spec.LoadBalancerSourceRanges) > 0 &&
			(c.theirs.are(refused) || c.from == testbed.Node && c.theirs.are(unreachable)) && c.ours.are(timedOut)
	}},
	{"no-local-endpoints-elsewhere", func(c contrast) bool {
		return c.mode == iptables && (c.kind == nodePort || c.kind == localNodePort) && !c.setup.open(c.to.Addr()) &&
			externalLocal(c.service) && c.theirs.are(timedOut) && c.ours.are(refused)
	}},
	{"remote-hairpin", func(c contrast) bool {
		return c.mode == iptables && c.from == farPod && hairpinOnly(c)
	}},
	{"endpoint-is-service", func(c contrast) bool {
		theirs := maps.Clone(c.theirs)
		delete(theirs, map[string]string{nftables: refused, iptables: unreachable}[c.mode])
		return c.kind == clusterIP && len(theirs) < len(c.theirs) && c.ours.answered() && same(theirs, c.ours)
	}},
	{"localhost-node-port", func(c contrast) bool {
		return c.mode == nftables && c.kind == localNodePort && slices.Contains(c.setup.nodePortAddresses, "localhost") &&
			c.theirs.are(refused) && c.ours.answered()
	}},
}

// open reports whether node ports are served on an address in mode iptables.
func (s setup) open(a netip.Addr) bool {
	if a == netip.IPv6Loopback() {
		return false
	}
	return len(s.nodePortAddresses) == 0 || slices.ContainsFunc(s.nodePortAddresses, func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && p.Contains(a)
	})
}

func externalLocal(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// hairpinOnly reports whether all that is different is that the client reached itself by kube-proxy, and
// that Fairlead was silent instead.
func hairpinOnly(c contrast) bool {
	theirs, ours := maps.Clone(c.theirs), maps.Clone(c.ours)
	for _, a := range both(nodeAddrs[0]) {
		delete(theirs, fmt.Sprintf("%s sees %s", c.from, a))
	}
	reached := len(theirs) < len(c.theirs)
	delete(theirs, timedOut)
	delete(ours, timedOut)
	return reached && same(theirs, ours)
}

// explain is the difference that a contrast is, or nil.
func explain(c contrast) *difference {
	i := slices.IndexFunc(differences, func(d difference) bool { return d.applies(c) })
	if i < 0 {
		return nil
	}
	return &differences[i]
}
