package userspace

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The way of a packet, where TPROXY leads it. A chain's name says what becomes of a packet in it:
//
//	prerouting ─ has a socket of ours ─► of-our-sockets ─► deliver: mark, and so to the socket
//	    └─ else dispatch ─ by origin ─► pods, node, elsewhere ─ a row's? ─► take-…-any, take-…-internal
//	                                        │ no: rest, guards                └─► admit-…: allowed? refused? dropped?
//	output ─ this node's ─► of-this-node ─ a row's? ─► send-to-process: mark        └─► take-…: TPROXY
//	                                                        └─► lo ─► prerouting
//
// Rows are elements of sets, so the rules do not depend on them. They depend on the phase (phase.go): a plane that
// waits or drains leaves to another one what begins, and keeps only what it knows.

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
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
	flagACK = 16

	directionReply        = 1      // IP_CT_DIR_REPLY
	sourceTranslated      = 1 << 4 // IPS_SRC_NAT
	destinationTranslated = 1 << 5 // IPS_DST_NAT
)

// chains are all of the table. They depend on the ports of the process, and on Pods.Interfaces.
func (t *table) chains() []nft.Chain {
	return slices.Concat(
		[]nft.Chain{
			t.RejectChain(),
			{Name: chainDeliver, Rules: []nft.Rule{t.setMark(), nft.NewRule("", nft.Accept())}},
			{Name: chainLater, Rules: []nft.Rule{
				earlier(),
				nft.NewRule("wait for the next process", nft.LoadMeta(expr.MetaKeyL4PROTO, 0), nft.In(t.Sets[away].Name),
					nft.Drop()),
				nft.NewRule("to be redirected", nft.Accept()),
			}},
			{Name: chainOurs, Rules: t.ofSockets()},
			{Name: chainHidden, Rules: t.hidden()},
			{Name: chainSend, Rules: t.send()},
			{Name: chainRest, Rules: t.rest()},
			t.admission(model.Any), t.admission(model.Internal),
		},
		t.takes(),
		[]nft.Chain{
			t.dispatch(elsewhere.String(), nil, elsewhere.take()),
			t.dispatch(fromPod.String(), nil, fromPod.take()),
			t.dispatch(fromNode.String(), t.fromPrefixes(""), fromNode.take()),
			t.dispatch(chainOutput, nil, chainSend),
			{Name: chainDispatch, Rules: t.origins("")},
			{
				Name:  "prerouting",
				Hook:  &nft.Hook{Kind: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: priority},
				Rules: t.prerouting(),
			},
			{
				Name:  "output",
				Hook:  &nft.Hook{Kind: "route", Number: unix.NF_INET_LOCAL_OUT, Priority: priority},
				Rules: t.output(),
			},
		},
		t.redirects(), t.pastIPVS())
}

// send has the node's own packets for a row come to prerouting, unless they are redirected.
func (t *table) send() []nft.Rule {
	if t.redirectAll {
		return t.translatedNext()
	}
	return slices.Concat([]nft.Rule{
		nft.NewRule("", isSCTP(), nft.GoTo(chainLater)),
		earlier(), t.ofIPVS(),
	}, t.later(), []nft.Rule{
		nft.NewRule("the connection outlives its row", t.setConnectionMark()...),
		nft.NewRule("", nft.GoTo(chainDeliver)),
	})
}

// rest are the rules for packets whose destination is no row's. The plane in force decides about addresses without a
// row.
func (t *table) rest() (rules []nft.Rule) {
	rules = t.answersToUs()
	if !t.phase.yields() {
		rules = append(rules, t.Guards()...)
	}
	return rules
}

