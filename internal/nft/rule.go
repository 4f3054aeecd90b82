package nft

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// Chain is an nf_tables chain with its rules.
type Chain struct {
	Name  string
	Hook  *Hook // base chains only
	Rules []Rule

	UserData []byte // if any
}

// Hook is where a base chain hangs.
type Hook struct {
	Kind     string
	Number   uint32
	Priority int32
}

// FilterChain is a base chain that filters.
func FilterChain(name string, hook uint32, priority int32, rules ...Rule) Chain {
	return Chain{Name: name, Hook: &Hook{Kind: "filter", Number: hook, Priority: priority}, Rules: rules}
}

// Rule is an nf_tables rule; the comment is what "nft list" shows behind it. Its expressions are
// google/nftables', or an Expression.
type Rule struct {
	comment string
	exprs   []any
}

// Expression is one that google/nftables does not have, or has wrong.
type Expression interface{ Encode() []byte }

// NewRule makes one. Expressions may come in lists, and these in others.
func NewRule(comment string, exprs ...any) Rule { return Rule{comment, flat(exprs)} }

func flat(exprs []any) (all []any) {
	for _, x := range exprs {
		if list, ok := x.([]any); ok {
			all = append(all, flat(list)...)
		} else {
			all = append(all, x)
		}
	}
	return all
}

// encode returns the rule as the kernel wants it, and a hash of it. That is kept in the rule's user data, where nft
// does not look, and tells whether a rule found in the kernel is the one we want.
func (r Rule) encode(f Family) (body []byte, mark string, err error) {
	e := nfnetlink.Encoder{}
	for _, x := range r.exprs {
		var b []byte
		switch x := x.(type) {
		case Expression:
			b = x.Encode()
		case expr.Any:
			b, err = expr.Marshal(f.Number, x)
		default:
			err = fmt.Errorf("%T is no expression", x)
		}
		if err != nil {
			return nil, "", fmt.Errorf("encode rule %q: %w", r.comment, err)
		}
		e.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
	}
	hash := fnv.New64a()
	hash.Write(e.B)
	hash.Write([]byte(r.comment))
	return e.B, string(hash.Sum(nil)), nil
}

// Types of the items in a rule's user data: nft's own for the comment, and one that it skips.
const (
	userDataComment = 0
	userDataMark    = 0x46
)

// RuleData is the user data of a rule with a mark and a comment.
func RuleData(mark, comment string) []byte {
	user := append([]byte{userDataMark, byte(len(mark))}, mark...)
	if comment != "" {
		user = append(user, userDataComment, byte(len(comment)+1))
		user = append(append(user, comment...), 0)
	}
	return user
}

// OurData is user data that says that we have made an object that is no rule.
func OurData() []byte { return []byte{userDataMark, 1, 1} }

// RuleMark is the mark in the user data of a rule that the kernel lists; nil if the rule is not ours.
func RuleMark(attrs []byte) []byte {
	user := nfnetlink.Attribute(attrs, unix.NFTA_RULE_USERDATA)
	for len(user) >= 2 && len(user) >= 2+int(user[1]) {
		if user[0] == userDataMark {
			return user[2 : 2+user[1]]
		}
		user = user[2+user[1]:]
	}
	return nil
}

// Word is the n-th register of 32 bits. Longer values take several in a row.
func Word(n uint32) uint32 { return unix.NFT_REG32_00 + n }

// Native is a number in the byte order in which packets' marks and priorities are.
func Native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// Number reads it; 0 if it is none.
func Number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

// Load loads an address of the network header, which is at Source or Destination.
func (f Family) Load(offset, at uint32) any {
	return &expr.Payload{
		Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.Address.size(), DestRegister: Word(at),
	}
}

// LoadPort loads the destination's.
func LoadPort(at uint32) any {
	return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: Word(at)}
}

func loadSourcePort(at uint32) any {
	return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2, DestRegister: Word(at)}
}

func encodePort(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }

// DestinationKey loads address, protocol and port of the destination: the key of the frontends.
func (f Family) DestinationKey() (exprs []any, next uint32) {
	n := f.Address.Words()
	return []any{f.Load(f.Destination, 0), LoadMeta(expr.MetaKeyL4PROTO, n), LoadPort(n + 1)}, n + 2
}

// LoadMeta loads what is known of a packet beside its bytes.
func LoadMeta(k expr.MetaKey, at uint32) any { return &expr.Meta{Key: k, Register: Word(at)} }

// StoreMeta changes it.
func StoreMeta(k expr.MetaKey, at uint32) any {
	return &expr.Meta{Key: k, Register: Word(at), SourceRegister: true}
}

// ResetPriority gives the packet the priority back that packets have by default.
func ResetPriority(scratch uint32) []any {
	return []any{&expr.Immediate{Register: Word(scratch), Data: Native(0)}, StoreMeta(expr.MetaKeyPRIORITY, scratch)}
}

// Bits makes a word what it is, and mask, exclusive or xor.
func Bits(at, mask, xor uint32) any {
	return &expr.Bitwise{SourceRegister: Word(at), DestRegister: Word(at), Len: 4, Mask: Native(mask), Xor: Native(xor)}
}

// Equals goes on with the rule if what starts at word 0 is that.
func Equals(data []byte) any { return &expr.Cmp{Op: expr.CmpOpEq, Register: Word(0), Data: data} }

// Differs goes on with the rule if what starts at word 0 is something else.
func Differs(data []byte) any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: Word(0), Data: data} }

// IsProtocol goes on with packets of a protocol.
func IsProtocol(p byte) []any { return []any{LoadMeta(expr.MetaKeyL4PROTO, 0), Equals([]byte{p})} }

// TCPFlags goes on with packets of TCP for which a comparison of these flags holds.
func TCPFlags(of byte, compare any) []any {
	const offset = 13
	return append(IsProtocol(unix.IPPROTO_TCP),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1, DestRegister: Word(0)},
		&expr.Bitwise{SourceRegister: Word(0), DestRegister: Word(0), Len: 1, Mask: []byte{of}, Xor: []byte{0}}, compare)
}

// In goes on with the rule if the key that starts at word 0 is in a set.
func In(set string) any { return &expr.Lookup{SourceRegister: Word(0), SetName: set} }

// NotIn goes on with the rule if it is not.
func NotIn(set string) any { return &expr.Lookup{SourceRegister: Word(0), SetName: set, Invert: true} }

// Find looks up the key that starts at word 0 and puts the map's data at another.
func Find(set string, at uint32) any {
	return &expr.Lookup{SourceRegister: Word(0), DestRegister: Word(at), IsDestRegSet: true, SetName: set}
}

// Follow goes to the chain that a verdict map has for the key at word 0.
func Follow(set string) any {
	return &expr.Lookup{SourceRegister: Word(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: set}
}

// Jump goes to a chain and comes back.
func Jump(chain string) any { return &expr.Verdict{Kind: expr.VerdictJump, Chain: chain} }

// GoTo goes to a chain for good.
func GoTo(chain string) any { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain} }

// Return goes back from a chain.
func Return() any { return &expr.Verdict{Kind: expr.VerdictReturn} }

// Accept lets the packet pass.
func Accept() any { return &expr.Verdict{Kind: expr.VerdictAccept} }

// Drop drops it.
func Drop() any { return &expr.Verdict{Kind: expr.VerdictDrop} }

// TranslateTo sends the connection to the address and port that start at a word.
func (f Family) TranslateTo(at uint32) any {
	return &expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(f.Number),
		RegAddrMin: Word(at), RegProtoMin: Word(at + f.Address.Words()), Specified: true,
	}
}
