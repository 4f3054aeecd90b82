package sidebyside

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

// These are the names of kube-proxy's modes in a KubeProxyConfiguration.
const (
	nftables = "nftables"
	iptables = "iptables"
)

// difference is one that is meant: docs/differences.md says why, and the case testdata/NAME.txtar shows
// it and in which modes there is it. It is one of packets or one of health checks.
type difference struct {
	name   string
	packet func(c contrast) bool
	health func(c healthContrast) bool
}

// These are the results of a probe that no backend answered.
var (
	refused     = testbed.Refused.String()
	unreachable = testbed.Unreachable.String()
	timedOut    = testbed.TimedOut.String()
)

var differences = []difference{
	{name: "unused-port", packet: func(c contrast) bool {
		return c.mode == iptables && c.kind == unusedPort && c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{name: "unallocated-address", packet: func(c contrast) bool {
		return c.mode == iptables && (c.kind == unallocated || c.kind == otherProxys) &&
			c.theirs.are(unreachable) && c.ours.are(timedOut)
	}},
	{name: "no-endpoints-from-node", packet: func(c contrast) bool {
		return c.mode == iptables && (c.kind == externalIP || c.kind == loadBalancer) && c.from == testbed.Node &&
			len(usable(c.endpoints())) == 0 && c.theirs.are(unreachable) && c.ours.are(refused)
	}},
	{name: "source-ranges-no-endpoints", packet: func(c contrast) bool {
		return c.mode == iptables && c.kind == loadBalancer && c.keptOut() && len(usable(c.endpoints())) == 0 &&
			(c.theirs.are(refused) || c.from == testbed.Node && c.theirs.are(unreachable)) && c.ours.are(timedOut)
	}},
	{name: "no-local-endpoints-elsewhere", packet: func(c contrast) bool {
		return c.mode == iptables && (c.kind == nodePort || c.kind == localNodePort) && !c.setup.open(c.to.Addr()) &&
			externalLocal(c.service) && len(usable(here(c.endpoints()))) == 0 && len(usable(c.endpoints())) > 0 &&
			c.theirs.are(timedOut) && c.ours.are(refused)
	}},
	{name: "remote-hairpin", packet: func(c contrast) bool {
		return c.mode == iptables && c.from == farPod && hairpinOnly(c)
	}},
	{name: "endpoint-is-service", packet: func(c contrast) bool {
		theirs := maps.Clone(c.theirs)
		delete(theirs, map[string]string{nftables: refused, iptables: unreachable}[c.mode])
		return c.kind == clusterIP && slices.ContainsFunc(c.endpoints(), c.isService) && len(theirs) < len(c.theirs) &&
			c.ours.answered() && same(theirs, c.ours)
	}},
	{name: "localhost-node-port", packet: func(c contrast) bool {
		return c.mode == nftables && c.kind == localNodePort && slices.Contains(c.setup.nodePortAddresses, "localhost") &&
			c.theirs.are(refused) && c.ours.answered()
	}},
	{name: "health-check-other-ports", health: func(c healthContrast) bool {
		serving, others := c.localReady()
		return others > 0 && c.ours == told(c.service, serving) && c.theirs == told(c.service, serving+others)
	}},
}

// open reports whether NodePorts are served on an address in mode iptables.
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
	reached, silent := len(theirs) < len(c.theirs), c.ours[timedOut] > 0
	delete(theirs, timedOut)
	delete(ours, timedOut)
	return reached && silent && same(theirs, ours)
}

// explain is the difference that a contrast is, or nil.
func explain(c contrast) *difference {
	i := slices.IndexFunc(differences, func(d difference) bool { return d.packet != nil && d.packet(c) })
	if i < 0 {
		return nil
	}
	return &differences[i]
}

// explainHealth is the difference that a contrast is, or nil.
func explainHealth(c healthContrast) *difference {
	i := slices.IndexFunc(differences, func(d difference) bool { return d.health != nil && d.health(c) })
	if i < 0 {
		return nil
	}
	return &differences[i]
}
