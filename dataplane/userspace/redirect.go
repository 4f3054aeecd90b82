package userspace

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Address translation redirects the packets that TPROXY cannot lead to the process: SCTP, and clients on a bridge.
// Where the kernel has no TPROXY, it redirects all. The destination becomes the process's own address, and the process
// asks the kernel what it was.
//
//	first packet ─ nat: a destination of a row? by origin ─► dnat ─► own address:port of the origin ─► accept
//	    SO_ORIGINAL_DST (of UDP: connection tracking) ─► the row
//	connect ─ from the own address ─► postrouting: as the client, if the map source-nat has the port, else hidden

// ownAddress is the one to which packets are redirected and from which such connections go on. It is local without
// being an interface's (a route in table local), as that of a client may have none. No other program listens there.
// 192.0.0.0/24 is for protocols, not for hosts (RFC 6890). From a link-local address SCTP talks to no other
// (sctp_in_scope in the kernel's net/sctp/bind_addr.c).
func ownAddress(v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0xfd, 'F', 'a', 'i', 'r', 'l', 'e', 'a', 'd', 15: 1})
	}
	return netip.AddrFrom4([4]byte{192, 0, 0, 'F'})
}

func carries(a netip.Addr) bool { return a == ownAddress(a.Is6()) }

// Chains of address translation, and the prefixes of those for each origin.
const (
	chainRedirect  = "redirect"
	redirectPrefix = "redirect-"
	toPrefix       = "to-own-address-"
)

// Priorities of the chains of address translation: before all others, of which the kernel then asks none.
const (
	redirectPriority  = priority
	sourceNATPriority = nft.Masquerading - 1
)

// redirects are the chains that translate what TPROXY cannot have. While there is one, connection tracking goes on to
// translate what another plane has begun to, if that goes.
func (t *table) redirects() []nft.Chain {
	var chains []nft.Chain
	for o := range numOrigins {
		to := toPrefix + o.String()
		var pods []nft.Rule
		if o == fromNode {
			pods = t.fromPrefixes(redirectPrefix)
		}
		chains = append(chains,
			nft.Chain{Name: to, Rules: []nft.Rule{t.redirect(o)}},
			nft.Chain{Name: redirectPrefix + o.String(), Rules: append(pods, t.lookup(o != elsewhere,
				func(model.Scope) string { return to })...)})
	}
	return append(chains,
		nft.Chain{Name: chainRedirect, Rules: t.origins(redirectPrefix)},
		nft.Chain{
			Name:  "redirect-prerouting",
			Hook:  &nft.Hook{Kind: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: redirectPriority},
			Rules: append(t.bind(), t.redirected(chainRedirect, t.redirectable()...)...),
		},
		nft.Chain{
			Name: "redirect-output",
			Hook: &nft.Hook{Kind: "nat", Number: unix.NF_INET_LOCAL_OUT, Priority: redirectPriority},
			Rules: slices.Concat([]nft.Rule{t.ofProcess()}, t.bind(),
				t.redirected(redirectPrefix+fromNode.String(), t.redirectable()[0])),
		},
		nft.Chain{
			Name:  "source-nat",
			Hook:  &nft.Hook{Kind: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: sourceNATPriority},
			Rules: t.sourceNAT(),
		})
}

// bind has connections that the process takes keep their destination: it is translated to itself. Else another plane
// that is there for a moment longer, or is about to take our place, would translate what the process gets.
func (t *table) bind() []nft.Rule {
	if t.redirectAll {
		return nil
	}
	const address = 1
	return []nft.Rule{nft.NewRule("taken",
		nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, t.Mark, 0), nft.Differs(nft.Native(0)),
		t.Family.Load(t.Family.Destination, address), nft.LoadPort(address+t.Family.Address.Words()),
		t.Family.TranslateTo(address))}
}

// redirectable are the conditions of which one is true of a packet that TPROXY cannot have; the first one is that for
// packets of the node. Without TPROXY each packet is one.
func (t *table) redirectable() [][]any {
	if t.redirectAll {
		return [][]any{nil}
	}
	return [][]any{isSCTP(), onBridge()}
}

func isSCTP() []any { return nft.IsProtocol(unix.IPPROTO_SCTP) }

// onBridge: a bridge may hand its packets to netfilter before it gives them to the node, which forgets the socket that
// TPROXY has found (ip_rcv_core in the kernel's net/ipv4/ip_input.c).
func onBridge() []any {
	const interfaceKind = 26 // NFT_META_IIFKIND
	kind := make([]byte, unix.IFNAMSIZ)
	copy(kind, "bridge")
	return []any{nft.LoadMeta(interfaceKind, 0), nft.Equals(kind)}
}

func (t *table) redirected(to string, conditions ...[]any) (rules []nft.Rule) {
	if t.phase.yields() {
		return nil
	}
	for _, c := range conditions {
		rules = append(rules, nft.NewRule("", c, nft.GoTo(to)))
	}
	return rules
}

// redirect translates the destination.
func (t *table) redirect(o origin) nft.Rule {
	at := t.Family.Address.Words()
	return nft.NewRule("",
		&expr.Immediate{Register: nft.Word(0), Data: ownAddress(t.Family.V6()).AsSlice()},
		&expr.Immediate{Register: nft.Word(at), Data: bigEndian(t.redirectPorts[o])},
		t.Family.TranslateTo(0))
}

// ofProcess leaves alone what comes from the own address.
func (t *table) ofProcess() nft.Rule {
	return nft.NewRule("the process", t.fromOwnAddress(nft.Accept())...)
}

func (t *table) fromOwnAddress(then ...any) []any {
	return append([]any{
		t.Family.Load(t.Family.Source, 0), nft.Equals(ownAddress(t.Family.V6()).AsSlice()),
	}, then...)
}

// sourceNAT translates the source of what the process sends.
func (t *table) sourceNAT() []nft.Rule {
	n := t.Family.Address.Words()
	port := &expr.Payload{Base: expr.PayloadBaseTransportHeader, Len: 2, DestRegister: nft.Word(n + 1)}
	as := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(t.Family.Number), RegAddrMin: nft.Word(0)}
	return []nft.Rule{
		nft.NewRule("as the client", t.fromOwnAddress(
			t.Family.Load(t.Family.Source, 0), nft.LoadMeta(expr.MetaKeyL4PROTO, n), port,
			nft.Find(t.Sets[sourceAddresses].Name, 0), as)...),
		nft.NewRule("hidden", t.fromOwnAddress(&expr.Masq{FullyRandom: true})...),
	}
}

// originalOf asks connection tracking where a connection was going that was redirected.
func originalOf(fd int, v6 bool) (to netip.AddrPort, err error) {
	const option = 80 // SO_ORIGINAL_DST, IP6T_SO_ORIGINAL_DST
	var sockaddr [unix.SizeofSockaddrInet6]byte
	level := unix.SOL_IP
	if v6 {
		level = unix.SOL_IPV6
	}
	if err := socket.GetOption(fd, level, option, sockaddr[:]); err != nil {
		return to, os.NewSyscallError("getsockopt SO_ORIGINAL_DST", err)
	}
	address := sockaddr[4:8]
	if v6 {
		address = sockaddr[8:24]
	}
	a, _ := netip.AddrFromSlice(address)
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(sockaddr[2:])), nil
}