// prerouting leads packets of our connections to their sockets, whatever rows there are, and looks at the destination
// of all others. The first packet of a connection is looked at in any case: the socket may be in TIME-WAIT after an
// earlier one. Such a socket may remain when another plane has translated that packet. Then the packets that follow are
// not the socket's either.
func (t *table) prerouting() []nft.Rule {
	if t.redirectAll {
		return t.unlessTranslated(chainDispatch)
	}
	if t.phase == waiting {
		return slices.Concat(t.unlessTranslated(chainDispatch), []nft.Rule{earlier(), ours(isSYN(nft.Differs))})
	}
	return []nft.Rule{
		t.ofProcess(),
		nft.NewRule("", nft.IsProtocol(unix.IPPROTO_UDP), nft.GoTo(chainDispatch)),
		nft.NewRule("", isSYN(nft.Equals), nft.GoTo(chainDispatch)),
		earlier(), ours(nil),
		nft.NewRule("", nft.GoTo(chainDispatch)),
	}
}

// ours leads packets to their sockets, if they have one of the process.
func ours(condition []any) nft.Rule {
	return nft.NewRule("", condition, isTransparent(), nft.Jump(chainOurs))
}

// ofSockets is for packets with a socket. At an address of the node the kernel itself finds a socket that is in
// TIME-WAIT or not complete yet. There IPVS is to see the packet before, as connection tracking does not tell its
// translations.
func (t *table) ofSockets() []nft.Rule {
	if t.redirectAll { // no packet comes here, and the kernel may lack what the rules need
		return nil
	}
	return []nft.Rule{ // only a whole socket has a mark, whatever that is
		nft.NewRule("our connections", &expr.Socket{Key: expr.SocketKeyMark, Register: nft.Word(0)}, nft.Bits(0, 0, 0),
			nft.Equals(nft.Native(0)), nft.GoTo(chainDeliver)),
		nft.NewRule("beginning, or draining",
			&expr.Fib{Register: nft.Word(0), FlagDADDR: true, ResultADDRTYPE: true},
			nft.Differs(nft.Native(unix.RTN_LOCAL)), nft.GoTo(chainDeliver)),
	}
}

// output has the node's own packets for Services routed to lo, so that they come to prerouting. The process's own
// packets pass, and their connection is marked. A process of this node may answer a client whose address we keep. The
// mark brings the answer back to us; else it would leave the node.
func (t *table) output() []nft.Rule {
	if t.redirectAll {
		return t.unlessTranslated(chainOutput)
	}
	direction := &expr.Ct{Key: expr.CtKeyDIRECTION, Register: nft.Word(0)}
	reply := []any{direction, nft.Equals([]byte{directionReply})}
	return append([]nft.Rule{
		t.ofProcess(),
		nft.NewRule("our own", isTransparent(), direction, nft.Differs([]byte{directionReply}), t.setConnectionMark()),
		nft.NewRule("", isTransparent(), nft.Accept()),
		nft.NewRule("errors are for clients", reply, t.isICMP(), nft.Accept()),
		nft.NewRule("answers to us", reply, t.ofConnection(nft.GoTo(chainDeliver))),
		nft.NewRule("our connections", isSYN(nft.Differs), t.ofConnection(nft.GoTo(chainDeliver))),
	}, t.beginning(chainOutput)...)
}

// ofConnection are the conditions that the process has marked the connection.
func (t *table) ofConnection(then ...any) []any {
	return append([]any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nft.Word(0)}, nft.Bits(0, t.Mark, 0), nft.Equals(nft.Native(t.Mark)),
	}, then...)
}

// unlessTranslated leaves alone what belongs to a connection that was redirected. (Of UDP, which may be silent for
// long, the rows say whether it still is to be.)
func (t *table) unlessTranslated(next string) []nft.Rule {
	return append([]nft.Rule{t.ofProcess()}, t.beginning(next)...)
}

// beginning looks at the destination of what may begin something. While another plane is in force still, only the flows
// of UDP go on that are the process's already.
func (t *table) beginning(next string) []nft.Rule {
	datagrams := nft.IsProtocol(unix.IPPROTO_UDP)
	if t.phase == waiting {
		return []nft.Rule{nft.NewRule("", datagrams, t.ofConnection(nft.GoTo(next)))}
	}
	return []nft.Rule{
		nft.NewRule("", datagrams, nft.GoTo(next)),
		earlier(),
		nft.NewRule("", nft.GoTo(next)),
	}
}

