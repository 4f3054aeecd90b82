package trace

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
)

// rules follow a packet through nf_tables. A table of our own has the kernel tell of each rule that the packet meets.
// The kernel deletes that table with the socket that made it, however this process ends.
type rules struct {
	question Question
	ruleset  *nft.Ruleset
	events   *os.File
}

// watchRules needs CAP_NET_ADMIN and Linux 5.12.
func watchRules(q Question) (*rules, error) {
	const buffer = 1 << 20
	events, err := nfnetlink.Subscribe(unix.NETLINK_NETFILTER, unix.SOCK_NONBLOCK, buffer, unix.NFNLGRP_NFTRACE)
	if err != nil {
		return nil, err
	}
	ruleset, err := nft.Open(func(string) error { return nil })
	if err != nil {
		return nil, errors.Join(err, events.Close())
	}
	return &rules{q, ruleset, events}, nil
}

func (r *rules) close() {
	_ = r.ruleset.Close()
	_ = r.events.Close()
}

// tableName is that of our table.
const tableName = "fairlead-trace"

// begin has packets from a port traced; nil traces nothing.
func (r *rules) begin(port uint16) error {
	if r == nil {
		return nil
	}
	f := nft.Families[0]
	if r.question.To.Addr().Is6() {
		f = nft.Families[1]
	}
	chosen := []any{
		nft.LoadMeta(expr.MetaKeyL4PROTO, 0), nft.Equals([]byte{byte(r.question.Protocol)}),
		f.Load(f.Destination, 0), nft.Equals(r.question.To.Addr().AsSlice()),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 4, DestRegister: nft.Word(0)},
		nft.Equals(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, port), r.question.To.Port())),
		&expr.Immediate{Register: nft.Word(0), Data: []byte{1}}, nft.StoreMeta(expr.MetaKeyNFTRACE, 0),
	}
	const early = -310 // before all others
	var chains []nft.Chain
	for name, hook := range map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT} {
		chains = append(chains, nft.FilterChain(name, hook, early, nft.NewRule("fairlead trace", chosen...)))
	}
	tx := &nft.Transaction{}
	t := nft.NewTable(nft.Table{Family: f, Name: tableName, Owned: true, Tx: tx})
	if err := t.Structure(chains); err != nil {
		return err
	}
	return r.ruleset.Send(tx, tx.Steps)
}

// place is where a rule is.
type place struct {
	family       uint8
	table, chain string
	handle       uint64
}

// steps are the rules that the packet has met. Those of packets that were sent again are the same.
func (r *rules) steps(a *Answer) {
	if r == nil {
		return
	}
	const (
		pause = 50 * time.Millisecond // in which nothing more comes
		most  = time.Second           // where others have packets traced all the time
	)
	room, first := make([]byte, 1<<16), uint32(0)
	for end := time.Now().Add(most); time.Now().Before(end); {
		_ = r.events.SetReadDeadline(time.Now().Add(pause))
		n, err := r.events.Read(room)
		if err != nil {
			return
		}
		for m := range nfnetlink.Messages(room[:n]) {
			if m.Header.Type != nfnetlink.NFTables|unix.NFT_MSG_TRACE || len(m.Data) < 4 {
				continue
			}
			attrs := m.Data[4:]
			id := nfnetlink.Uint32(attrs, unix.NFTA_TRACE_ID)
			at := place{m.Data[0], nfnetlink.Text(attrs, unix.NFTA_TRACE_TABLE), nfnetlink.Text(attrs, unix.NFTA_TRACE_CHAIN),
				nfnetlink.Uint64(attrs, unix.NFTA_TRACE_RULE_HANDLE)}
			if first == 0 && at.table == tableName { // our rule is the first that the packet meets
				first = id
			}
			kind := nfnetlink.Uint32(attrs, unix.NFTA_TRACE_TYPE)
			if id == first && at.table != tableName && kind == unix.NFT_TRACETYPE_RULE && at.handle != 0 { // 0: the end
				a.step("nft", "%s: %s", r.rule(at), verdictText(nfnetlink.Attribute(attrs, unix.NFTA_TRACE_VERDICT)))
			}
		}
	}
}

// rule names a rule, with its comment if it has one.
func (r *rules) rule(at place) string {
	family := map[uint8]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}[at.family]
	text := fmt.Sprintf("table %s %s, chain %s, rule %d", family, at.table, at.chain, at.handle)
	q := nfnetlink.Request{Kind: nfnetlink.NFTables | unix.NFT_MSG_GETRULE, Family: at.family, Reset: func() {}}
	q.Filter.Text(unix.NFTA_RULE_TABLE, at.table)
	q.Filter.Text(unix.NFTA_RULE_CHAIN, at.chain)
	q.Each = func(attrs []byte) {
		if nfnetlink.Uint64(attrs, unix.NFTA_RULE_HANDLE) != at.handle {
			return
		}
		for data := nfnetlink.Attribute(attrs, unix.NFTA_RULE_USERDATA); len(data) > 2; data = data[2+int(data[1]):] {
			if length := int(data[1]); data[0] == 0 && length > 0 && len(data) >= 2+length { // nft's comment
				text += fmt.Sprintf(" %q", data[2:1+length])
			} else if len(data) < 2+length {
				return
			}
		}
	}
	_ = r.ruleset.Socket.Dump(q) // the rule may be gone
	return text
}

// verdictText is a verdict as nft writes it.
func verdictText(attrs []byte) string {
	code, chain := int32(nfnetlink.Uint32(attrs, unix.NFTA_VERDICT_CODE)), nfnetlink.Text(attrs, unix.NFTA_VERDICT_CHAIN)
	name := map[int32]string{
		unix.NFT_JUMP: "jump ", unix.NFT_GOTO: "goto ", unix.NFT_RETURN: "return", unix.NFT_CONTINUE: "continue",
		unix.NFT_BREAK: "break", 0: "drop", 1: "accept",
	}[code]
	return cmp.Or(name, fmt.Sprint("verdict ", code)) + chain
}
