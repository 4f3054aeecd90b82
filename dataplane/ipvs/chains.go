package ipvs

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The priorities of base chains around IPVS, which looks at packets at 99 in LOCAL_IN and at -98 in LOCAL_OUT
// (ip_vs_ops4 in the kernel's net/netfilter/ipvs/ip_vs_core.c). A packet that it sends on comes through LOCAL_OUT
// again, from the start, and then through POSTROUTING.
const (
	beforeIPVSIn  = 98
	afterIPVSIn   = 100
	beforeIPVSOut = -99
	afterIPVSOut  = -97

	// fromIPVS is before all others in LOCAL_OUT, even their tables raw (-300, or -450 before defragmentation).
	fromIPVS = -500
)

// The names of the constant chains.
const (
	chainBefore        = "before-ipvs"
	chainUntracked     = "untracked"
	chainSent          = "sent-by-ipvs"
	chainAfter         = "after-ipvs"
	chainLearn         = "learn"
	chainLearnInternal = "learn-internal"
)

// constantChains are the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) constantChains() []nft.Chain {
	// Packets that IPVS does not take would reach the node's own sockets.
	rest := nft.NewRule("addresses that are local for IPVS only",
		t.Family.Load(t.Family.Destination, 0), nft.In("local-addresses"), nft.Counter(), nft.GoTo(nft.ChainReject))
	decisions := t.Decisions([]nft.Rule{t.Dispatch(t.Sets[internalFrontends].Name)}, t.healthChecks(), rest)
	// Only packets of connections pass the chains that decide. A ClusterIP has nothing to decide but the backend, and
	// NodeLocal DNSCache exempts questions to that of the DNS. For untracked packets to other addresses, allowed sources
	// were not checked.
	served := []nft.Rule{t.servedIn("drop-ranges"), t.servedIn("reject-ranges")}
	untracked := slices.Concat(served, t.Guards(), []nft.Rule{t.healthChecks(), rest})
	return slices.Concat(decisions, []nft.Chain{{Name: chainUntracked, Rules: untracked}}, t.hooks(), t.aroundIPVS())
}

// healthChecks lets packets pass for which this process listens.
func (t *table) healthChecks() nft.Rule {
	key, _ := t.Family.DestinationKey()
	return nft.NewRule("health checks of load balancers", key, nft.In(t.Sets[healthChecks].Name), nft.Accept())
}

// servedIn lets packets to virtual servers pass whose addresses are in ranges of Service addresses.
func (t *table) servedIn(ranges string) nft.Rule {
	key, _ := t.Family.DestinationKey()
	return nft.NewRule("virtual servers in "+ranges,
		t.Family.Load(t.Family.Destination, 0), nft.In(ranges), key, nft.In("virtual-servers"), nft.Accept())
}

func (t *table) hooks() []nft.Chain {
	const nat, filter = "nat", "filter"
	at := func(name, kind string, number uint32, priority int32, rules ...nft.Rule) nft.Chain {
		return nft.Chain{Name: name, Hook: &nft.Hook{Kind: kind, Number: number, Priority: priority}, Rules: rules}
	}
	return []nft.Chain{
		at("prerouting", nat, unix.NF_INET_PRE_ROUTING, nft.Translation,
			append(t.FromPods("pods", nft.GoTo(nft.ChainInternal)), nft.NewRule("", nft.GoTo(nft.ChainServices)))...),
		at("output", nat, unix.NF_INET_LOCAL_OUT, nft.Translation,
			nft.NewRule("refusals, whose destination may be a Service address", is(expr.CtStateBitRELATED), nft.Accept()),
			nft.NewRule("this node", nft.GoTo(nft.ChainInternal))),
		at("input-before-ipvs", filter, unix.NF_INET_LOCAL_IN, beforeIPVSIn,
			forgedEnd(), nft.NewRule("", nft.GoTo(chainBefore))),
		inputAfterIPVS(nft.NewRule("", nft.GoTo(chainAfter))),
		at("output-sent-by-ipvs", filter, unix.NF_INET_LOCAL_OUT, fromIPVS, nft.NewRule("", nft.GoTo(chainSent))),
		at("output-before-ipvs", filter, unix.NF_INET_LOCAL_OUT, beforeIPVSOut, nft.NewRule("", nft.GoTo(chainBefore))),
		at("output-after-ipvs", filter, unix.NF_INET_LOCAL_OUT, afterIPVSOut, nft.NewRule("", nft.GoTo(chainAfter))),
		at("postrouting", nat, unix.NF_INET_POST_ROUTING, nft.Masquerading, t.Masquerade(), t.masqueradeHairpin()),
	}
}

