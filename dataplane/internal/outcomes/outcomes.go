// Package outcomes tells which connections that the kernel translates were answered, refused, or not answered,
// whichever data plane translates them. It never changes a packet.
//
//	             SYN again, no answer yet ─► unanswered ┐
//	postrouting ─ RST or ICMP error back  ─► refused    ├─ Take, a few times a second ─► model.Outcome
//	input       ─ SYN-ACK, if asked for   ─► answered   ┘
//
// A client's kernel sends its SYN again after a second. By then connection tracking has confirmed the connection, and
// has seen no reply: that is how the rules know. Each such connection is an element of a set of nf_tables, which goes
// by itself after a second. First packets, and those of connections that are assured, pass one rule.
//
// The tables are the socket's own. The kernel deletes them with the process, however that ends.
package outcomes

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

const (
	tableName = "fairlead-outcomes"
	// stays is for how long an element can be read. The set is full where more connections fail in that time.
	stays    = time.Second
	elements = 1 << 14
)

// Bits of connection tracking's status (enum ip_conntrack_status) and state (NF_CT_STATE_BIT).
const (
	statusReplied, statusAssured, statusConfirmed = 1 << 1, 1 << 2, 1 << 3

	stateRelated = 1 << 2
)

// Chains and their rules' words of TCP.
const (
	chainOutcomes, chainAnswers = "outcomes", "answers"

	flagSYN, flagRST, flagACK = 0x02, 0x04, 0x10
)

// Watch is what the kernel tells of a network namespace, from the first Take on. It needs CAP_NET_ADMIN and Linux 5.12.
type Watch struct {
	Network namespace.Namespace
	Changed func() // is called after each transaction in nf_tables; may be nil

	ruleset *nft.Ruleset // nil: there are no tables
	tables  []*nft.Table
	answers bool                // are told, too
	seen    map[string]struct{} // elements that the last Take has found
}

// Close ends it, and deletes the tables. Take may begin again.
func (w *Watch) Close() (err error) {
	if w.ruleset != nil {
		err = w.ruleset.Close()
	}
	*w = Watch{Network: w.Network, Changed: w.Changed}
	return err
}

// Take calls f with each connection that has failed since the last call. If answers are asked for, it also tells each
// client and backend between which a connection was answered. Answers are told from the next call on. An error is that
// of Close, too.
func (w *Watch) Take(answers bool, f func(model.Outcome)) error {
	err := w.take(answers, f)
	if err != nil {
		err = errors.Join(fmt.Errorf("watch outcomes of connections: %w", err), w.Close())
	}
	return err
}

func (w *Watch) take(answers bool, f func(model.Outcome)) (err error) {
	if w.ruleset == nil {
		w.seen = map[string]struct{}{}
		w.ruleset, w.tables, err = nft.Owner{Network: w.Network, Changed: w.Changed}.Open(tableName, sets, chains)
	}
	if err == nil && answers != w.answers {
		err = w.tellAnswers(answers)
	}
	if err != nil {
		return err
	}
	now := map[string]struct{}{}
	for _, t := range w.tables {
		for set := range t.Sets {
			result := model.Result(set)
			if result == model.Answered && !w.answers {
				continue
			}
			reset := func() {} // elements that are listed twice are told once
			err := t.ListOf(w.ruleset.Socket, t.Sets[set], reset, func(e nft.Element) {
				key := string(rune(set)) + string(e.Key)
				now[key] = struct{}{}
				if _, known := w.seen[key]; known {
					return
				}
				w.seen[key] = struct{}{}
				f(outcome(t.Family, e.Key, result))
			})
			if err != nil {
				return err
			}
		}
	}
	w.seen = now
	return nil
}

// tellAnswers fills or empties the chain that looks for answers.
func (w *Watch) tellAnswers(tell bool) error {
	tx := &nft.Transaction{}
	for _, t := range w.tables {
		t.Tx = tx
		chain := nft.Chain{Name: chainAnswers}
		if tell {
			chain.Rules = answers(t.Family)
		}
		if err := t.SetChain(chain); err != nil {
			return err
		}
	}
	w.answers = tell
	return w.ruleset.Send(tx, tx.Steps)
}

// sets are one for each model.Result.
func sets(f nft.Family) []*nft.Set {
	pair := append(append(f.FrontendKey(), f.Address, nft.Port), f.Address)
	set := func(name string, key []nft.Field) *nft.Set {
		return &nft.Set{Name: name, Flags: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, Key: key, Maximum: elements}
	}
	connection := append(pair[:len(pair):len(pair)], nft.Port)
	return []*nft.Set{
		model.Unanswered: set("unanswered", connection), model.Refused: set("refused", connection),
		model.Answered: set("answered", pair),
	}
}

// outcome reads the key of an element.
func outcome(f nft.Family, key []byte, r model.Result) model.Outcome {
	n := int(f.Address.Words() * 4)
	to, _ := nft.DecodeKey(key[:n+8], model.Any)
	backend, _ := nft.DecodeBackend(key[n+8 : 2*n+12])
	client, _ := netip.AddrFromSlice(key[2*n+12 : 3*n+12])
	return model.Outcome{To: to.AddrPort(), Protocol: to.Protocol, Backend: backend, Client: client, Result: r}
}

