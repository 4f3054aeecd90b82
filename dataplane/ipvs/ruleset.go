package ipvs

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// Ids of nft's data types (nftables, include/datatype.h): they tell "nft list" how to print.
const (
	typeIPv4        = 7
	typeIPv6        = 8
	typeInetProto   = 12
	typeInetService = 13
	typeClassID     = 23
	typeBits        = 6 // of each part of a concatenation
)

// A field is one part of a set's key or of a map's data. In the kernel each part is padded to words
// of four bytes.
type field struct{ kind, size uint32 }

func (f field) words() uint32 { return (f.size + 3) / 4 }

var (
	protocolField = field{typeInetProto, 1}
	portField     = field{typeInetService, 2}
	priorityField = field{typeClassID, 4} // the packet's priority carries tokens
)

// set is an nf_tables set or map.
type set struct {
	name    string
	id      uint32 // in the transaction that makes it
	flags   uint32
	key     []field
	data    []field // maps only; nil in a verdict map
	maximum uint32  // elements; 0: no limit
}

func size(fields []field) (bytes uint32) {
	for _, f := range fields {
		bytes += f.words() * 4
	}
	return bytes
}

func kind(fields []field) (id uint32) {
	for _, f := range fields {
		id = id<<typeBits | f.kind
	}
	return id
}

func (s *set) interval() bool { return s.flags&unix.NFT_SET_INTERVAL != 0 }
func (s *set) verdicts() bool { return s.flags&unix.NFT_SET_MAP != 0 && s.data == nil }

// family is what differs between the two tables.
type family struct {
	name        string // as nft prints it
	number      uint8
	address     field
	source      uint32 // offset of the address in the network header
	destination uint32
	original    expr.CtKey // of the destination
	unreachable []unreachable
}

// unreachable is the ICMP error that refuses a protocol; 0 is all other protocols.
type unreachable struct{ protocol, code uint8 }

// From include/uapi/linux/netfilter/nf_tables.h; nft cannot print a concatenation with NFT_CT_DST.
const (
	ctDstIP  expr.CtKey = 20 // NFT_CT_DST_IP
	ctDstIP6 expr.CtKey = 22 // NFT_CT_DST_IP6
)

var (
	ipv4 = family{"ip", unix.NFPROTO_IPV4, field{typeIPv4, 4}, 12, 16, ctDstIP, []unreachable{
		// SCTP gives up at once for an unreachable protocol, but not for an unreachable port
		// (RFC 9260, section 10.2).
		{unix.IPPROTO_SCTP, 2}, {0, 3},
	}}
	ipv6 = family{"ip6", unix.NFPROTO_IPV6, field{typeIPv6, 16}, 8, 24, ctDstIP6, []unreachable{{0, 4}}}
)

// word is the n-th register of 32 bits. Longer values take several in a row.
func word(n uint32) uint32 { return unix.NFT_REG32_00 + n }

func (f family) load(offset, at uint32) any {
	return &expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.address.size, DestRegister: word(at)}
}

func loadPort(at uint32) any {
	return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: word(at)}
}

// destinationKey loads address, protocol and port of the destination: the key of the frontends.
func (f family) destinationKey() (exprs []any, next uint32) {
	n := f.address.words()
	return []any{f.load(f.destination, 0), loadMeta(expr.MetaKeyL4PROTO, n), loadPort(n + 1)}, n + 2
}

// originalKey is the same of the destination that the connection's first packet had when it came.
func (f family) originalKey() []any {
	n := f.address.words()
	return []any{
		original{f.original, word(0)}, loadMeta(expr.MetaKeyL4PROTO, n), original{expr.CtKeyPROTODST, word(n + 1)},
	}
}

func (f family) frontendKey() []field { return []field{f.address, protocolField, portField} }

// The sets and maps of a table, by index.
const (
	frontends = iota
	internalFrontends
	classes
	learners
	clients
	affinity
	sticky
	sources
	internalSources
	hairpin
	pods
	rejectAddresses
	dropAddresses
	rejectRanges
	dropRanges
	localAddresses
	virtualServers
	numSets
)

