package nft

import (
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// These are the priorities of base chains: those of nft's dstnat and srcnat, the first one later by one. Once a chain
// has translated a connection, the kernel asks no further chain. So kube-proxy, whose chains have -100, goes first as
// long as its rules are there. When it comes back and Fairlead is gone, it serves Services with endpoints whatever
// Fairlead has left in the kernel. But kube-proxy has no rule for a deleted Service, nor, except in its mode nftables,
// for one without endpoints. There the stale rules that Fairlead has left still answer, until fairlead clean has run.
const (
	Translation  = -99
	Masquerading = 100
)

// Chains that base chains and classes lead to.
const (
	ChainServices = "services" // packets of others
	ChainInternal = "internal" // packets of this node and its pods
	ChainReject   = "refuse"

	chainMark           = "mark"
	chainMarkOffCluster = "mark-off-cluster"
)

// Decisions are the chains that look up the destination of a connection's first packet, and those they need. Internal
// are the rules that come first for packets of this node, last those at the end for all.
func (t *Table) Decisions(internal []Rule, last ...Rule) []Chain {
	mark := NewRule("", LoadMeta(expr.MetaKeyMARK, 0), Bits(0, ^t.Mark, t.Mark), StoreMeta(expr.MetaKeyMARK, 0))
	return []Chain{
		t.RejectChain(),
		{Name: chainMark, Rules: []Rule{mark}},
		{Name: chainMarkOffCluster, Rules: append(t.FromPods("pods keep their address", Return()), mark)},
		{Name: ChainServices, Rules: slices.Concat([]Rule{t.Dispatch("frontends")}, t.Guards(), last)},
		{Name: ChainInternal, Rules: append(slices.Clone(internal), NewRule("", GoTo(ChainServices)))},
	}
}

// Guards are the rules for addresses at which nothing is served but frontends.
func (t *Table) Guards() []Rule {
	to := func(set string, verdict any) []any {
		return []any{t.Family.Load(t.Family.Destination, 0), In(set), Counter(), verdict}
	}
	return []Rule{
		NewRule("guards: addresses", to("drop-addresses", Drop())...),
		NewRule("", to("reject-addresses", GoTo(ChainReject))...),
		NewRule("guards: ranges", to("drop-ranges", Drop())...),
		NewRule("", to("reject-ranges", GoTo(ChainReject))...),
	}
}

// Dispatch finds the token of the destination in a map and goes to the chain of its class, or to Serve. The token
// travels in the packet's priority because nft cannot print a rule that uses what one map says as the key of
// the next. Only the first packet of a connection comes here; the rule that translates it resets its priority.
func (t *Table) Dispatch(frontends string) Rule {
	exprs, _ := t.Family.DestinationKey()
	exprs = append(exprs, Find(frontends, 0), StoreMeta(expr.MetaKeyPRIORITY, 0))
	if t.Serve != "" {
		return NewRule("token", append(exprs, GoTo(t.Serve))...)
	}
	return NewRule("token, then class", append(exprs,
		LoadMeta(expr.MetaKeyPRIORITY, 0), Bits(0, ^uint32(PoolMask), 0), Follow("classes"))...)
}

// FromPods are the rules that send packets of pods to a verdict.
func (t *Table) FromPods(comment string, verdict any) []Rule {
	rules := []Rule{NewRule(comment, t.Family.Load(t.Family.Source, 0), In("pods"), verdict)}
	for _, name := range t.PodInterfaces {
		rules = append(rules, NewRule(comment,
			LoadMeta(expr.MetaKeyIIFNAME, 0), Equals(InterfacePattern(name)), verdict))
	}
	return rules
}

// InterfacePattern is the name as the kernel compares it: whole, or the bytes before a final *.
func InterfacePattern(name string) []byte {
	if prefix, wild := strings.CutSuffix(name, "*"); wild {
		return []byte(prefix)
	}
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

// RejectChain refuses connections, as a closed port does.
func (t *Table) RejectChain() Chain {
	protocol := LoadMeta(expr.MetaKeyL4PROTO, 0)
	c := Chain{Name: ChainReject, Rules: []Rule{NewRule("",
		protocol, Equals([]byte{unix.IPPROTO_TCP}), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})}}
	for _, u := range t.Family.unreachable {
		exprs := []any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: u.code}}
		if u.protocol != 0 {
			exprs = append([]any{protocol, Equals([]byte{u.protocol})}, exprs...)
		}
		c.Rules = append(c.Rules, NewRule("", exprs...))
	}
	return c
}

