package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// encodeKey writes a destination as the kernel wants the parts of a concatenation: in network byte
// order, each padded to words of four bytes.
func encodeKey(k model.Key) []byte {
	b := k.Addr.AsSlice()
	return append(b, byte(k.Protocol), 0, 0, 0, byte(k.Port>>8), byte(k.Port), 0, 0)
}

func decodeKey(b []byte, scope model.Scope) (k model.Key, ok bool) {
	if len(b) < 8 {
		return k, false
	}
	n := len(b) - 8
	addr, ok := netip.AddrFromSlice(b[:n])
	return model.Key{
		Addr: addr, Protocol: model.Protocol(b[n]), Port: uint16(b[n+4])<<8 | uint16(b[n+5]), Scope: scope,
	}, ok
}

func encodeBackend(a netip.AddrPort) []byte {
	return append(a.Addr().AsSlice(), byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

func decodeBackend(b []byte) (a netip.AddrPort, ok bool) {
	if len(b) < 4 {
		return a, false
	}
	n := len(b) - 4
	addr, ok := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(addr, uint16(b[n])<<8|uint16(b[n+1])), ok
}

// element appends a step for one element; data may be nil.
func (t *table) element(verb uint16, s int, key, data []byte) {
	t.beginElement(verb, s, key, nil)
	if data != nil {
		d := t.tx.Open(unix.NFTA_SET_ELEM_DATA)
		t.tx.Bytes(unix.NFTA_DATA_VALUE, data)
		t.tx.Close(d)
	}
	t.endElement()
}

// beginElement opens a step for one element of which more attributes follow. keyEnd is the upper end
// of a concatenated range.
func (t *table) beginElement(verb uint16, s int, key, keyEnd []byte) {
	var flags uint16
	if verb == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL // what is there already is not what we think
	}
	t.tx.begin(verb, flags, t)
	t.tx.steps[len(t.tx.steps)-1].set = t.sets[s]
	t.tx.Open(unix.NFTA_LIST_ELEM)
	k := t.tx.Open(unix.NFTA_SET_ELEM_KEY)
	t.tx.Bytes(unix.NFTA_DATA_VALUE, key)
	t.tx.Close(k)
	if keyEnd != nil {
		k = t.tx.Open(attrKeyEnd)
		t.tx.Bytes(unix.NFTA_DATA_VALUE, keyEnd)
		t.tx.Close(k)
	}
}

func (t *table) endElement() {
	t.tx.Close(t.tx.steps[len(t.tx.steps)-1].from)
	t.tx.end()
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

// describe names the object of a message that is not about elements.
func (t *table) describe(verb uint16, attrs []byte) string {
	text := "table " + t.family.name + " " + t.name
	switch verb {
	case unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		return text + ": set " + nfnetlink.Text(attrs, unix.NFTA_SET_NAME)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		return text + ": chain " + nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		return text + ": rules of chain " + nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
	}
	return text
}

// describeElement names an element, given its NFTA_LIST_ELEM attribute.
func (t *table) describeElement(s *set, attr []byte) string {
	e := decodeElement(attr[4:])
	text := s.name + " "
	switch s.name {
	case "frontends", "internal-frontends":
		key, _ := decodeKey(e.key, model.Any)
		return fmt.Sprintf("%s %s/%s", text, key.AddrPort(), key.Protocol)
	case "slots", "choices":
		return text + t.describeSlot(e)
	case "backends":
		b, _ := decodeBackend(e.data)
		return fmt.Sprintf("%s %x %s", text, e.key, b)
	case "classes":
		return fmt.Sprintf("%s%d %s", text, token(binary.NativeEndian.Uint32(e.key)).class(), e.chain)
	}
	for n := int(t.family.address.size); len(e.key) >= n; e.key = e.key[n:] {
		a, _ := netip.AddrFromSlice(e.key[:n])
		text += a.String() + " "
	}
	return text[:len(text)-1]
}

func (t *table) describeSlot(e element) string {
	if len(e.key) < 8 {
		return "?"
	}
	number := binary.NativeEndian.Uint32(e.key)
	name := fmt.Sprintf("of pool number %d", number)
	if id, ok := t.poolNames()[number]; ok {
		name = "of pool " + id.String()
	}
	name = fmt.Sprintf("%d %s", binary.NativeEndian.Uint32(e.key[4:]), name)
	if backend, ok := decodeBackend(e.data); ok {
		name += ": " + backend.String()
	}
	return name
}

func (t *table) poolNames() map[uint32]model.PoolID {
	if t.names == nil {
		t.names = make(map[uint32]model.PoolID, len(t.pools))
		for id, p := range t.pools {
			t.names[p.number] = id
		}
	}
	return t.names
}

// element is what the kernel lists of one.
type element struct {
	key, keyEnd, data []byte
	chain             string
	end               bool
}

func decodeElement(b []byte) (e element) {
	nfnetlink.Attributes(b, func(kind uint16, data []byte) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
		case attrKeyEnd:
			e.keyEnd = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = nfnetlink.Attribute(data, unix.NFTA_DATA_VALUE)
			e.chain = nfnetlink.Text(nfnetlink.Attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	})
	return e
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

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