// chains are those of a table. A packet to this machine that comes over its loopback interface has passed postrouting.
// One rule lets pass what tells nothing: a connection's first packet, which is not confirmed yet, and those of one that
// is assured.
func chains(f nft.Family) []nft.Chain {
	hook := func(name string, number uint32, unless ...any) nft.Chain {
		return nft.FilterChain(name, number, 0, nft.NewRule("", status(), nft.Bits(0, statusAssured|statusConfirmed, 0),
			nft.Equals(nft.Native(statusConfirmed)), unless, nft.GoTo(chainOutcomes)))
	}
	return []nft.Chain{
		{Name: chainAnswers},
		{Name: chainOutcomes, Rules: failures(f)},
		hook("postrouting", unix.NF_INET_POST_ROUTING),
		hook("input", unix.NF_INET_LOCAL_IN,
			nft.LoadMeta(expr.MetaKeyIIFTYPE, 0), nft.Differs(nft.Native(unix.ARPHRD_LOOPBACK)[:2])),
	}
}

func status() any { return &expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)} }

// failures are the rules that find connections that fail.
func failures(f nft.Family) []nft.Rule {
	again := []any{
		status(), nft.Bits(0, statusReplied, 0), nft.Equals(nft.Native(0)),
		add(f, "unanswered", true),
	}
	related := []any{&expr.Ct{Key: expr.CtKeySTATE, Register: nft.Word(0)}, nft.Bits(0, stateRelated, 0)}
	refused := []any{isReply(), add(f, "refused", true)}
	return []nft.Rule{
		nft.NewRule("SYN and ACK", flags(flagSYN|flagACK, flagSYN|flagACK), nft.GoTo(chainAnswers)),
		nft.NewRule("SYN again", flags(flagSYN|flagACK|flagRST, flagSYN), again),
		nft.NewRule("again", nft.IsProtocol(unix.IPPROTO_UDP), again),
		nft.NewRule("again", nft.IsProtocol(unix.IPPROTO_SCTP), again),
		nft.NewRule("reset", flags(flagRST|flagACK, flagRST|flagACK), ofSYN(), refused),
		nft.NewRule("unreachable", unreachable(f), related, nft.Differs(nft.Native(0)), refused),
		nft.NewRule("not of TCP, and no error", nft.LoadMeta(expr.MetaKeyL4PROTO, 0), nft.Differs([]byte{unix.IPPROTO_TCP}),
			related, nft.Equals(nft.Native(0)), nft.GoTo(chainAnswers)),
	}
}

// answers finds those that are answered.
func answers(f nft.Family) []nft.Rule {
	return []nft.Rule{nft.NewRule("an answer", isReply(), add(f, "answered", false))}
}

// flags goes on if, of these flags of TCP, the packet has exactly those.
func flags(of, those byte) []any { return nft.TCPFlags(of, nft.Equals([]byte{those})) }

func isReply() []any {
	const reply = 1
	return []any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: nft.Word(0)}, nft.Equals([]byte{reply})}
}

// ofSYN goes on if the sequence number of a reset is 0, as in the answer to a SYN (RFC 9293, 3.10.7.1). In the answer
// to a false ACK it is another one: a client cannot have itself refused.
func ofSYN() []any {
	const offset = 4
	return []any{
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 4, DestRegister: nft.Word(0)},
		nft.Equals(nft.Native(0)),
	}
}

// unreachable goes on if the packet says so by ICMP, but not that it was too long.
func unreachable(f nft.Family) []any {
	load := func(offset uint32) any {
		return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1, DestRegister: nft.Word(0)}
	}
	const v4, v6, tooLong = 3, 1, 4 // of IPv6 another type says that
	if f.V6() {
		return append(nft.IsProtocol(unix.IPPROTO_ICMPV6), load(0), nft.Equals([]byte{v6}))
	}
	return append(nft.IsProtocol(unix.IPPROTO_ICMP),
		load(0), nft.Equals([]byte{v4}), load(1), nft.Differs([]byte{tooLong}))
}

// add puts the connection of a packet into a set, if there is room. The key is what its client asked for, the backend,
// and the client, with its port if each connection counts.
func add(f nft.Family, set string, each bool) []any {
	at, n := uint32(0), f.Address.Words()
	load := func(key expr.CtKey, back bool, words uint32) any {
		at += words
		return nft.Tuple{Key: key, Register: nft.Word(at - words), Reply: back}
	}
	exprs := []any{
		load(f.CtDestination, false, n), load(expr.CtKeyPROTOCOL, false, 1), load(expr.CtKeyPROTODST, false, 1),
		load(f.CtSource, true, n), load(expr.CtKeyPROTOSRC, true, 1), load(f.CtSource, false, n),
	}
	if each {
		exprs = append(exprs, load(expr.CtKeyPROTOSRC, false, 1))
	}
	return append(exprs, &expr.Dynset{
		SrcRegKey: nft.Word(0), SetName: set, Operation: unix.NFT_DYNSET_OP_ADD, Timeout: stays,
	})
}
