package userspace

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// Chains of the table; for each origin there are more, see dispatch and take.
const (
	chainDispatch = "dispatch"
	chainDeliver  = "deliver"
	chainOutput   = "of-this-node"
	chainSend     = "send-to-process"
	chainLater    = "to-be-redirected"
	chainOurs     = "of-our-sockets"
	chainHidden   = "to-who-is-hidden"
	chainRest     = "rest"
)

const (
	flagsOffset = 13 // of TCP's flags, in its header
	flagFIN     = 1
	flagSYN     = 2
	flagRST     = 4
	flagACK     = 16

	directionReply        = 1      // IP_CT_DIR_REPLY
	sourceTranslated      = 1 << 4 // IPS_SRC_NAT
	destinationTranslated = 1 << 5 // IPS_DST_NAT
)

// chains are all of the table. They depend on the ports of the process, and on Pods.Interfaces.
func (t *table) chains() []nf.Chain {
	return slices.Concat(
		[]nf.Chain{
			t.RejectChain(),
			{Name: chainDeliver, Rules: []nf.Rule{t.setMark(), nf.NewRule("", nf.Accept())}},
			{Name: chainLater, Rules: []nf.Rule{
				earlier(),
				nf.NewRule("wait for the next process", nf.LoadMeta(expr.MetaKeyL4PROTO, 0), nf.In(t.Sets[away].Name), nf.Drop()),
				nf.NewRule("to be redirected", nf.Accept()),
			}},
			{Name: chainOurs, Rules: t.ofSockets()},
			{Name: chainHidden, Rules: t.hidden()},
			{Name: chainSend, Rules: t.send()},
			{Name: chainRest, Rules: t.rest()},
			t.admission(model.Any), t.admission(model.Internal),
		},
		t.takes(),
		[]nf.Chain{
			t.dispatch(elsewhere.String(), nil, elsewhere.take()),
			t.dispatch(fromPod.String(), nil, fromPod.take()),
			t.dispatch(fromNode.String(), t.fromPrefixes(""), fromNode.take()),
			t.dispatch(chainOutput, nil, chainSend),
			{Name: chainDispatch, Rules: t.origins("")},
			{
				Name:  "prerouting",
				Hook:  &nf.Hook{Kind: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: priority},
				Rules: t.prerouting(),
			},
			{
				Name:  "output",
				Hook:  &nf.Hook{Kind: "route", Number: unix.NF_INET_LOCAL_OUT, Priority: priority},
				Rules: t.output(),
			},
		},
		t.redirects(), t.pastIPVS())
}

// send has the node's own packets for a row come to prerouting, unless they are redirected.
func (t *table) send() []nf.Rule {
	if t.redirectAll {
		return t.translatedNext()
	}
	return slices.Concat([]nf.Rule{
		nf.NewRule("", append(isSCTP(), nf.GoTo(chainLater))...),
		earlier(), t.ofIPVS(),
	}, t.later(), []nf.Rule{
		nf.NewRule("the connection outlives its row", t.setConnectionMark()...),
		nf.NewRule("", nf.GoTo(chainDeliver)),
	})
}

// rest are the rules for packets whose destination is no row's. What is at an address that nobody serves is said by the
// plane in force.
func (t *table) rest() (rules []nf.Rule) {
	rules = t.answersToUs()
	if !t.phase.yields() {
		rules = append(rules, t.Guards()...)
	}
	return rules
}

// prerouting leads packets of our connections to their sockets, whatever rows there are, and looks at the
// destination of all others. What begins a connection is looked at in any case: the socket may be one that lingers
// after a connection before. So it may be when another plane has translated that packet; then those that follow are not
// the socket's either.
func (t *table) prerouting() []nf.Rule {
	if t.redirectAll {
		return t.unlessTranslated(chainDispatch)
	}
	if t.phase == waiting {
		return slices.Concat(t.unlessTranslated(chainDispatch), []nf.Rule{earlier(), ours(isSYN(nf.Differs))})
	}
	return []nf.Rule{
		t.ofProcess(),
		nf.NewRule("", append(protocolIs(unix.IPPROTO_UDP), nf.GoTo(chainDispatch))...),
		nf.NewRule("", append(isSYN(nf.Equals), nf.GoTo(chainDispatch))...),
		earlier(), ours(nil),
		nf.NewRule("", nf.GoTo(chainDispatch)),
	}
}

