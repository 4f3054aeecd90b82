package iptables

import (
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// baseRule is a rule of ours in a chain of the kernel's own.
type baseRule struct {
	chain string
	rule
}

// baseRules lead from the kernel's chains of a table to ours. Connections that table nat has forwarded do not concern
// table filter. Nor does one to an address of this node that was let through before, whose client repeats its first
// packet. Another data plane may go on with it, as IPVS does behind INPUT with unanswered connections.
//
// Clients of health checks pass where INPUT drops others, as with kube-proxy (kubernetes issue 97225).
func baseRules(table string) []baseRule {
	if table == "nat" {
		return []baseRule{
			{"PREROUTING", rule{do: jumpTo(chainIn), comment: "kubernetes service portals"}},
			{"OUTPUT", rule{do: jumpTo(chainOut), comment: "kubernetes service portals"}},
			{"POSTROUTING", rule{do: jumpTo(chainPost), comment: "kubernetes postrouting rules"}},
		}
	}
	unserved := func(chain string) rule {
		return rule{state: stateNew, notState: stateDNAT, do: jumpTo(chain), comment: "kubernetes service portals"}
	}
	here := unserved(chainIn)
	here.first = true
	return []baseRule{
		{"INPUT", rule{state: stateNew, do: jumpTo(chainHealth), comment: "kubernetes health check service ports"}},
		{"INPUT", here},
		{"FORWARD", unserved(chainIn)},
		{"FORWARD", rule{do: jumpTo(chainForward), comment: "kubernetes forwarding rules"}},
		{"OUTPUT", unserved(chainOut)},
	}
}

// owned reports whether a chain is ours or kube-proxy's. kubelet has chains of its own with similar names.
func owned(chain string) bool { return onlyOurs(chain) || shared(chain) || kubeProxys(chain) }

// onlyOurs reports whether only Fairlead makes such a chain.
func onlyOurs(chain string) bool {
	switch chain {
	case chainIn, chainOut, chainPost, chainForward, chainInternal, chainGuards, chainRanges, chainReject, chainNoLocal,
		chainOthers, chainNoRow, chainNoRowDrop, chainOffNode, chainHairpin, chainLocalnet, chainHealth:
		return true
	}
	return hairpins(chain) || begins(chain, kindPods, kindLocal, kindAffinity, kindKnown, kindLimit,
		"KUBE-IP-", "KUBE-INT-", "KUBE-UP-", "KUBE-PORTS-", "KUBE-PART-")
}

// hairpins reports whether a chain is of the tree of hairpins. CRI-O's hostPorts have KUBE-HP- and a hash; ours have
// a prefix's length, or the family, set off by another hyphen.
func hairpins(chain string) bool {
	name, found := strings.CutPrefix(chain, hairpinPrefix)
	return found && strings.Contains(name, "-")
}

// shared reports whether kube-proxy has a chain of this name and meaning, too.
func shared(chain string) bool {
	return chain == chainServices || chain == chainMark
}

// kubeProxys reports whether only kube-proxy makes such a chain.
func kubeProxys(chain string) bool {
	switch chain {
	case chainKubePost, "KUBE-FORWARD", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL", chainCanary,
		"KUBE-LOAD-BALANCER", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER",
		"KUBE-IPVS-OUT-FILTER":
		return true
	}
	return begins(chain, "KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-")
}

const (
	// chainCanary is what kube-proxy makes when it starts, before everything else.
	chainCanary = "KUBE-PROXY-CANARY"
	// chainKubePost is kubelet's, too, up to 1.26.
	chainKubePost = "KUBE-POSTROUTING"
)

func begins(chain string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
}

// constants are the chains that do not depend on the rows, or little.
func (l *layout) constants() {
	if l.recorded = l.recorded || l.localnets > 0 && !l.localnetWasOn; l.recorded {
		l.edits[nat].keep(chainLocalnet, nil)
	}
	pods, node := l.toInternal(l.nat)
	l.edits[nat].keep(chainIn, slices.Concat(l.spoofed(accept), pods, []rule{{do: goes(chainServices)}}))
	l.edits[nat].keep(chainOut, append(node, rule{do: goes(chainServices)}))
	l.edits[nat].keep(chainMark, []rule{{do: target{verb: orMark, mark: l.mark}}})
	l.edits[nat].keep(chainOffNode, l.offNode())
	l.edits[nat].keep(chainPost, l.postrouting())
	refused := []rule{
		{marked: l.relayMark, do: target{verb: back}, comment: "taken by a process of this node"},
		{do: jumpTo(chainServices)}, {do: jumpTo(chainGuards)}, {do: goes(chainRanges)},
	}
	pods, node = l.toInternal(l.filter)
	l.edits[filter].keep(chainIn, slices.Concat(l.spoofed(drop), pods, refused))
	l.edits[filter].keep(chainOut, append(node, refused...))
	for chain, r := range refusals {
		if r.Verdict == model.Reject {
			l.edits[filter].keep(chain, l.rejectRules())
		} else {
			l.edits[filter].keep(chain, []rule{{do: target{verb: drop}}})
		}
	}
	l.edits[filter].keep(chainForward, l.forwardRules())
	l.edits[filter].keep(chainHealth, l.health)
}

// spoofed are packets from elsewhere for or from 127.0.0.0/8, which the kernel drops unless route_localnet
// is set: here it is for NodePorts on these addresses. (IPv6 has no such switch.)
func (l *layout) spoofed(v verb) []rule {
	if !l.spoofable() {
		return nil
	}
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	const why = "not from elsewhere"
	return []rule{
		{dst: loopback, in: loopbackDevice, notIn: true, do: target{verb: v}, comment: why},
		{src: loopback, in: loopbackDevice, notIn: true, do: target{verb: v}, comment: why},
	}
}

// pods are the rules for packets of pods.
func (l *layout) ofPods(do target) (rules []rule) {
	for _, p := range l.pods.Prefixes {
		if l.mine(p.Addr()) {
			rules = append(rules, rule{src: p, do: do})
		}
	}
	for _, name := range l.pods.Interfaces {
		rules = append(rules, rule{in: name, do: do})
	}
	return rules
}

// toInternal are the rules that lead packets of pods and of the node to rows of scope Internal, if there are any.
func (l *layout) toInternal(table [2]*dispatch) (pods, node []rule) {
	if table[model.Internal].empty() {
		return nil, nil
	}
	return l.ofPods(jumpTo(chainInternal)), []rule{{do: jumpTo(chainInternal)}}
}

func (l *layout) offNode() []rule {
	return append(l.ofPods(target{verb: back}), rule{do: target{verb: orMark, mark: l.mark}})
}

// postrouting replaces the source address and clears the mark.
func (l *layout) postrouting() []rule {
	return []rule{
		{unmarked: l.mark, notState: stateDNAT, do: target{verb: back}},
		{unmarked: l.mark, do: goes(chainHairpin), comment: "backends that reach themselves"},
		{do: target{verb: xorMark, mark: l.mark}},
		{do: target{verb: masquerade}, comment: "kubernetes service traffic requiring SNAT"},
	}
}

func (l *layout) rejectRules() []rule {
	rules := []rule{{protocol: model.TCP, do: target{verb: reject, with: withReset}}}
	if !l.v6 { // SCTP gives up at once for an unreachable protocol only (RFC 9260, section 10.2)
		rules = append(rules, rule{protocol: model.SCTP, do: target{verb: reject, with: withUnreachableProtocol}})
	}
	return append(rules, rule{do: target{verb: reject, with: withUnreachablePort}})
}

// forwardRules let connections to Services through where the policy is to drop, and keep packets that
// conntrack does not understand from reaching a client untranslated, who would reset its connection.
func (l *layout) forwardRules() []rule {
	var rules []rule
	if !l.keepInvalid {
		rules = append(rules, rule{state: stateInvalid, do: target{verb: drop}})
	}
	return append(rules,
		rule{marked: l.mark, do: target{verb: accept}, comment: "kubernetes forwarding rules"},
		rule{state: stateRelated | stateEstablished, do: target{verb: accept}, comment: "kubernetes forwarding conntrack"})
}
