// Package nf says once how the data planes that keep tables of nf_tables write and read what those hold: keys of
// sets, ranges of addresses, elements as the kernel lists them, and by which mark they know their own rules.
//
//	rows ── EncodeKey, Interval, Flatten ──► sets ──► kernel
//	what is there ◄── DecodeElement, DecodeBackend, RuleMark ──┘
package nf

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// KeyEnd is NFTA_SET_ELEM_KEY_END of include/uapi/linux/netfilter/nf_tables.h, which x/sys/unix lacks.
const KeyEnd = 10

// EncodeKey writes a destination as the kernel wants the parts of a concatenation: in network byte
// order, each padded to words of four bytes.
func EncodeKey(k model.Key) []byte {
	b := k.Addr.AsSlice()
	return append(b, byte(k.Protocol), 0, 0, 0, byte(k.Port>>8), byte(k.Port), 0, 0)
}

// DecodeKey reads it; the scope is that of the map.
func DecodeKey(b []byte, scope model.Scope) (k model.Key, ok bool) {
	if len(b) < 8 {
		return k, false
	}
	n := len(b) - 8
	addr, ok := netip.AddrFromSlice(b[:n])
	return model.Key{
		Addr: addr, Protocol: model.Protocol(b[n]), Port: uint16(b[n+4])<<8 | uint16(b[n+5]), Scope: scope,
	}, ok
}

// EncodeBackend writes an address and a port in the same way.
func EncodeBackend(a netip.AddrPort) []byte {
	return append(a.Addr().AsSlice(), byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

// DecodeBackend reads them.
func DecodeBackend(b []byte) (a netip.AddrPort, ok bool) {
	if len(b) < 4 {
		return a, false
	}
	n := len(b) - 4
	addr, ok := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(addr, uint16(b[n])<<8|uint16(b[n+1])), ok
}

// Interval is the first and the last address of a prefix, encoded.
func Interval(p netip.Prefix) string {
	first := p.Masked().Addr().AsSlice()
	last := slices.Clone(first)
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return string(append(first, last...))
}

// Span is a range of addresses, both ends included.
type Span struct{ First, Last netip.Addr }

// Encode writes both ends.
func (s Span) Encode() string { return string(append(s.First.AsSlice(), s.Last.AsSlice()...)) }

// Flatten turns nested prefixes, of which the longest wins, into disjoint ranges for each verdict.
func Flatten(guards map[netip.Prefix]model.Verdict) map[model.Verdict][]Span {
	var starts []netip.Addr
	for p := range guards {
		s := prefixSpan(p)
		starts = append(starts, s.First)
		if next := s.Last.Next(); next.IsValid() {
			starts = append(starts, next)
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	starts = slices.Compact(starts)
	spans := map[model.Verdict][]Span{}
	for i, first := range starts {
		best := netip.Prefix{}
		for p := range guards {
			if p.Contains(first) && (!best.IsValid() || p.Bits() > best.Bits()) {
				best = p
			}
		}
		if !best.IsValid() {
			continue
		}
		last := prefixSpan(best).Last
		if i+1 < len(starts) && !last.Less(starts[i+1]) {
			last = starts[i+1].Prev()
		}
		spans[guards[best]] = append(spans[guards[best]], Span{first, last})
	}
	return spans
}

// Edge is where a range begins or, not included, ends. The kernel lists each as an element of its own.
type Edge struct {
	netip.Addr
	End bool
}

// Ranges pairs the edges of ranges.
func Ranges(edges []Edge) (spans []Span) {
	slices.SortFunc(edges, func(a, b Edge) int {
		if c := a.Compare(b.Addr); c != 0 || a.End == b.End {
			return c
		} else if a.End { // a range ends before the next one starts at the same address
			return -1
		}
		return 1
	})
	for n, e := range edges {
		if e.End {
			continue
		}
		last := prefixSpan(netip.PrefixFrom(e.Addr, 0)).Last // where there is no end
		if n+1 < len(edges) {
			last = edges[n+1].Prev()
		}
		spans = append(spans, Span{e.Addr, last})
	}
	return spans
}

func prefixSpan(p netip.Prefix) Span {
	b := []byte(Interval(p))
	first, _ := netip.AddrFromSlice(b[:len(b)/2])
	last, _ := netip.AddrFromSlice(b[len(b)/2:])
	return Span{first, last}
}

// Element is what the kernel lists of one.
type Element struct {
	Key, KeyEnd, Data []byte
	Chain             string // of verdict maps
	End               bool   // of an interval
}

// DecodeElement reads the attributes of one.
func DecodeElement(b []byte) (e Element) {
	nfnetlink.Attributes(b, func(kind uint16, data []byte) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
		case KeyEnd:
			e.KeyEnd = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
			e.Chain = nfnetlink.Text(nfnetlink.Attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	})
	return e
}

// Types of the items in a rule's user data: nft's own for the comment, and one that it skips.
const (
	userDataComment = 0
	userDataMark    = 0x46
)

// RuleUserData is what a rule carries for people, the comment, and for us, its mark.
func RuleUserData(mark, comment string) []byte {
	user := []byte{userDataMark, byte(len(mark))}
	user = append(user, mark...)
	if comment != "" {
		user = append(user, userDataComment, byte(len(comment)+1))
		user = append(append(user, comment...), 0)
	}
	return user
}

// RuleMark is the mark in a rule's user data; empty if the rule is not ours.
func RuleMark(user []byte) string {
	for len(user) >= 2 && len(user) >= 2+int(user[1]) {
		if user[0] == userDataMark {
			return string(user[2 : 2+user[1]])
		}
		user = user[2+user[1]:]
	}
	return ""
}