// ours leads packets to their sockets, if they have one of the process.
func ours(condition []any) nf.Rule {
	return nf.NewRule("", slices.Concat(condition, isTransparent(), []any{nf.Jump(chainOurs)})...)
}

// ofSockets is for packets with a socket. At an address of the node the kernel finds by itself one that lingers, or
// that is not complete yet; there IPVS, whose translations connection tracking does not tell, is to see the packet
// before.
func (t *table) ofSockets() []nf.Rule {
	if t.redirectAll { // nobody comes here, and the kernel may lack what the rules need
		return nil
	}
	if t.withoutFIB {
		return []nf.Rule{nf.NewRule("our connections", nf.GoTo(chainDeliver))}
	}
	return []nf.Rule{ // only a whole socket has a mark, whatever that is
		nf.NewRule("our connections", &expr.Socket{Key: expr.SocketKeyMark, Register: nf.Word(0)}, nf.Bits(0, 0, 0),
			nf.Equals(nf.Native(0)), nf.GoTo(chainDeliver)),
		nf.NewRule("beginning, or lingering",
			&expr.Fib{Register: nf.Word(0), FlagDADDR: true, ResultADDRTYPE: true},
			nf.Differs(nf.Native(unix.RTN_LOCAL)), nf.GoTo(chainDeliver)),
	}
}

// output has the node's own packets for Services routed to lo, so that they come to prerouting. What we
// send ourselves passes; its connection is marked, because the answer of a process of this node to a client whose
// address we keep has to come back to us as well, and would otherwise leave the node.
func (t *table) output() []nf.Rule {
	if t.redirectAll {
		return t.unlessTranslated(chainOutput)
	}
	direction := &expr.Ct{Key: expr.CtKeyDIRECTION, Register: nf.Word(0)}
	reply := []any{direction, nf.Equals([]byte{directionReply})}
	return append([]nf.Rule{
		t.ofProcess(),
		nf.NewRule("our own", append(append(isTransparent(), direction, nf.Differs([]byte{directionReply})),
			t.setConnectionMark()...)...),
		nf.NewRule("", append(isTransparent(), nf.Accept())...),
		nf.NewRule("errors are for clients", slices.Concat(reply, t.isICMP(), []any{nf.Accept()})...),
		nf.NewRule("answers to us", append(reply, t.ofConnection(nf.GoTo(chainDeliver))...)...),
		nf.NewRule("our connections", append(append(protocolIs(unix.IPPROTO_TCP), isSYN(nf.Differs)...),
			t.ofConnection(nf.GoTo(chainDeliver))...)...),
	}, t.beginning(chainOutput)...)
}

// ofConnection are the conditions that the process has marked the connection.
func (t *table) ofConnection(then ...any) []any {
	return append([]any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nf.Word(0)}, nf.Bits(0, t.Mark, 0), nf.Equals(nf.Native(t.Mark)),
	}, then...)
}

// unlessTranslated leaves alone what belongs to a connection that was redirected. (Of UDP, which may be silent for
// long, the rows say whether it still is to be.)
func (t *table) unlessTranslated(next string) []nf.Rule {
	return append([]nf.Rule{t.ofProcess()}, t.beginning(next)...)
}

// beginning looks at the destination of what may begin something. While another plane is in force still, only the flows
// of UDP go on that are the process's already.
func (t *table) beginning(next string) []nf.Rule {
	datagrams := protocolIs(unix.IPPROTO_UDP)
	if t.phase == waiting {
		return []nf.Rule{nf.NewRule("", append(datagrams, t.ofConnection(nf.GoTo(next))...)...)}
	}
	return []nf.Rule{
		nf.NewRule("", append(datagrams, nf.GoTo(next))...),
		earlier(),
		nf.NewRule("", nf.GoTo(next)),
	}
}

// origins tells who sends a packet, and goes to the chain for it. The node's own packets for rows were marked in
// output. What the process sends itself was not, and is not served again: a backend may be a NodePort of the node.
func (t *table) origins(prefix string) []nf.Rule {
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	here := []any{nf.LoadMeta(expr.MetaKeyIIFTYPE, 0), nf.Equals(loopback)}
	rules := []nf.Rule{nf.NewRule("this node", append(slices.Clone(here), nf.GoTo(prefix+fromNode.String()))...)}
	if prefix == "" && !t.redirectAll {
		rules = slices.Insert(rules, 0, nf.NewRule("of our sockets, or for no row", append(here,
			nf.LoadMeta(expr.MetaKeyMARK, 0), nf.Bits(0, t.Mark, 0), nf.Equals(nf.Native(0)), nf.Accept())...))
	}
	rules = append(rules, t.FromPods("pods", nf.GoTo(prefix+fromPod.String()))...)
	return append(rules, nf.NewRule("", nf.GoTo(prefix+elsewhere.String())))
}

