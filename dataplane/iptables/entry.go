package iptables

import (
	"encoding/binary"
	"strings"

	"fairlead.dev/fairlead/internal/xt"
)

// verdicts are those of verbs that need no extension.
var verdicts = [...]int{accept: xt.Accept, drop: xt.Drop, back: xt.Return}

// encode appends a rule to those of a chain of x_tables.
func (r *rule) encode(e *xt.Rules, sets setIndexes) {
	r.condition(e.Begin(), e.V6)
	for _, m := range r.matches(sets) {
		e.Match(m.name, m.revision, m.info)
	}
	if r.comment != "" {
		m := commentMatch(r.comment)
		e.Match(m.name, m.revision, m.info)
	}
	x, ok := r.do.extension(e.V6, sets)
	switch {
	case ok:
		e.Target(x.name, x.revision, x.info)
	case r.do.chainName() != "":
		e.Jump(r.do.name)
	default:
		e.Verdict(verdicts[r.do.verb])
	}
}

// condition fills in struct ipt_ip or ip6t_ip6:
//
//	source, destination, mask of the source, mask of the destination   4 bytes each, or 16
//	interface in, interface out, mask of its name, the same for out    16 bytes each
//	protocol                                                           2 bytes; in IPv6 one for tos follows
//	flags, flags of what is inverted                                   1 byte each
func (r *rule) condition(ip []byte, v6 bool) {
	const inverseIn, inverseSource = 1, 8
	size, protocol, flags, invert := 4, 80, 82, 83
	goToFlag := byte(2)
	if v6 {
		size, protocol, flags, invert = 16, 128, 131, 132
		goToFlag = 4
	}
	if r.src.IsValid() {
		copy(ip, r.src.Addr().AsSlice())
		putMask(ip[2*size:3*size], r.src.Bits())
	}
	if r.dst.IsValid() {
		copy(ip[size:], r.dst.Addr().AsSlice())
		putMask(ip[3*size:4*size], r.dst.Bits())
	}
	putInterface(ip[4*size:], r.in)
	if r.notIn {
		ip[invert] |= inverseIn
	}
	if r.notSrc {
		ip[invert] |= inverseSource
	}
	binary.NativeEndian.PutUint16(ip[protocol:], uint16(r.protocol))
	if v6 && r.protocol != 0 {
		ip[flags] |= 1
	}
	if r.do.verb == goTo {
		ip[flags] |= goToFlag
	}
}

func putMask(mask []byte, bits int) {
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
}

const interfaceName = 16

// putInterface fills in the name, and behind that of the interface on which packets leave the mask.
func putInterface(b []byte, name string) {
	if name == "" {
		return
	}
	name, wild := strings.CutSuffix(name, "*")
	n := copy(b[:interfaceName], name)
	if !wild { // the zero that ends the name is compared, too
		n++
	}
	for i := range n {
		b[2*interfaceName+i] = 0xff
	}
}