// maxAffinity bounds the clients whose backend is remembered, and so the kernel's memory (some
// 120 bytes for each). Beyond it new clients are balanced without being remembered.
const maxAffinity = 1 << 20

func (f family) sets() []*set {
	const hash, interval, concat = 0, unix.NFT_SET_INTERVAL, setConcat
	sourceKey := append(f.frontendKey(), f.address)
	token, address := []field{priorityField}, []field{f.address}
	sets := []*set{
		frontends:         {name: "frontends", flags: unix.NFT_SET_MAP, key: f.frontendKey(), data: token},
		internalFrontends: {name: "internal-frontends", flags: unix.NFT_SET_MAP, key: f.frontendKey(), data: token},
		classes:           {name: "classes", flags: unix.NFT_SET_MAP, key: token},
		learners:          {name: "learners", flags: unix.NFT_SET_MAP, key: token},
		clients: {
			name: "clients", flags: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL,
			key: []field{f.address, priorityField}, maximum: maxAffinity,
		},
		affinity: {
			name: "affinity", flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL,
			key: []field{f.address, priorityField}, data: []field{f.address, portField}, maximum: maxAffinity,
		},
		sticky:          {name: "sticky", flags: hash, key: f.frontendKey()},
		sources:         {name: "sources", flags: interval | concat, key: sourceKey},
		internalSources: {name: "internal-sources", flags: interval | concat, key: sourceKey},
		hairpin:         {name: "hairpin", flags: hash, key: []field{f.address, f.address}},
		pods:            {name: "pods", flags: interval, key: address},
		rejectAddresses: {name: "reject-addresses", flags: hash, key: address},
		dropAddresses:   {name: "drop-addresses", flags: hash, key: address},
		rejectRanges:    {name: "reject-ranges", flags: interval, key: address},
		dropRanges:      {name: "drop-ranges", flags: interval, key: address},
		localAddresses:  {name: "local-addresses", flags: hash, key: address},
		virtualServers:  {name: "virtual-servers", flags: hash, key: f.frontendKey()},
	}
	for i, s := range sets {
		s.id = uint32(i + 1)
	}
	return sets
}

// A token is what the frontends map holds for a destination: its class in the upper bits, the
// number of its pool in the lower ones; 0 if nobody needs to know it.
type token uint32

const (
	poolBits  = 20
	poolMask  = 1<<poolBits - 1
	maxClass  = 1<<(31-poolBits) - 1
	maxNumber = poolMask

	// markBits are the upper bits of the marks by which packets find the virtual server of a pool.
	markBits = 0xfa1 << poolBits
	markMask = 0xffffffff << poolBits & 0xffffffff
)

func newToken(class, pool uint32) token { return token(class<<poolBits | pool) }
func (t token) class() uint32           { return uint32(t) >> poolBits }
func (t token) pool() uint32            { return uint32(t) & poolMask }

// A class is a way of treating packets that many frontends share; each has one chain.
type class struct {
	verdict  model.Verdict
	snat     model.SNAT
	affinity time.Duration
	limited  bool        // to the sources in the sources set …
	scope    model.Scope // … of this scope, whose virtual server a forwarded packet goes to
}

// chain is the name of the class's chain; it says all of the class.
func (c class) chain() string {
	words := []string{c.verdict.String(), c.scope.String()}
	if c.verdict == model.Forward {
		words = append(words, "snat", c.snat.String())
	}
	if c.affinity > 0 {
		words = append(words, "affinity", fmt.Sprintf("%ds", int(c.affinity.Seconds())))
	}
	if c.limited {
		words = append(words, "sources")
	}
	return strings.Join(words, "-")
}

// learner is the name of the chain that remembers what IPVS chose.
func (c class) learner() string { return fmt.Sprintf("remember-%ds", int(c.affinity.Seconds())) }

// chain is an nf_tables chain with its rules.
type chain struct {
	name  string
	hook  *hook // base chains only
	rules []rule
}

type hook struct {
	kind     string
	number   uint32
	priority int32
}