// forgedEnd drops a FIN or RST that connection tracking finds out of sequence. IPVS does not compare sequence numbers:
// it would forget the connection in ten seconds, and a node's socket would be refused.
func forgedEnd() nft.Rule {
	const fin, rst = 1, 4
	return nft.NewRule("forged ends of connections",
		is(expr.CtStateBitINVALID), nft.TCPFlags(fin|rst, nft.Differs([]byte{0})), nft.Drop())
}

func inputAfterIPVS(rules ...nft.Rule) nft.Chain {
	return nft.FilterChain("input-after-ipvs", unix.NF_INET_LOCAL_IN, afterIPVSIn, rules...)
}

// aroundIPVS are the chains directly before and after it. IPVS compares all bits of a mark. So a packet for the virtual
// server of a mark has it for this short way only, and its priority keeps the former mark. The same is done for packets
// to which another program has given a mark like ours. Between these chains, only Fairlead uses such marks. Then what
// IPVS chose is remembered, if the pool has affinity.
func (t *table) aroundIPVS() []nft.Chain {
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	tracked := uint32(expr.CtStateBitNEW | expr.CtStateBitESTABLISHED)
	chosen := []any{
		is(expr.CtStateBitNEW), t.notTaken(), &expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)},
		nft.Bits(0, destinationTranslated, 0), nft.Equals(nft.Native(0)),
	}
	restoreMark := nft.NewRule("the former mark", hasMarkBits(expr.MetaKeyMARK), is(tracked), swap())
	return []nft.Chain{
		{Name: chainBefore, Rules: []nft.Rule{
			nft.NewRule("untracked packets", is(expr.CtStateBitUNTRACKED),
				// Connection tracking itself leaves out neighbours' questions.
				nft.LoadMeta(expr.MetaKeyL4PROTO, 0), nft.Differs([]byte{unix.IPPROTO_ICMPV6}), nft.GoTo(chainUntracked)),
			nft.NewRule("select the virtual server of the pool",
				hasMarkBits(expr.MetaKeyPRIORITY), is(expr.CtStateBitNEW), swap(), nft.Accept()),
			nft.NewRule("others' marks select none", hasMarkBits(expr.MetaKeyMARK), is(tracked), hide()),
		}},
		{Name: chainSent, Rules: append([]nft.Rule{restoreMark}, t.keepMasquerade()...)},
		{Name: chainAfter, Rules: []nft.Rule{
			restoreMark,
			nft.NewRule("masquerade, whatever others did to the mark",
				hasMarkBits(expr.MetaKeyPRIORITY), is(expr.CtStateBitNEW),
				nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, masqueradeFlag, 0), nft.Differs(nft.Native(0)),
				nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, ^t.Mark, t.Mark), nft.StoreMeta(expr.MetaKeyMARK, 0)),
			nft.NewRule("affinity", chosen, originalKey(t.Family), nft.In("sticky"), nft.Jump(chainLearn)),
			nft.NewRule("", hasMarkBits(expr.MetaKeyPRIORITY), nft.ResetPriority(0)),
		}},
		{Name: chainLearn, Rules: append([]nft.Rule{
			nft.NewRule("", hasPool(), nft.GoTo(chainLearnInternal)),
		}, t.learn(frontends)...)},
		{Name: chainLearnInternal, Rules: t.learn(internalFrontends)},
	}
}