// fromPrefixes sends what has a pod's address to the chain for pods.
func (t *table) fromPrefixes(prefix string) []nf.Rule {
	return []nf.Rule{nf.NewRule("pods",
		t.Family.Load(t.Family.Source, 0), nf.In("pods"), nf.GoTo(prefix+fromPod.String()))}
}

// dispatch looks the destination up, and goes on to the chains of a take.
func (t *table) dispatch(name string, first []nf.Rule, take string) nf.Chain {
	rules := append(slices.Clone(first), t.lookup(name != elsewhere.String(),
		func(s model.Scope) string { return take + "-" + s.String() })...)
	return nf.Chain{Name: name, Rules: append(rules, nf.NewRule("", nf.GoTo(chainRest)))}
}

// lookup are the rules that find the destination in the rows of scope Internal, if the packet may have them, and in
// those of scope Any, and what is next for it.
func (t *table) lookup(internal bool, next func(model.Scope) string) (rules []nf.Rule) {
	for _, scope := range []model.Scope{model.Internal, model.Any} {
		if scope == model.Internal && !internal {
			continue
		}
		key, _ := t.Family.DestinationKey()
		set := t.Sets[frontends+int(scope)].Name
		rules = append(rules, nf.NewRule("", append(key, nf.In(set), nf.GoTo(next(scope)))...))
	}
	return rules
}

// admission is who may come in, and what is refused or dropped.
func (t *table) admission(scope model.Scope) nf.Chain {
	in := func(set int, rest ...any) []any {
		key, _ := t.Family.DestinationKey()
		return append(append(key, nf.In(t.Sets[set+int(scope)].Name)), rest...)
	}
	_, next := t.Family.DestinationKey()
	return nf.Chain{Name: admit(scope), Rules: []nf.Rule{
		nf.NewRule("allowed sources", in(limited,
			t.Family.Load(t.Family.Source, next), nf.NotIn(t.Sets[sources+int(scope)].Name), nf.Drop())...),
		nf.NewRule("", in(dropped, nf.Drop())...),
		nf.NewRule("", in(refused, nf.GoTo(nf.ChainReject))...),
	}}
}

func admit(scope model.Scope) string { return "admit-" + scope.String() }

func (o origin) take() string { return "take-" + o.String() }

// takes are the chains in which a packet ends whose destination is a row's.
func (t *table) takes() (chains []nf.Chain) {
	names := []string{chainSend}
	for o := range numOrigins {
		chains = append(chains, nf.Chain{Name: o.take(), Rules: append(t.translatedNext(), t.take(o)...)})
		names = append(names, o.take())
	}
	for _, name := range names {
		for _, scope := range []model.Scope{model.Any, model.Internal} {
			chains = append(chains, nf.Chain{Name: name + "-" + scope.String(), Rules: []nf.Rule{
				answer(), nf.NewRule("", nf.Jump(admit(scope))), nf.NewRule("", nf.GoTo(name)),
			}})
		}
	}
	return chains
}

// take gives a packet to the process. Where that has ended, new connections wait for the next one, and what belongs to
// connections that it had is refused.
func (t *table) take(o origin) []nf.Rule {
	if t.redirectAll {
		return nil
	}
	const address, port = 0, 4
	family := t.Family.Number
	proxy := &expr.TProxy{Family: family, TableFamily: family, RegAddr: nf.Word(address), RegPort: nf.Word(port)}
	return slices.Concat([]nf.Rule{earlier(), t.ofIPVS()}, t.later(), []nf.Rule{
		nf.NewRule("the flow is ours", append(protocolIs(unix.IPPROTO_UDP), t.setConnectionMark()...)...),
		nf.NewRule("to the process",
			&expr.Immediate{Register: nf.Word(address), Data: t.loopback().AsSlice()},
			&expr.Immediate{Register: nf.Word(port), Data: bigEndian(t.ports[o])},
			proxy, nf.LoadMeta(expr.MetaKeyMARK, 8), nf.Bits(8, ^t.Mark, t.Mark), nf.StoreMeta(expr.MetaKeyMARK, 8),
			nf.Accept()),
		nf.NewRule("nobody knows the connection", append(append(protocolIs(unix.IPPROTO_TCP), isSYN(nf.Differs)...),
			nf.GoTo(nf.ChainReject))...),
		nf.NewRule("", nf.Drop()),
	})
}

