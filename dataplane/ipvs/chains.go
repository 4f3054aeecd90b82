package ipvs

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// The priorities of base chains around IPVS, which looks at packets at 99 in LOCAL_IN and at -98 in LOCAL_OUT
// (ip_vs_ops4 in the kernel's net/netfilter/ipvs/ip_vs_core.c). What it sends on comes through LOCAL_OUT
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
func (t *table) constantChains() []nf.Chain {
	// What IPVS does not take would reach the node's own sockets.
	rest := nf.NewRule("addresses that are local for IPVS only",
		t.Family.Load(t.Family.Destination, 0), nf.In("local-addresses"), nf.GoTo(nf.ChainReject))
	decisions := t.Decisions([]nf.Rule{t.Dispatch(t.Sets[internalFrontends].Name)}, rest)
	// Nothing but connections passes the chains that decide. For a ClusterIP there is nothing to decide but the backend,
	// and NodeLocal DNSCache exempts questions to that of the DNS; who may come in by another address was not asked.
	served := []nf.Rule{t.servedIn("drop-ranges"), t.servedIn("reject-ranges")}
	untracked := slices.Concat(served, t.Guards(), []nf.Rule{rest})
	return slices.Concat(decisions, []nf.Chain{{Name: chainUntracked, Rules: untracked}}, t.hooks(), t.aroundIPVS())
}

// servedIn lets packets to virtual servers pass whose addresses are in ranges of Service addresses.
func (t *table) servedIn(ranges string) nf.Rule {
	key, _ := t.Family.DestinationKey()
	return nf.NewRule("virtual servers in "+ranges, slices.Concat(
		[]any{t.Family.Load(t.Family.Destination, 0), nf.In(ranges)}, key, []any{nf.In("virtual-servers"), nf.Accept()})...)
}

func (t *table) hooks() []nf.Chain {
	const nat, filter = "nat", "filter"
	at := func(name, kind string, number uint32, priority int32, rules ...nf.Rule) nf.Chain {
		return nf.Chain{Name: name, Hook: &nf.Hook{Kind: kind, Number: number, Priority: priority}, Rules: rules}
	}
	return []nf.Chain{
		at("prerouting", nat, unix.NF_INET_PRE_ROUTING, nf.Translation,
			append(t.FromPods("pods", nf.GoTo(nf.ChainInternal)), nf.NewRule("", nf.GoTo(nf.ChainServices)))...),
		at("output", nat, unix.NF_INET_LOCAL_OUT, nf.Translation,
			nf.NewRule("refusals, whose destination may be a Service address",
				append(is(expr.CtStateBitRELATED), nf.Accept())...),
			nf.NewRule("this node", nf.GoTo(nf.ChainInternal))),
		at("input-before-ipvs", filter, unix.NF_INET_LOCAL_IN, beforeIPVSIn, nf.NewRule("", nf.GoTo(chainBefore))),
		at("input-after-ipvs", filter, unix.NF_INET_LOCAL_IN, afterIPVSIn, nf.NewRule("", nf.GoTo(chainAfter))),
		at("output-sent-by-ipvs", filter, unix.NF_INET_LOCAL_OUT, fromIPVS, nf.NewRule("", nf.GoTo(chainSent))),
		at("output-before-ipvs", filter, unix.NF_INET_LOCAL_OUT, beforeIPVSOut, nf.NewRule("", nf.GoTo(chainBefore))),
		at("output-after-ipvs", filter, unix.NF_INET_LOCAL_OUT, afterIPVSOut, nf.NewRule("", nf.GoTo(chainAfter))),
		at("postrouting", nat, unix.NF_INET_POST_ROUTING, nf.Masquerading, t.Masquerade(), t.masqueradeHairpin()),
	}
}

// aroundIPVS are the chains directly before and after it. A packet for the virtual server of a mark has
// that mark for this short way only, because IPVS compares all its bits; its priority keeps the mark that it
// had. So does that of a packet that somebody else has given a mark like ours: between these chains a mark
// like ours is ours. Then what IPVS chose is remembered, if the pool has affinity.
func (t *table) aroundIPVS() []nf.Chain {
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	tracked := uint32(expr.CtStateBitNEW | expr.CtStateBitESTABLISHED)
	chosen := slices.Concat(is(expr.CtStateBitNEW), t.notTaken(), []any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: nf.Word(0)}, nf.Bits(0, destinationTranslated, 0), nf.Equals(nf.Native(0)),
	})
	formerMark := nf.NewRule("the former mark", slices.Concat(hasMarkBits(expr.MetaKeyMARK), is(tracked), swap())...)
	return []nf.Chain{
		{Name: chainBefore, Rules: []nf.Rule{
			nf.NewRule("what is not tracked", append(is(expr.CtStateBitUNTRACKED),
				// Connection tracking itself leaves out neighbours' questions.
				nf.LoadMeta(expr.MetaKeyL4PROTO, 0), nf.Differs([]byte{unix.IPPROTO_ICMPV6}),
				nf.GoTo(chainUntracked))...),
			nf.NewRule("select the virtual server of the pool", slices.Concat(
				hasMarkBits(expr.MetaKeyPRIORITY), is(expr.CtStateBitNEW), swap(), []any{nf.Accept()})...),
			nf.NewRule("others' marks select none", slices.Concat(hasMarkBits(expr.MetaKeyMARK), is(tracked), hide())...),
		}},
		{Name: chainSent, Rules: append([]nf.Rule{formerMark}, t.keepMasquerade()...)},
		{Name: chainAfter, Rules: []nf.Rule{
			formerMark,
			nf.NewRule("masquerade, whatever others did to the mark", slices.Concat(
				hasMarkBits(expr.MetaKeyPRIORITY), is(expr.CtStateBitNEW), []any{
					nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.Bits(0, masqueradeFlag, 0), nf.Differs(nf.Native(0)),
					nf.LoadMeta(expr.MetaKeyMARK, 0), nf.Bits(0, ^t.Mark, t.Mark), nf.StoreMeta(expr.MetaKeyMARK, 0),
				})...),
			nf.NewRule("affinity", slices.Concat(chosen, originalKey(t.Family), []any{nf.In("sticky"), nf.Jump(chainLearn)})...),
			nf.NewRule("", append(hasMarkBits(expr.MetaKeyPRIORITY), nf.ResetPriority(0)...)...),
		}},
		{Name: chainLearn, Rules: append([]nf.Rule{
			nf.NewRule("", append(hasPool(), nf.GoTo(chainLearnInternal))...),
		}, t.learn(frontends)...)},
		{Name: chainLearnInternal, Rules: t.learn(internalFrontends)},
	}
}