// notTaken matches packets that no process of the node takes for itself, as another plane's may while both are there.
// IPVS has chosen no backend for such packets: their destination is the Service still, or the process.
func (t *table) notTaken() []any {
	relayMark := dataplane.Config{Mark: t.Mark}.RelayMark()
	return []any{nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, relayMark, 0), nft.Equals(nft.Native(0))}
}

// keepMasquerade notes in the priority of what IPVS sends that its source is to be replaced: rules of others that
// see it in LOCAL_OUT may set another mark. Only what IPVS sends has a connection when it comes there; what sockets
// send gets one later.
func (t *table) keepMasquerade() []nft.Rule {
	note := func(conditions []any, mask uint32) nft.Rule {
		return nft.NewRule("keep in mind: masquerade",
			nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, t.Mark, 0), nft.Equals(nft.Native(t.Mark)),
			is(expr.CtStateBitNEW), conditions,
			nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, mask, markBits|masqueradeFlag),
			nft.StoreMeta(expr.MetaKeyPRIORITY, 0), nft.Accept())
	}
	return []nft.Rule{note(hasMarkBits(expr.MetaKeyPRIORITY), nft.PoolMask), note(nil, 0)}
}

// swap exchanges mark and priority.
func swap() []any {
	return []any{
		nft.LoadMeta(expr.MetaKeyMARK, 0), nft.LoadMeta(expr.MetaKeyPRIORITY, 1),
		nft.StoreMeta(expr.MetaKeyMARK, 1), nft.StoreMeta(expr.MetaKeyPRIORITY, 0),
	}
}

// hide puts the mark into the priority, and a mark of ours that is no virtual server's in its place.
func hide() []any {
	return []any{
		nft.LoadMeta(expr.MetaKeyMARK, 0), nft.StoreMeta(expr.MetaKeyPRIORITY, 0),
		&expr.Immediate{Register: nft.Word(0), Data: nft.Native(markBits)}, nft.StoreMeta(expr.MetaKeyMARK, 0),
	}
}

// learn finds the token of the destination that the connection's first packet had, and goes to the chain
// of the pool that remembers.
func (t *table) learn(m int) []nft.Rule {
	return []nft.Rule{
		nft.NewRule("token",
			append(originalKey(t.Family), nft.Find(t.Sets[m].Name, 0), nft.StoreMeta(expr.MetaKeyPRIORITY, 0))...),
		nft.NewRule("", nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, nft.PoolMask, 0), nft.Follow("learners")),
		nft.NewRule("", nft.ResetPriority(0)...),
	}
}

// masqueradeHairpin leaves alone what a process of this node sends to another through the loopback
// interface: that finds back.
func (t *table) masqueradeHairpin() nft.Rule {
	return t.MasqueradeHairpin(nft.PastLoopback()...)
}

// classChain is the chain of a class: who may come in, whose source is replaced, where it goes.
func (t *table) classChain(c class) nft.Chain {
	var from string
	if c.limited {
		from = t.Sets[nft.Sources+int(c.scope)].Name
	}
	rules := t.Admission(c.verdict, c.snat, from)
	if c.verdict == model.Forward && c.affinity {
		rules = append(rules, nft.NewRule("",
			nft.LoadMeta(expr.MetaKeyPRIORITY, 0), nft.Bits(0, nft.PoolMask, 0), nft.Follow("recallers")))
	}
	switch {
	case c.verdict != model.Forward:
	case c.scope == model.Internal:
		rules = append(rules, nft.NewRule("to the pool's virtual server", nft.LoadMeta(expr.MetaKeyPRIORITY, 0),
			nft.Bits(0, nft.PoolMask, markBits), nft.StoreMeta(expr.MetaKeyPRIORITY, 0)))
	default:
		rules = append(rules, nft.NewRule("to the address's virtual server", nft.ResetPriority(0)...))
	}
	return nft.Chain{Name: c.chain(), Rules: rules}
}
