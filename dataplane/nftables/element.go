package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

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
		k = t.tx.Open(nf.KeyEnd)
		t.tx.Bytes(unix.NFTA_DATA_VALUE, keyEnd)
		t.tx.Close(k)
	}
}

func (t *table) endElement() {
	t.tx.Close(t.tx.steps[len(t.tx.steps)-1].from)
	t.tx.end()
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
	e := nf.DecodeElement(attr[4:])
	text := s.name + " "
	switch s.name {
	case "frontends", "internal-frontends":
		key, _ := nf.DecodeKey(e.Key, model.Any)
		return fmt.Sprintf("%s %s/%s", text, key.AddrPort(), key.Protocol)
	case "slots", "choices":
		return text + t.describeSlot(e)
	case "backends":
		b, _ := nf.DecodeBackend(e.Data)
		return fmt.Sprintf("%s %x %s", text, e.Key, b)
	case "classes":
		return fmt.Sprintf("%s%d %s", text, token(binary.NativeEndian.Uint32(e.Key)).class(), e.Chain)
	}
	for n := int(t.family.address.size); len(e.Key) >= n; e.Key = e.Key[n:] {
		a, _ := netip.AddrFromSlice(e.Key[:n])
		text += a.String() + " "
	}
	return text[:len(text)-1]
}

func (t *table) describeSlot(e nf.Element) string {
	if len(e.Key) < 8 {
		return "?"
	}
	number := binary.NativeEndian.Uint32(e.Key)
	name := fmt.Sprintf("of pool number %d", number)
	if id, ok := t.poolNames()[number]; ok {
		name = "of pool " + id.String()
	}
	name = fmt.Sprintf("%d %s", binary.NativeEndian.Uint32(e.Key[4:]), name)
	if backend, ok := nf.DecodeBackend(e.Data); ok {
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

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