// origins tells who sends a packet, and goes to the chain for it. The node's own packets for rows were marked in
// output. The process's own were not, and are not served again: a backend may be a NodePort of the node.
func (t *table) origins(prefix string) []nft.Rule {
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	here := []any{nft.LoadMeta(expr.MetaKeyIIFTYPE, 0), nft.Equals(loopback)}
	rules := []nft.Rule{nft.NewRule("this node", here, nft.GoTo(prefix+fromNode.String()))}
	if prefix == "" && !t.redirectAll {
		rules = slices.Insert(rules, 0, nft.NewRule("of our sockets, or for no row", here,
			nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, t.Mark, 0), nft.Equals(nft.Native(0)), nft.Accept()))
	}
	rules = append(rules, t.FromPods("pods", nft.GoTo(prefix+fromPod.String()))...)
	return append(rules, nft.NewRule("", nft.GoTo(prefix+elsewhere.String())))
}

// fromPrefixes sends what has a pod's address to the chain for pods.
func (t *table) fromPrefixes(prefix string) []nft.Rule {
	return []nft.Rule{nft.NewRule("pods",
		t.Family.Load(t.Family.Source, 0), nft.In("pods"), nft.GoTo(prefix+fromPod.String()))}
}

// dispatch looks the destination up, and goes on to the chains of a take.
func (t *table) dispatch(name string, first []nft.Rule, take string) nft.Chain {
	rules := append(slices.Clone(first), t.lookup(name != elsewhere.String(),
		func(s model.Scope) string { return take + "-" + s.String() })...)
	return nft.Chain{Name: name, Rules: append(rules, nft.NewRule("", nft.GoTo(chainRest)))}
}

// lookup are the rules that find the destination in the rows, and say what is next for it. They look at scope Internal,
// if the packet may have these rows, and then at scope Any.
func (t *table) lookup(internal bool, next func(model.Scope) string) (rules []nft.Rule) {
	for _, scope := range []model.Scope{model.Internal, model.Any} {
		if scope == model.Internal && !internal {
			continue
		}
		key, _ := t.Family.DestinationKey()
		set := t.Sets[frontends+int(scope)].Name
		rules = append(rules, nft.NewRule("", append(key, nft.In(set), nft.GoTo(next(scope)))...))
	}
	return rules
}

// admission is who may come in, and what is refused or dropped.
func (t *table) admission(scope model.Scope) nft.Chain {
	in := func(set int, rest ...any) []any {
		key, _ := t.Family.DestinationKey()
		return append(append(key, nft.In(t.Sets[set+int(scope)].Name)), rest...)
	}
	_, next := t.Family.DestinationKey()
	return nft.Chain{Name: admit(scope), Rules: []nft.Rule{
		nft.NewRule("allowed sources", in(limited,
			t.Family.Load(t.Family.Source, next), nft.NotIn(t.Sets[nft.Sources+int(scope)].Name), nft.Counter(), nft.Drop())...),
		nft.NewRule("", in(dropped, nft.Counter(), nft.Drop())...),
		nft.NewRule("", in(refused, nft.Counter(), nft.GoTo(nft.ChainReject))...),
	}}
}

func admit(scope model.Scope) string { return "admit-" + scope.String() }

func (o origin) take() string { return "take-" + o.String() }

// takes are the chains in which a packet ends whose destination is a row's.
func (t *table) takes() (chains []nft.Chain) {
	names := []string{chainSend}
	for o := range numOrigins {
		chains = append(chains, nft.Chain{Name: o.take(), Rules: append(t.translatedNext(), t.take(o)...)})
		names = append(names, o.take())
	}
	for _, name := range names {
		for _, scope := range []model.Scope{model.Any, model.Internal} {
			chains = append(chains, nft.Chain{Name: name + "-" + scope.String(), Rules: []nft.Rule{
				answer(), nft.NewRule("", nft.Jump(admit(scope))), nft.NewRule("", nft.GoTo(name)),
			}})
		}
	}
	return chains
}

