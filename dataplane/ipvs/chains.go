package ipvs

import (
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// The priorities of base chains. Those of the nat chains order them among those of others only, see
// package nftables: kube-proxy goes first. IPVS looks at packets at 99 in LOCAL_IN and at -98 in LOCAL_OUT
// (ip_vs_ops4 in the kernel's net/netfilter/ipvs/ip_vs_core.c). What it sends on comes through LOCAL_OUT
// again, from the start, and then through POSTROUTING.
const (
	translation  = -99
	masquerading = 100

	beforeIPVSIn  = 98
	afterIPVSIn   = 100
	beforeIPVSOut = -99
	afterIPVSOut  = -97
)

// The names of the constant chains.
const (
	chainServices       = "services"
	chainInternal       = "internal"
	chainReject         = "refuse"
	chainMark           = "mark"
	chainMarkOffCluster = "mark-off-cluster"
	chainBefore         = "before-ipvs"
	chainAfter          = "after-ipvs"
	chainLearn          = "learn"
	chainLearnInternal  = "learn-internal"
)

// constantChains are the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) constantChains() []chain {
	return slices.Concat(t.decisions(), t.hooks(), t.aroundIPVS())
}

// decisions are what is decided about the first packet of a connection.
func (t *table) decisions() []chain {
	f := t.family
	to := func(s string, verdict any) []any { return all(f.load(f.destination, 0), in(s), verdict) }
	return []chain{
		t.rejectChain(),
		{name: chainMark, rules: []rule{{"", t.setMark()}}},
		{name: chainMarkOffCluster, rules: append(t.fromPods("pods keep their address", back()), rule{"", t.setMark()})},
		{name: chainServices, rules: append(t.dispatch(frontends),
			rule{"guards: addresses", to("drop-addresses", drop())},
			rule{"", to("reject-addresses", goTo(chainReject))},
			rule{"guards: ranges", to("drop-ranges", drop())},
			rule{"", to("reject-ranges", goTo(chainReject))},
			// What IPVS does not take would reach the node's own sockets.
			rule{"addresses that are local for IPVS only", to("local-addresses", goTo(chainReject))},
		)},
		{name: chainInternal, rules: append(t.dispatch(internalFrontends), rule{"", all(goTo(chainServices))})},
	}
}

func (t *table) hooks() []chain {
	const nat, filter = "nat", "filter"
	at := func(name, kind string, number uint32, priority int32, rules ...rule) chain {
		return chain{name: name, hook: &hook{kind, number, priority}, rules: rules}
	}
	return []chain{
		at("prerouting", nat, unix.NF_INET_PRE_ROUTING, translation,
			append(t.fromPods("pods", goTo(chainInternal)), rule{"", all(goTo(chainServices))})...),
		at("output", nat, unix.NF_INET_LOCAL_OUT, translation,
			rule{"refusals, whose destination may be a Service address", append(is(expr.CtStateBitRELATED), accept())},
			rule{"this node", all(goTo(chainInternal))}),
		at("input-before-ipvs", filter, unix.NF_INET_LOCAL_IN, beforeIPVSIn, rule{"", all(goTo(chainBefore))}),
		at("input-after-ipvs", filter, unix.NF_INET_LOCAL_IN, afterIPVSIn, rule{"", all(goTo(chainAfter))}),
		at("output-before-ipvs", filter, unix.NF_INET_LOCAL_OUT, beforeIPVSOut, rule{"", all(goTo(chainBefore))}),
		at("output-after-ipvs", filter, unix.NF_INET_LOCAL_OUT, afterIPVSOut, rule{"", all(goTo(chainAfter))}),
		at("postrouting", nat, unix.NF_INET_POST_ROUTING, masquerading, t.masquerade(), t.masqueradeHairpin()),
	}
}

