package nft

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

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

// Flatten turns the nested prefixes of one family, of which the longest wins, into disjoint ranges for each verdict.
// Single addresses are left out. Only where a prefix begins or ends can the verdict change. There are few prefixes, so
// each of these places is compared with all of them.
func Flatten(all map[netip.Prefix]model.Verdict, f Family) map[model.Verdict][]Span {
	guards := map[netip.Prefix]model.Verdict{}
	for p, v := range all {
		if f.Mine(p.Addr()) && !p.IsSingleIP() {
			guards[p] = v
		}
	}
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

func prefixSpan(p netip.Prefix) Span {
	b := []byte(Interval(p))
	first, _ := netip.AddrFromSlice(b[:len(b)/2])
	last, _ := netip.AddrFromSlice(b[len(b)/2:])
	return Span{first, last}
}

// Element is what the kernel lists of one.
type Element struct {
	Key, Data []byte
	Chain     string        // of verdict maps
	End       bool          // of an interval
	Left      time.Duration // until it goes; 0: it stays
	Counts    bool          // it has a counter
	Count     dataplane.Traffic
}

func decodeElement(b []byte) (e Element) {
	nfnetlink.Attributes(b, func(kind uint16, data []byte) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
			e.Chain = nfnetlink.Text(nfnetlink.Attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN)
		case unix.NFTA_SET_ELEM_EXPIRATION:
			if len(data) == 8 {
				e.Left = time.Duration(binary.BigEndian.Uint64(data)) * time.Millisecond
			}
		case unix.NFTA_SET_ELEM_EXPR:
			e.Count, e.Counts = countOf(data)
		case elementExpressions:
			e.Count, e.Counts = CountIn(data)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	})
	return e
}
