package nfnetlink

import (
	"encoding/binary"
	"iter"
	"syscall"

	"golang.org/x/sys/unix"
)

// NFTables is what is added to an NFT_MSG_* to make the type of a message.
const NFTables = unix.NFNL_SUBSYS_NFTABLES << 8

// Encoder appends netlink messages and attributes (include/uapi/linux/netlink.h) to B.
type Encoder struct{ B []byte }

func (e *Encoder) header(kind uint16, length int) {
	e.B = binary.NativeEndian.AppendUint16(e.B, uint16(4+length))
	e.B = binary.NativeEndian.AppendUint16(e.B, kind)
}

func (e *Encoder) pad() {
	for len(e.B)%4 != 0 {
		e.B = append(e.B, 0)
	}
}

// Bytes appends an attribute.
func (e *Encoder) Bytes(kind uint16, data []byte) {
	e.header(kind, len(data))
	e.B = append(e.B, data...)
	e.pad()
}

// Text appends a string, which ends with a zero.
func (e *Encoder) Text(kind uint16, s string) {
	e.header(kind, len(s)+1)
	e.B = append(append(e.B, s...), 0)
	e.pad()
}

// Uint32 appends a number; nf_tables wants all of them in network byte order.
func (e *Encoder) Uint32(kind uint16, v uint32) {
	e.header(kind, 4)
	e.B = binary.BigEndian.AppendUint32(e.B, v)
}

// Open begins a nested attribute, Close ends it.
func (e *Encoder) Open(kind uint16) (start int) {
	start = len(e.B)
	e.header(kind|unix.NLA_F_NESTED, 0)
	return start
}

// Close ends what Open has begun.
func (e *Encoder) Close(start int) {
	binary.NativeEndian.PutUint16(e.B[start:], uint16(len(e.B)-start))
}

// Where struct nlmsghdr has its parts.
const (
	offsetFlags    = 6
	offsetSequence = 8
)

// Message begins a message with a netlink header, whose sequence number the socket fills in, and an nfgenmsg
// header without a resource; Finish ends it.
func (e *Encoder) Message(kind, flags uint16, family uint8) (start int) {
	start = len(e.B)
	e.B = binary.NativeEndian.AppendUint32(e.B, 0) // length
	e.B = binary.NativeEndian.AppendUint16(e.B, kind)
	e.B = binary.NativeEndian.AppendUint16(e.B, flags|unix.NLM_F_REQUEST)
	e.B = binary.NativeEndian.AppendUint64(e.B, 0) // sequence number and port
	e.B = append(e.B, family, unix.NFNETLINK_V0, 0, 0)
	return start
}

// Finish ends a message.
func (e *Encoder) Finish(start int) {
	binary.NativeEndian.PutUint32(e.B[start:], uint32(len(e.B)-start))
}

// bracket appends the begin or the end of a batch. It has the subsystem in place of the resource.
func (e *Encoder) bracket(kind uint16) {
	start := e.Message(kind, 0, unix.AF_UNSPEC)
	binary.BigEndian.PutUint16(e.B[len(e.B)-2:], unix.NFNL_SUBSYS_NFTABLES)
	e.Finish(start)
}

// number gives messages their sequence numbers, and returns where the last one begins.
func number(messages []byte, first uint32) (last int) {
	for at := 0; at < len(messages); at += int(binary.NativeEndian.Uint32(messages[at:])) {
		binary.NativeEndian.PutUint32(messages[at+offsetSequence:], first)
		first++
		last = at
	}
	return last
}

// Messages are those of a datagram, without memory for each. Their bytes are those of the datagram.
func Messages(b []byte) iter.Seq[syscall.NetlinkMessage] {
	return func(yield func(syscall.NetlinkMessage) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			length := binary.NativeEndian.Uint32(b)
			if length < unix.NLMSG_HDRLEN || int64(length) > int64(len(b)) {
				return
			}
			h := syscall.NlMsghdr{
				Len: length, Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				Seq: binary.NativeEndian.Uint32(b[8:]), Pid: binary.NativeEndian.Uint32(b[12:]),
			}
			if !yield(syscall.NetlinkMessage{Header: h, Data: b[unix.NLMSG_HDRLEN:length:length]}) {
				return
			}
			b = b[min((int(length)+3)&^3, len(b)):]
		}
	}
}

// Attributes calls f for each attribute in b; the bytes are valid during the call only. Appending to them changes no
// other attribute.
func Attributes(b []byte, f func(kind uint16, data []byte)) {
	for len(b) >= 4 {
		length := int(binary.NativeEndian.Uint16(b))
		if length < 4 || length > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:length:length])
		b = b[min((length+3)&^3, len(b)):]
	}
}

// Attribute is the first attribute of a kind, or nil.
func Attribute(b []byte, want uint16) (found []byte) {
	Attributes(b, func(kind uint16, data []byte) {
		if kind == want && found == nil {
			found = data
		}
	})
	return found
}

// Text is the first attribute of a kind, as a string.
func Text(b []byte, want uint16) string { return unix.ByteSliceToString(Attribute(b, want)) }

// Uint32 is the first attribute of a kind, as the kernel writes most numbers: in network byte order. It is 0 if there
// is none of four bytes.
func Uint32(b []byte, want uint16) uint32 {
	if data := Attribute(b, want); len(data) == 4 {
		return binary.BigEndian.Uint32(data)
	}
	return 0
}

// Uint64 is the same of eight bytes.
func Uint64(b []byte, want uint16) uint64 {
	if data := Attribute(b, want); len(data) == 8 {
		return binary.BigEndian.Uint64(data)
	}
	return 0
}

// Verdict are the attributes of the verdict that an expression of nf_tables has, if it has one.
func Verdict(expression []byte) []byte {
	if Text(expression, unix.NFTA_EXPR_NAME) != "immediate" {
		return nil
	}
	data := Attribute(Attribute(expression, unix.NFTA_EXPR_DATA), unix.NFTA_IMMEDIATE_DATA)
	return Attribute(data, unix.NFTA_DATA_VERDICT)
}

// VerdictChain is the chain to which one of a rule's expressions leads.
func VerdictChain(expressions []byte) (chain string) {
	Attributes(expressions, func(_ uint16, e []byte) {
		if to := Text(Verdict(e), unix.NFTA_VERDICT_CHAIN); to != "" {
			chain = to
		}
	})
	return chain
}

// IPSet is a request about an ipset, or with an empty name about all (include/uapi/linux/netfilter/ipset/ip_set.h).
func IPSet(command uint16, name string, each func(attrs []byte)) Request {
	const version, protocol, setName = 6, 1, 2
	r := Request{Kind: unix.NFNL_SUBSYS_IPSET<<8 | command, Reset: func() {}, Each: each}
	r.Filter.Bytes(protocol, []byte{version})
	if name != "" {
		r.Filter.Text(setName, name)
	}
	return r
}