// take gives a packet to the process. Where that has ended, new connections wait for the next one, and what belongs to
// connections that it had is refused.
func (t *table) take(o origin) []nft.Rule {
	if t.redirectAll {
		return nil
	}
	const address, port = 0, 4
	family := t.Family.Number
	proxy := &expr.TProxy{Family: family, TableFamily: family, RegAddr: nft.Word(address), RegPort: nft.Word(port)}
	return slices.Concat([]nft.Rule{earlier(), t.ofIPVS()}, t.later(), []nft.Rule{
		nft.NewRule("the flow is ours", nft.IsProtocol(unix.IPPROTO_UDP), t.setConnectionMark()),
		nft.NewRule("to the process",
			&expr.Immediate{Register: nft.Word(address), Data: t.loopback().AsSlice()},
			&expr.Immediate{Register: nft.Word(port), Data: bigEndian(t.ports[o])},
			proxy, nft.LoadMeta(expr.MetaKeyMARK, 8), nft.Bits(8, ^t.Mark, t.Mark), nft.StoreMeta(expr.MetaKeyMARK, 8),
			nft.Accept()),
		nft.NewRule("the connection is unknown", isSYN(nft.Differs), nft.GoTo(nft.ChainReject)),
		nft.NewRule("", nft.Drop()),
	})
}

// translatedNext leaves alone what will be redirected.
func (t *table) translatedNext() (rules []nft.Rule) {
	for _, condition := range t.redirectable() {
		rules = append(rules, nft.NewRule("", condition, nft.GoTo(chainLater)))
	}
	return rules
}

// earlier leaves alone what was redirected, or what another plane has translated before this one came.
func earlier() nft.Rule {
	return nft.NewRule("translated before", &expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)},
		nft.Bits(0, destinationTranslated, 0), nft.Differs(nft.Native(0)), nft.Accept())
}

// answer leaves alone the answers to a client that is hidden behind the row's destination. A program that hides pods
// behind the node may take the port of a NodePort for that. The kernel has not put the pod's address in its place yet.
func answer() nft.Rule {
	return nft.NewRule("to clients behind source NAT", &expr.Ct{Key: expr.CtKeyDIRECTION, Register: nft.Word(0)},
		nft.Equals([]byte{directionReply}), &expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)},
		nft.Bits(0, sourceTranslated, 0), nft.Differs(nft.Native(0)), nft.GoTo(chainHidden))
}

// hidden is for such an answer. It may be to a socket of ours that another program has hidden; of TCP these are found
// before.
func (t *table) hidden() []nft.Rule {
	return append(t.answersToUs(), nft.NewRule("", nft.Accept()))
}

// answersToUs are datagrams to sockets of ours.
func (t *table) answersToUs() []nft.Rule {
	if t.redirectAll {
		return nil
	}
	return []nft.Rule{nft.NewRule("answers to our sockets",
		nft.IsProtocol(unix.IPPROTO_UDP), isTransparent(), nft.GoTo(chainDeliver))}
}

// later leaves alone what has begun since another plane is in force. Once only the rows of datagrams are left, no
// others come here.
func (t *table) later() []nft.Rule {
	if t.phase != draining {
		return nil
	}
	return []nft.Rule{nft.NewRule("another plane's", &expr.Ct{Key: expr.CtKeyMARK, Register: nft.Word(0)},
		nft.Bits(0, t.Mark, 0), nft.Equals(nft.Native(0)), nft.Accept())}
}

func (t *table) setMark() nft.Rule {
	return nft.NewRule("to lo", nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, ^t.Mark, t.Mark),
		nft.StoreMeta(expr.MetaKeyMARK, 0))
}

func (t *table) setConnectionMark() []any {
	return []any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nft.Word(0)}, nft.Bits(0, ^t.Mark, t.Mark),
		&expr.Ct{Key: expr.CtKeyMARK, Register: nft.Word(0), SourceRegister: true},
	}
}

func (t *table) isICMP() []any {
	if t.Family.V6() {
		return nft.IsProtocol(unix.IPPROTO_ICMPV6)
	}
	return nft.IsProtocol(unix.IPPROTO_ICMP)
}

// isSYN compares the flags of TCP with those of a packet that begins a connection.
func isSYN(compare func([]byte) any) []any {
	return nft.TCPFlags(flagFIN|flagSYN|flagRST|flagACK, compare([]byte{flagSYN}))
}
