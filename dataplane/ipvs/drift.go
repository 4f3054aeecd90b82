package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// append adds the steps of another transaction.
func (t *transaction) append(o *transaction) {
	offset := len(t.B)
	t.B = append(t.B, o.B...)
	for _, s := range o.steps {
		s.from, s.to = s.from+offset, s.to+offset
		t.steps = append(t.steps, s)
	}
	*o = transaction{}
}

// drift says what is wrong if the i-th step has to be done.
func (t *transaction) drift(i int) dataplane.Drift {
	s := &t.steps[i]
	attrs := t.B[s.from:s.to]
	d := dataplane.Drift{Class: "structure", Object: "table " + s.table.family.name + " " + s.table.name}
	what := describe(s.verb, attrs)
	if s.set != nil {
		d.Class = s.set.name
		d.Object += ": " + s.set.name
		what = s.set.describeElement(nf.DecodeElement(attrs[4:]))
	}
	switch s.verb {
	case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSETELEM:
		d.Have = what
	default:
		d.Want = what
	}
	return d
}

// describe names the object of a message that is not about elements.
func describe(verb uint16, attrs []byte) string {
	switch verb {
	case unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		return "set " + nfnetlink.Text(attrs, unix.NFTA_SET_NAME)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		return "chain " + nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		return "rules of chain " + nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
	}
	return "the table"
}

// describeElement writes the parts of an element's key as people do.
func (s *set) describeElement(e nf.Element) string {
	var words []string
	key := e.Key
	for _, f := range s.key {
		n := min(int(f.words()*4), len(key))
		part := key[:n]
		key = key[n:]
		switch f.kind {
		case typeInetProto:
			words = append(words, model.Protocol(part[0]).String())
		case typeInetService:
			words = append(words, fmt.Sprint(binary.BigEndian.Uint16(part)))
		case typeClassID:
			words = append(words, fmt.Sprintf("%#x", number(part)))
		default:
			a, _ := netip.AddrFromSlice(part)
			words = append(words, a.String())
		}
	}
	switch {
	case e.Chain != "":
		words = append(words, e.Chain)
	case e.End:
		words = append(words, "(where a range ends)")
	}
	return strings.Join(words, " ")
}
