package foreign

import (
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
)

const sizeofNfgenmsg = 4

// ruleset hears the messages of a transaction, and at last the one that says whose it was.
func (w *Watch) ruleset() func(syscall.NetlinkMessage) {
	first, more := "", 0
	return func(m syscall.NetlinkMessage) {
		if len(m.Data) < sizeofNfgenmsg || m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
			return
		}
		attrs := m.Data[sizeofNfgenmsg:]
		if m.Header.Type == nfnetlink.NFTables|unix.NFT_MSG_NEWGEN {
			if first != "" {
				w.transaction(attrs, first, more)
			}
			first, more = "", 0
			return
		}
		message := m.Header.Type & 0xff
		switch what := describe(message, m.Data[0], attrs); {
		case what == "":
		case first == "":
			first = what
		case message == unix.NFT_MSG_DELTABLE && !strings.HasPrefix(first, "deleted table"): // with all that was in it
			first, more = what, more+1
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
	f := dataplane.Foreign{What: what, Process: nfnetlink.Text(attrs, unix.NFTA_GEN_PROC_NAME),
		PID: int(nfnetlink.Uint32(attrs, unix.NFTA_GEN_PROC_PID))}
	if !w.self.is(f) {
		w.tell(f)
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

// describe says what a message is about, if it may be about something of ours.
func describe(message uint16, family uint8, attrs []byte) string {
	kind, ok := kinds[message]
	table := nfnetlink.Text(attrs, unix.NFTA_TABLE_NAME) // has this number in all kinds of messages
	name := ""
	if ok && kind.name != 0 {
		name = nfnetlink.Text(attrs, kind.name)
	}
	if !ok || !ours(table, name) {
		return ""
	}
	text := fmt.Sprintf("table %s %s", familyName(family), table)
	if kind.object == "" {
		return kind.verb + " " + text
	}
	return fmt.Sprintf("%s %s %s of %s", kind.verb, kind.object, name, text)
}

// ours reports whether a plane may have made something: all in tables of our name, and in those of iptables the
// chains of Services and those from which rules lead to them.
func ours(table, chain string) bool {
	if strings.HasPrefix(table, "fairlead") {
		return true
	}
	return (table == "nat" || table == "filter") && (chain == "" || strings.HasPrefix(chain, "KUBE-") ||
		strings.ToUpper(chain) == chain && !strings.Contains(chain, "-"))
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