// notTaken matches packets that no process of the node takes for itself, as another plane's may while both are there:
// IPVS has chosen nothing for such, and their destination is the Service still, or disguised.
func (t *table) notTaken() []any {
	carried := dataplane.Config{Mark: t.Mark}.CarriedMark()
	return []any{nf.LoadMeta(expr.MetaKeyMARK, 0), nf.Bits(0, carried, 0), nf.Equals(nf.Native(0))}
}

// keepMasquerade notes in the priority of what IPVS sends that its source is to be replaced: rules of others that
// see it in LOCAL_OUT may set another mark. Only what IPVS sends has a connection when it comes there; what sockets
// send gets one later.
func (t *table) keepMasquerade() []nf.Rule {
	masquerade := slices.Concat(
		[]any{nf.LoadMeta(expr.MetaKeyMARK, 0), nf.Bits(0, t.Mark, 0), nf.Equals(nf.Native(t.Mark))},
		is(expr.CtStateBitNEW))
	note := func(conditions []any, mask uint32) []any {
		return slices.Concat(masquerade, conditions, []any{
			nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.Bits(0, mask, markBits|masqueradeFlag),
			nf.StoreMeta(expr.MetaKeyPRIORITY, 0), nf.Accept(),
		})
	}
	return []nf.Rule{
		nf.NewRule("keep in mind: masquerade", note(hasMarkBits(expr.MetaKeyPRIORITY), nf.PoolMask)...),
		nf.NewRule("keep in mind: masquerade", note(nil, 0)...),
	}
}

// swap exchanges mark and priority.
func swap() []any {
	return []any{
		nf.LoadMeta(expr.MetaKeyMARK, 0), nf.LoadMeta(expr.MetaKeyPRIORITY, 1),
		nf.StoreMeta(expr.MetaKeyMARK, 1), nf.StoreMeta(expr.MetaKeyPRIORITY, 0),
	}
}

// hide puts the mark into the priority, and a mark of ours that is no virtual server's in its place.
func hide() []any {
	return []any{
		nf.LoadMeta(expr.MetaKeyMARK, 0), nf.StoreMeta(expr.MetaKeyPRIORITY, 0),
		&expr.Immediate{Register: nf.Word(0), Data: nf.Native(markBits)}, nf.StoreMeta(expr.MetaKeyMARK, 0),
	}
}

// learn finds the token of the destination that the connection's first packet had, and goes to the chain
// of the pool that remembers.
func (t *table) learn(m int) []nf.Rule {
	return []nf.Rule{
		nf.NewRule("token",
			append(originalKey(t.Family), nf.Find(t.Sets[m].Name, 0), nf.StoreMeta(expr.MetaKeyPRIORITY, 0))...),
		nf.NewRule("", nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.Bits(0, nf.PoolMask, 0), nf.Follow("learners")),
		nf.NewRule("", nf.ResetPriority(0)...),
	}
}

// masqueradeHairpin leaves alone what a process of this node sends to another through the loopback
// interface: that finds back.
func (t *table) masqueradeHairpin() nf.Rule {
	return t.MasqueradeHairpin(nf.LoadMeta(expr.MetaKeyOIFNAME, 0), nf.Differs(nf.InterfacePattern("lo")))
}

// classChain is the chain of a class: who may come in, whose source is replaced, where it goes.
func (t *table) classChain(c class) nf.Chain {
	var from string
	if c.limited {
		from = t.Sets[sources+int(c.scope)].Name
	}
	rules := t.Admission(c.verdict, c.snat, from)
	if c.verdict == model.Forward && c.affinity {
		rules = append(rules, nf.NewRule("",
			nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.Bits(0, nf.PoolMask, 0), nf.Follow("recallers")))
	}
	switch {
	case c.verdict != model.Forward:
	case c.scope == model.Internal:
		rules = append(rules, nf.NewRule("to the pool's virtual server", nf.LoadMeta(expr.MetaKeyPRIORITY, 0),
			nf.Bits(0, nf.PoolMask, markBits), nf.StoreMeta(expr.MetaKeyPRIORITY, 0)))
	default:
		rules = append(rules, nf.NewRule("to the address's virtual server", nf.ResetPriority(0)...))
	}
	return nf.Chain{Name: c.chain(), Rules: rules}
}