// translatedNext leaves alone what will be redirected.
func (t *table) translatedNext() (rules []nf.Rule) {
	for _, condition := range t.redirectable() {
		rules = append(rules, nf.NewRule("", append(slices.Clone(condition), nf.GoTo(chainLater))...))
	}
	return rules
}

// earlier leaves alone what was redirected, or what another plane has translated before this one came.
func earlier() nf.Rule {
	return nf.NewRule("translated before", &expr.Ct{Key: expr.CtKeySTATUS, Register: nf.Word(0)},
		nf.Bits(0, destinationTranslated, 0), nf.Differs(nf.Native(0)), nf.Accept())
}

// answer leaves alone what is an answer to somebody who is hidden behind the row's destination: whoever hides pods
// behind the node may take the port of a NodePort for that, and the kernel has not put the pod's address in its place
// yet.
func answer() nf.Rule {
	return nf.NewRule("to who is hidden", &expr.Ct{Key: expr.CtKeyDIRECTION, Register: nf.Word(0)},
		nf.Equals([]byte{directionReply}), &expr.Ct{Key: expr.CtKeySTATUS, Register: nf.Word(0)},
		nf.Bits(0, sourceTranslated, 0), nf.Differs(nf.Native(0)), nf.GoTo(chainHidden))
}

// hidden is for such an answer. It may be to a socket of ours that somebody else has hidden; of TCP these are found
// before.
func (t *table) hidden() []nf.Rule {
	return append(t.answersToUs(), nf.NewRule("", nf.Accept()))
}

// answersToUs are datagrams to sockets of ours.
func (t *table) answersToUs() []nf.Rule {
	if t.redirectAll {
		return nil
	}
	return []nf.Rule{nf.NewRule("answers to our sockets", append(protocolIs(unix.IPPROTO_UDP),
		append(isTransparent(), nf.GoTo(chainDeliver))...)...)}
}

// later leaves alone what has begun since another plane is in force. Once only the rows of datagrams are left, no
// others come here.
func (t *table) later() []nf.Rule {
	if t.phase != draining {
		return nil
	}
	return []nf.Rule{nf.NewRule("another plane's", &expr.Ct{Key: expr.CtKeyMARK, Register: nf.Word(0)},
		nf.Bits(0, t.Mark, 0), nf.Equals(nf.Native(0)), nf.Accept())}
}

func (t *table) setMark() nf.Rule {
	return nf.NewRule("to lo", nf.LoadMeta(expr.MetaKeyMARK, 0), nf.Bits(0, ^t.Mark, t.Mark),
		nf.StoreMeta(expr.MetaKeyMARK, 0))
}

func (t *table) setConnectionMark() []any {
	return []any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nf.Word(0)}, nf.Bits(0, ^t.Mark, t.Mark),
		&expr.Ct{Key: expr.CtKeyMARK, Register: nf.Word(0), SourceRegister: true},
	}
}

func (t *table) isICMP() []any {
	if t.Family.V6() {
		return protocolIs(unix.IPPROTO_ICMPV6)
	}
	return protocolIs(unix.IPPROTO_ICMP)
}

func protocolIs(p byte) []any {
	return []any{nf.LoadMeta(expr.MetaKeyL4PROTO, 0), nf.Equals([]byte{p})}
}

// isSYN compares the flags of TCP with those of a packet that begins a connection.
func isSYN(compare func([]byte) any) []any {
	return append(protocolIs(unix.IPPROTO_TCP),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: flagsOffset, Len: 1, DestRegister: nf.Word(0)},
		&expr.Bitwise{
			SourceRegister: nf.Word(0), DestRegister: nf.Word(0), Len: 1,
			Mask: []byte{flagFIN | flagSYN | flagRST | flagACK}, Xor: []byte{0},
		},
		compare([]byte{flagSYN}))
}
