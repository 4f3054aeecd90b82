package ipvs

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// encodeKey writes a destination as the kernel wants the parts of a concatenation: in network byte
// order, each padded to words of four bytes.
func encodeKey(k model.Key) []byte {
	b := k.Addr.AsSlice()
	return append(b, byte(k.Protocol), 0, 0, 0, byte(k.Port>>8), byte(k.Port), 0, 0)
}

func decodeBackend(b []byte) (a netip.AddrPort, ok bool) {
	if len(b) < 4 {
		return a, false
	}
	n := len(b) - 4
	addr, ok := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(addr, uint16(b[n])<<8|uint16(b[n+1])), ok
}

// interval is the first and the last address of a prefix, encoded.
func interval(p netip.Prefix) string {
	first := p.Masked().Addr().AsSlice()
	last := slices.Clone(first)
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return string(append(first, last...))
}

// span is a range of addresses, both ends included.
type span struct{ first, last netip.Addr }

func (s span) encode() string { return string(append(s.first.AsSlice(), s.last.AsSlice()...)) }

// flatten turns nested prefixes, of which the longest wins, into disjoint ranges for each verdict.
func flatten(guards map[netip.Prefix]model.Verdict) map[model.Verdict][]span {
	var starts []netip.Addr
	for p := range guards {
		s := prefixSpan(p)
		starts = append(starts, s.first)
		if next := s.last.Next(); next.IsValid() {
			starts = append(starts, next)
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	starts = slices.Compact(starts)
	spans := map[model.Verdict][]span{}
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
		last := prefixSpan(best).last
		if i+1 < len(starts) && !last.Less(starts[i+1]) {
			last = starts[i+1].Prev()
		}
		spans[guards[best]] = append(spans[guards[best]], span{first, last})
	}
	return spans
}

func prefixSpan(p netip.Prefix) span {
	b := []byte(interval(p))
	first, _ := netip.AddrFromSlice(b[:len(b)/2])
	last, _ := netip.AddrFromSlice(b[len(b)/2:])
	return span{first, last}
}