// aroundIPVS are the chains directly before and after it. A packet for the virtual server of a mark has
// that mark for this short way only, because IPVS compares all its bits; its priority keeps the mark that it
// had. Then what IPVS chose is remembered, if the pool has affinity.
func (t *table) aroundIPVS() []chain {
	swap := []any{
		loadMeta(expr.MetaKeyMARK, 0), loadMeta(expr.MetaKeyPRIORITY, 1),
		storeMeta(expr.MetaKeyMARK, 1), storeMeta(expr.MetaKeyPRIORITY, 0),
	}
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	chosen := append(is(expr.CtStateBitNEW), &expr.Ct{Key: expr.CtKeySTATUS, Register: word(0)},
		bits(0, destinationTranslated, 0), equals(native(0)))
	return []chain{
		{name: chainBefore, rules: []rule{
			{"select the virtual server of the pool", append(hasMarkBits(expr.MetaKeyPRIORITY), swap...)},
		}},
		{name: chainAfter, rules: []rule{
			{"the former mark", append(hasMarkBits(expr.MetaKeyMARK), swap...)},
			{"affinity", append(append(chosen, t.family.originalKey()...), in("sticky"), jump(chainLearn))},
			{"", append(hasMarkBits(expr.MetaKeyPRIORITY), setPriority(0)...)},
		}},
		{name: chainLearn, rules: append([]rule{
			{"", append(hasMarkBits(expr.MetaKeyPRIORITY), goTo(chainLearnInternal))},
		}, t.learn(frontends)...)},
		{name: chainLearnInternal, rules: t.learn(internalFrontends)},
	}
}

// learn finds the token of the destination that the connection's first packet had, and goes to the chain
// that remembers for as long as the class says.
func (t *table) learn(m int) []rule {
	return []rule{
		{"token", append(t.family.originalKey(), find(t.sets[m].name, 0), storeMeta(expr.MetaKeyPRIORITY, 0))},
		{"", all(loadMeta(expr.MetaKeyPRIORITY, 0), bits(0, ^uint32(poolMask), 0), follow("learners"))},
		{"", setPriority(0)},
	}
}

// dispatch finds the token of the destination and goes to the chain of its class. The token travels
// in the packet's priority because nft cannot print a rule that uses what one map says as the key of
// the next. Only the first packet of a connection comes here; the class's chain resets its priority.
func (t *table) dispatch(m int) []rule {
	exprs, _ := t.family.destinationKey()
	return []rule{{"token, then class", append(exprs,
		find(t.sets[m].name, 0), storeMeta(expr.MetaKeyPRIORITY, 0),
		loadMeta(expr.MetaKeyPRIORITY, 0), bits(0, ^uint32(poolMask), 0), follow("classes"))}}
}

// fromPods are the rules that send packets of pods to a verdict.
func (t *table) fromPods(comment string, verdict any) []rule {
	rules := []rule{{comment, all(t.family.load(t.family.source, 0), in("pods"), verdict)}}
	for _, name := range t.podInterfaces {
		rules = append(rules, rule{comment, all(
			loadMeta(expr.MetaKeyIIFNAME, 0), equals(interfacePattern(name)), verdict)})
	}
	return rules
}

// interfacePattern is the name as the kernel compares it: whole, or the bytes before a final *.
func interfacePattern(name string) []byte {
	if prefix, wild := strings.CutSuffix(name, "*"); wild {
		return []byte(prefix)
	}
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

func (t *table) setMark() []any {
	return all(loadMeta(expr.MetaKeyMARK, 0), bits(0, ^t.mark, t.mark), storeMeta(expr.MetaKeyMARK, 0))
}

func (t *table) masquerade() rule {
	return rule{"replace the source address, clear the mark", all(
		loadMeta(expr.MetaKeyMARK, 0), bits(0, t.mark, 0), equals(native(t.mark)),
		loadMeta(expr.MetaKeyMARK, 0), bits(0, ^uint32(0), t.mark), storeMeta(expr.MetaKeyMARK, 0),
		&expr.Masq{FullyRandom: true})}
}

// masqueradeHairpin leaves alone what a process of this node sends to another through the loopback
// interface: that finds back.
func (t *table) masqueradeHairpin() rule {
	f := t.family
	return rule{"backends that reach themselves", all(
		loadMeta(expr.MetaKeyOIFNAME, 0), differs(interfacePattern("lo")),
		f.load(f.source, 0), f.load(f.destination, f.address.words()), in("hairpin"),
		&expr.Masq{FullyRandom: true})}
}

func (t *table) rejectChain() chain {
	protocol := loadMeta(expr.MetaKeyL4PROTO, 0)
	c := chain{name: chainReject, rules: []rule{{"", all(
		protocol, equals([]byte{unix.IPPROTO_TCP}), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})}}}
	for _, u := range t.family.unreachable {
		var exprs []any
		if u.protocol != 0 {
			exprs = all(protocol, equals([]byte{u.protocol}))
		}
		c.rules = append(c.rules, rule{"", append(exprs, &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: u.code})})
	}
	return c
}

