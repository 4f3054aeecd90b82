// Package nft keeps tables of nf_tables that are ours alone, one for each address family, for the data planes that have
// such tables. A plane says which sets and chains a table has, and which elements. The Table knows the kernel's
// objects, and gathers in a Transaction the steps that lead from there to what the plane wants.
//
//	Families, Set, Chain ─► Table ─ Structure, SetChain, Element ─► Transaction ─ Send ─► kernel
//	                          ▲                                          └─ Drift: what each step would repair
//	                          └─ Load, Members, List ◄─────────────────────────────────── kernel
//
// Mode iptables keeps its rules in tables of all programs. It writes them with the same steps, Transaction and Ruleset,
// but reads and compares them itself.
//
// It also has the rules that are alike wherever the destinations of Services are looked up in such a table. The plane
// decides which backend a packet gets.
package nft

import (
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// From include/uapi/linux/netfilter/nf_tables.h; x/sys/unix lacks them.
const (
	DynsetDelete = 2 // NFT_DYNSET_OP_DELETE

	TableUserData = 6  // NFTA_TABLE_USERDATA
	ChainUserData = 12 // NFTA_CHAIN_USERDATA

	acceptPolicy = 1 // NF_ACCEPT
	tableOwner   = 2 // NFT_TABLE_F_OWNER
)

// A Field is one part of a set's key or of a map's data: the id of nft's data type (nftables, include/datatype.h),
// which tells "nft list" how to print it. In the kernel each part is padded to words of four bytes.
type Field uint32

// The parts that our keys and data have.
const (
	IPv4     Field = 7
	IPv6     Field = 8
	Protocol Field = 12
	Port     Field = 13
	Index    Field = 19 // nft's mark
	Priority Field = 23 // of a packet: tokens travel in it
)

const integer = 4 // nft's type of numbers

const typeBits = 6 // of each part of a concatenation

func (f Field) size() uint32 {
	switch f {
	case IPv6:
		return 16
	case Protocol:
		return 1
	case Port:
		return 2
	}
	return 4
}

// Words is how many registers of 32 bits it takes.
func (f Field) Words() uint32 { return (f.size() + 3) / 4 }

func size(fields []Field) (bytes uint32) {
	for _, f := range fields {
		bytes += f.Words() * 4
	}
	return bytes
}

func kind(fields []Field) (id uint32) {
	for _, f := range fields {
		id = id<<typeBits | uint32(f)
	}
	return id
}

// Set is an nf_tables set or map.
type Set struct {
	Name    string
	Flags   uint32
	Key     []Field
	Data    []Field // maps only; nil in a verdict map
	Maximum uint32  // elements; 0: no limit, or 65,535 where rules add them
	Jump    bool    // verdict maps: who comes back from a chain goes on
	Shared  bool    // several rows may need one element, see Own

	// Counts, if not nil, says which elements have a counter, by their data.
	Counts func(data []byte) bool
}

// Interval reports whether the elements are ranges of an address, which other fields may precede. The key is then one
// string of bytes, not a concatenation in the kernel's sense. The kernel keeps it in a tree, where an element costs the
// logarithm of their number. Concatenations of ranges (net/netfilter/nft_set_pipapo.c) cost each one in proportion.
func (s *Set) Interval() bool { return s.Flags&unix.NFT_SET_INTERVAL != 0 }

// kind tells nft how to print keys. It prints ranges of several fields, and more fields than a kind has room for, as
// large numbers; taken for a concatenation, they make nft 1.0 crash.
func (s *Set) kind() uint32 {
	if s.Interval() && len(s.Key) > 1 || len(s.Key) > 32/typeBits {
		return integer
	}
	return kind(s.Key)
}

// Verdicts reports whether the set is a map that leads to chains.
func (s *Set) Verdicts() bool { return s.Flags&unix.NFT_SET_MAP != 0 && s.Data == nil }

// Family is what differs between the tables of two address families.
type Family struct {
	Name        string // as nft prints it
	Number      uint8
	Address     Field
	Source      uint32 // offset of the address in the network header
	Destination uint32
	unreachable []unreachable

	// The keys of conntrack for addresses, which google/nftables lacks: nft cannot print a concatenation with those that
	// it has, for both families.
	CtSource, CtDestination expr.CtKey
}

// unreachable is the ICMP error that refuses a protocol; 0 is all other protocols.
type unreachable struct{ protocol, code uint8 }

// Families are IPv4 and IPv6.
var Families = [...]Family{
	{"ip", unix.NFPROTO_IPV4, IPv4, 12, 16, []unreachable{
		// SCTP gives up at once for an unreachable protocol, but not for an unreachable port
		// (RFC 9260, section 10.2).
		{unix.IPPROTO_SCTP, 2}, {0, 3},
	}, 19, 20},
	{"ip6", unix.NFPROTO_IPV6, IPv6, 8, 24, []unreachable{{0, 4}}, 21, 22},
}

// V6 reports which of them it is.
func (f Family) V6() bool { return f.Address == IPv6 }

// Mine reports whether an address is of the family.
func (f Family) Mine(a netip.Addr) bool { return a.Is6() == f.V6() }

// FrontendKey is how maps name a destination; see EncodeKey.
func (f Family) FrontendKey() []Field { return []Field{f.Address, Protocol, Port} }

// A Token is what a map holds for a destination: the class of treatment in the upper bits, the number of the pool in
// the lower ones.
type Token uint32

const poolBits = 20

// The largest parts of a token. Its highest bit is clear.
const (
	PoolMask  = 1<<poolBits - 1
	MaxClass  = 1<<(31-poolBits) - 1
	MaxNumber = PoolMask
)

// NewToken puts both parts together.
func NewToken(class, pool uint32) Token { return Token(class<<poolBits | pool) }

// Class is the upper part.
func (t Token) Class() uint32 { return uint32(t) >> poolBits }

// Pool is the lower part.
func (t Token) Pool() uint32 { return uint32(t) & PoolMask }