// rule is an nf_tables rule; the comment is what "nft list" shows behind it. Its expressions are
// google/nftables' or encode themselves.
type rule struct {
	comment string
	exprs   []any
}

// mark is a hash of the rule. It is kept in the rule's user data, where nft does not look, and tells
// whether a rule found in the kernel is the one we want.
func (r rule) mark(f family) (body, mark []byte, err error) {
	hash := fnv.New64a()
	for _, x := range r.exprs {
		var b []byte
		switch x := x.(type) {
		case original:
			b = x.encode()
		case expr.Any:
			b, err = expr.Marshal(f.number, x)
		default:
			err = fmt.Errorf("%T is no expression", x)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("encode rule %q: %w", r.comment, err)
		}
		e := nfnetlink.Encoder{B: body}
		e.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
		body = e.B
	}
	hash.Write(body)
	hash.Write([]byte(r.comment))
	return body, hash.Sum(nil), nil
}

// original loads a part of the connection's original tuple. (expr.Ct writes the direction in four bytes;
// the kernel takes the first one, and complains in its log.)
type original struct {
	key      expr.CtKey
	register uint32
}

func (o original) encode() []byte {
	var e nfnetlink.Encoder
	e.Text(unix.NFTA_EXPR_NAME, "ct")
	data := e.Open(unix.NFTA_EXPR_DATA)
	e.Uint32(unix.NFTA_CT_KEY, uint32(o.key))
	e.Uint32(unix.NFTA_CT_DREG, o.register)
	e.Bytes(unix.NFTA_CT_DIRECTION, []byte{0})
	e.Close(data)
	return e.B
}

func all(exprs ...any) []any { return exprs }

func jump(c string) any  { return &expr.Verdict{Kind: expr.VerdictJump, Chain: c} }
func goTo(c string) any  { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: c} }
func back() any          { return &expr.Verdict{Kind: expr.VerdictReturn} }
func accept() any        { return &expr.Verdict{Kind: expr.VerdictAccept} }
func drop() any          { return &expr.Verdict{Kind: expr.VerdictDrop} }
func in(s string) any    { return &expr.Lookup{SourceRegister: word(0), SetName: s} }
func notIn(s string) any { return &expr.Lookup{SourceRegister: word(0), SetName: s, Invert: true} }

// find looks up the key that starts at word 0 and puts the map's data at another.
func find(s string, at uint32) any {
	return &expr.Lookup{SourceRegister: word(0), DestRegister: word(at), IsDestRegSet: true, SetName: s}
}

// follow goes to the chain that a verdict map has for the key at word 0.
func follow(s string) any {
	return &expr.Lookup{SourceRegister: word(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: s}
}

func equals(data []byte) any { return &expr.Cmp{Op: expr.CmpOpEq, Register: word(0), Data: data} }
func differs(data []byte) any {
	return &expr.Cmp{Op: expr.CmpOpNeq, Register: word(0), Data: data}
}

// bits makes a word what it is, and mask, exclusive or xor.
func bits(at, mask, xor uint32) any {
	return &expr.Bitwise{SourceRegister: word(at), DestRegister: word(at), Len: 4, Mask: native(mask), Xor: native(xor)}
}

func loadMeta(k expr.MetaKey, at uint32) any { return &expr.Meta{Key: k, Register: word(at)} }
func storeMeta(k expr.MetaKey, at uint32) any {
	return &expr.Meta{Key: k, Register: word(at), SourceRegister: true}
}

// setPriority gives the packet the priority back that packets have by default.
func setPriority(at uint32) []any {
	return []any{&expr.Immediate{Register: word(at), Data: native(0)}, storeMeta(expr.MetaKeyPRIORITY, at)}
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// hasMarkBits matches packets of which that word has the bits that tell our marks from those of others.
func hasMarkBits(k expr.MetaKey) []any {
	return []any{loadMeta(k, 0), bits(0, markMask, 0), equals(native(markBits))}
}

// is matches packets by the state of their connection.
func is(state uint32) []any {
	return []any{&expr.Ct{Key: expr.CtKeySTATE, Register: word(0)}, bits(0, state, 0), differs(native(0))}
}
