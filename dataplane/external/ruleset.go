package external

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
)

const sizeofNfgenmsg = 4

// ruleset hears the messages of a transaction, and at last the one that says whose it was. All of them have one number
// (nft_base_seq_be16 in the kernel). Where the kernel drops the last ones, the next transaction is not to blame.
func (w *Watch) ruleset() func(syscall.NetlinkMessage) {
	first, deletes, more, number := "", false, 0, uint16(0)
	return func(m syscall.NetlinkMessage) {
		if len(m.Data) < sizeofNfgenmsg || m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
			return
		}
		attrs := m.Data[sizeofNfgenmsg:]
		message := m.Header.Type & 0xff
		if now := binary.BigEndian.Uint16(m.Data[2:]); now != number {
			first, deletes, more, number = "", false, 0, now
		}
		table := message == unix.NFT_MSG_DELTABLE // with all that was in it
		switch {
		case message == unix.NFT_MSG_NEWGEN:
			if first != "" {
				w.transaction(attrs, first, more)
			}
			first, deletes, more = "", false, 0
		case !concerns(message, attrs):
		case first == "" || table && !deletes:
			if first != "" {
				more++
			}
			first, deletes = describe(message, m.Data[0], attrs), table
		default:
			more++
		}
	}
}

// transaction tells of one that is not ours.
func (w *Watch) transaction(attrs []byte, what string, more int) {
	if more > 0 {
		what += fmt.Sprintf(" and %d more", more)
	}
	f := dataplane.ExternalChange{What: what, Process: nfnetlink.Text(attrs, unix.NFTA_GEN_PROC_NAME),
		PID: int(nfnetlink.Uint32(attrs, unix.NFTA_GEN_PROC_PID))}
	if !w.self.is(f) {
		w.notify(f)
	}
}

// kinds of objects, and which attribute has the name of the object or of what it is in.
var kinds = map[uint16]struct {
	verb, object string
	name         uint16
}{
	unix.NFT_MSG_NEWTABLE:   {"added", "", 0},
	unix.NFT_MSG_DELTABLE:   {"deleted", "", 0},
	unix.NFT_MSG_NEWCHAIN:   {"added", "chain", unix.NFTA_CHAIN_NAME},
	unix.NFT_MSG_DELCHAIN:   {"deleted", "chain", unix.NFTA_CHAIN_NAME},
	unix.NFT_MSG_NEWRULE:    {"added", "a rule of chain", unix.NFTA_RULE_CHAIN},
	unix.NFT_MSG_DELRULE:    {"deleted", "a rule of chain", unix.NFTA_RULE_CHAIN},
	unix.NFT_MSG_NEWSET:     {"added", "set", unix.NFTA_SET_NAME},
	unix.NFT_MSG_DELSET:     {"deleted", "set", unix.NFTA_SET_NAME},
	unix.NFT_MSG_NEWSETELEM: {"added", "an element of set", unix.NFTA_SET_ELEM_LIST_SET},
	unix.NFT_MSG_DELSETELEM: {"deleted", "an element of set", unix.NFTA_SET_ELEM_LIST_SET},
}

// concerns reports whether a message may be about something of ours. It is asked of each message of our own, too.
func concerns(message uint16, attrs []byte) bool {
	kind, ok := kinds[message]
	if !ok {
		return false
	}
	var name []byte
	if kind.name != 0 {
		name = word(attrs, kind.name)
	}
	return ours(word(attrs, unix.NFTA_TABLE_NAME), name) // which has this number in all kinds of messages
}

// word is the text of an attribute, without its end.
func word(attrs []byte, kind uint16) []byte {
	return bytes.TrimRight(nfnetlink.Attribute(attrs, kind), "\x00")
}

// describe says what a message is about.
func describe(message uint16, family uint8, attrs []byte) string {
	kind := kinds[message]
	text := fmt.Sprintf("table %s %s", familyName(family), nfnetlink.Text(attrs, unix.NFTA_TABLE_NAME))
	if kind.object == "" {
		return kind.verb + " " + text
	}
	return fmt.Sprintf("%s %s %s of %s", kind.verb, kind.object, nfnetlink.Text(attrs, kind.name), text)
}

// ours reports whether a plane may have made an object. That is so in tables with Fairlead's name. In tables of
// iptables it is so in chains of Services, and in built-in chains, whose rules lead to them.
func ours(table, chain []byte) bool {
	if bytes.HasPrefix(table, []byte("fairlead")) {
		return true
	}
	if string(table) != "nat" && string(table) != "filter" {
		return false
	}
	builtIn := !bytes.ContainsFunc(chain, func(r rune) bool { return r == '-' || unicode.IsLower(r) })
	return bytes.HasPrefix(chain, []byte("KUBE-")) || builtIn
}

func familyName(family uint8) string {
	switch family {
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	case unix.NFPROTO_INET:
		return "inet"
	}
	return fmt.Sprintf("family %d", family)
}