// classChain is the chain of a class: who may come in, whose source is replaced, where it goes.
func (t *table) classChain(c class) chain {
	result := chain{name: c.chain()}
	add := func(comment string, exprs ...any) {
		result.rules = append(result.rules, rule{comment, exprs})
	}
	if c.limited {
		name := t.sets[sources+int(c.scope)].name
		key, next := t.family.destinationKey()
		add("allowed sources", append(key, t.family.load(t.family.source, next), notIn(name), drop())...)
	}
	switch c.verdict {
	case model.Drop:
		add("", drop())
		return result
	case model.Reject:
		add("", goTo(chainReject))
		return result
	}
	switch c.snat {
	case model.OffCluster:
		add("", jump(chainMarkOffCluster))
	case model.Always:
		add("", jump(chainMark))
	}
	if c.affinity > 0 {
		result.rules = append(result.rules, t.recall(c)...)
	}
	if c.scope == model.Internal {
		add("to the pool's virtual server", loadMeta(expr.MetaKeyPRIORITY, 0), bits(0, poolMask, markBits),
			storeMeta(expr.MetaKeyPRIORITY, 0))
	} else {
		add("to the address's virtual server", setPriority(0)...)
	}
	return result
}

// client loads the key of the memory of affinity: the client, and the number of the pool in the token.
func (t *table) client() (exprs []any, next uint32) {
	n := t.family.address.words()
	return all(t.family.load(t.family.source, 0), loadMeta(expr.MetaKeyPRIORITY, n), bits(n, poolMask, 0)), n + 1
}

// spare is how much longer than a client is remembered its backend is kept, so that one who is remembered
// has one.
const spare = time.Minute

// remember makes the client's time begin anew, in both memories. An update keeps the data of what it finds
// (nft_rhash_update in the kernel's net/netfilter/nft_set_hash.c).
func (t *table) remember(c class) []any {
	exprs, next := t.client()
	exprs = append(exprs, t.family.load(t.family.destination, next), loadPort(next+t.family.address.words()))
	return append(exprs,
		&expr.Dynset{
			SrcRegKey: word(0), SrcRegData: word(next), SetName: "affinity",
			Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: c.affinity + spare,
		},
		&expr.Dynset{
			SrcRegKey: word(0), SetName: "clients", Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: c.affinity,
		})
}

// recall sends the client to the backend that is remembered for it, if one is, past IPVS. Whether one is
// tells a set of its own, because nft cannot print a rule that writes back what a map says.
func (t *table) recall(c class) []rule {
	n := t.family.address.words()
	known, next := t.client()
	known = append(known, in("clients"))
	scratch := next + n + 1
	backend, _ := t.client()
	backend = append(slices.Concat(known, backend), find("affinity", next))
	backend = append(backend, setPriority(scratch)...)
	return []rule{
		{"remembered", slices.Concat(known, t.remember(c))},
		{"recall", append(backend, &expr.NAT{
			Type: expr.NATTypeDestNAT, Family: uint32(t.family.number),
			RegAddrMin: word(next), RegProtoMin: word(next + n), Specified: true,
		})},
	}
}

// learnerChain remembers the backend that IPVS chose, in place of an earlier one.
func (t *table) learnerChain(c class) chain {
	former, next := t.client()
	former = append(former, t.family.load(t.family.destination, next), loadPort(next+t.family.address.words()),
		&expr.Dynset{SrcRegKey: word(0), SrcRegData: word(next), SetName: "affinity", Operation: dynsetDelete})
	return chain{name: c.learner(), rules: []rule{{"", former}, {"", t.remember(c)}, {"", setPriority(0)}}}
}