// Admission are the first rules of a class's chain: which clients are allowed, and whose source is to be replaced.
// Unless the verdict is Forward they are all. Sources names the set of allowed sources; empty: all clients are allowed.
//
// The mark is set in the constant chains only. Unused classes may stay in the kernel, and must not keep the mark of a
// former configuration.
func (t *Table) Admission(v model.Verdict, snat model.SNAT, sources string) (rules []Rule) {
	add := func(comment string, exprs ...any) { rules = append(rules, NewRule(comment, exprs...)) }
	if sources != "" {
		key, next := t.Family.DestinationKey()
		add("allowed sources", append(key, t.Family.Load(t.Family.Source, next), NotIn(sources), Counter(), Drop())...)
	}
	switch {
	case v == model.Drop:
		add("", Drop())
	case v == model.Reject:
		add("", GoTo(ChainReject))
	case snat == model.OffCluster:
		add("", Jump(chainMarkOffCluster))
	case snat == model.Always:
		add("", Jump(chainMark))
	}
	return rules
}

// Masquerade is the rule for packets whose source is to be replaced.
func (t *Table) Masquerade() Rule {
	return NewRule("replace the source address, clear the mark",
		t.marked(), t.clearMark(), &expr.Masq{FullyRandom: true})
}

// MasqueradeTo are such rules for clients with a port from 1024 on, which get one of a range. (Below that are ports
// that tell backends something, and the kernel keeps them below.) Backends that reach themselves have no mark.
// If their flow's original tuple goes from a backend to itself, too, another program translates its packets.
func (t *Table) MasqueradeTo(ports PortRange) (rules []Rule) {
	const first = 1024
	f := t.Family
	original := []any{
		Tuple{Key: f.CtSource, Register: Word(0)}, Tuple{Key: f.CtDestination, Register: Word(f.Address.Words())},
	}
	to := []any{
		&expr.Immediate{Register: Word(0), Data: encodePort(ports.First)},
		&expr.Immediate{Register: Word(1), Data: encodePort(ports.Last)},
		masqueradeTo{first: Word(0), last: Word(1)},
	}
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		of := append(IsProtocol(byte(p)),
			loadSourcePort(0), &expr.Cmp{Op: expr.CmpOpGte, Register: Word(0), Data: encodePort(first)})
		rules = append(rules,
			NewRule("replace the source address and port, clear the mark", t.marked(), of, t.clearMark(), to),
			NewRule("backends that reach themselves", PastLoopback(), t.hairpin(), original, NotIn(hairpins), of, to))
	}
	return rules
}

// marked goes on with packets that have the mark.
func (t *Table) marked() []any {
	return []any{LoadMeta(expr.MetaKeyMARK, 0), Bits(0, t.Mark, 0), Equals(Native(t.Mark))}
}

// clearMark takes it from those that have it.
func (t *Table) clearMark() []any {
	return []any{LoadMeta(expr.MetaKeyMARK, 0), Bits(0, ^uint32(0), t.Mark), StoreMeta(expr.MetaKeyMARK, 0)}
}

// MasqueradeHairpin is the rule for backends that reach themselves. It begins with the plane's conditions.
func (t *Table) MasqueradeHairpin(conditions ...any) Rule {
	return NewRule("backends that reach themselves", conditions, t.hairpin(), &expr.Masq{FullyRandom: true})
}

func (t *Table) hairpin() []any {
	f := t.Family
	return []any{f.Load(f.Source, 0), f.Load(f.Destination, f.Address.Words()), In(hairpins)}
}

const hairpins = "hairpin"

// Hairpins is the set of the backends that may reach themselves: pairs of the same address.
func (f Family) Hairpins() *Set {
	return &Set{Name: hairpins, Key: []Field{f.Address, f.Address}, Shared: true}
}

// PastLoopback is the condition that a packet leaves by another interface than lo. Answers to processes of this node
// come back by lo without it.
func PastLoopback() []any {
	return []any{LoadMeta(expr.MetaKeyOIFNAME, 0), Differs(InterfacePattern("lo"))}
}
