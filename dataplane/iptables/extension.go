package iptables

import (
	"encoding/binary"
	"net/netip"

	"fairlead.dev/fairlead/model"
)

// extension is a match or a target of x_tables, in the form that both back ends take: the name, the
// revision, and a structure from include/uapi/linux/netfilter/. The revision is the highest one, because
// iptables prints no other.
type extension struct {
	name     string
	revision uint8
	info     []byte
}

// structure is one of n bytes, with numbers: pairs of offset and value. Its length is a multiple of eight (XT_ALIGN).
func structure(n int, numbers ...uint32) []byte {
	b := make([]byte, (n+7)&^7)
	for i := 0; i < len(numbers); i += 2 {
		binary.NativeEndian.PutUint32(b[numbers[i]:], numbers[i+1])
	}
	return b
}

// matches are those of a rule that are extensions, cheap ones first. Comments are told apart, because
// nf_tables has a better place for them.
func (r *rule) matches(sets setIndexes) []extension {
	var m []extension
	if r.ports != (ports{}) {
		m = append(m, r.portMatch())
	}
	if r.marked != 0 {
		m = append(m, markMatch(r.marked, false))
	}
	if r.unmarked != 0 {
		m = append(m, markMatch(r.unmarked, true))
	}
	if r.state != 0 {
		m = append(m, conntrackMatch(trackedState, stateMask, uint16(r.state), false))
	}
	if r.notState != 0 {
		m = append(m, conntrackMatch(trackedState, stateMask, uint16(r.notState), true))
	}
	if r.first {
		m = append(m, conntrackMatch(trackedStatus, statusMask, confirmed, true))
	}
	if r.set != "" {
		m = append(m, setMatch(sets[r.set]))
	}
	if r.chance != 0 {
		m = append(m, statisticMatch(r.chance))
	}
	return m
}

// portMatch is struct xt_tcp, xt_udp or xt_sctp_info.
func (r *rule) portMatch() extension {
	those := func(b []byte) {
		binary.NativeEndian.PutUint16(b, r.ports.first)
		binary.NativeEndian.PutUint16(b[2:], r.ports.last)
	}
	if r.protocol == model.SCTP {
		const size, flags, destinationPorts = 292, 284, 2
		info := structure(size, flags, destinationPorts)
		those(info)
		return extension{name: "sctp", info: info}
	}
	info := structure(12)
	binary.NativeEndian.PutUint16(info[2:], 0xffff) // from any port to the last one
	those(info[4:])
	return extension{name: r.protocol.String(), info: info}
}

// markMatch is struct xt_mark_mtinfo1.
func markMatch(bits uint32, invert bool) extension {
	info := structure(12, 0, bits, 4, bits)
	if invert {
		info[8] = 1
	}
	return extension{"mark", 1, info}
}

// These are the fields that conntrackMatch looks at, and where struct xt_conntrack_mtinfo3 has the bits.
const (
	trackedState, stateMask   = 1, 150
	trackedStatus, statusMask = 1 << 6, 152

	confirmed = 1 << 3
)

// conntrackMatch is for connections of which one of some bits is set, or none.
func conntrackMatch(what uint16, mask int, bits uint16, invert bool) extension {
	const size, matchFlags, invertFlags = 164, 146, 148
	info := structure(size)
	binary.NativeEndian.PutUint16(info[matchFlags:], what)
	if invert {
		binary.NativeEndian.PutUint16(info[invertFlags:], what)
	}
	binary.NativeEndian.PutUint16(info[mask:], bits)
	return extension{"conntrack", 3, info}
}

// As in include/uapi/linux/netfilter/ipset/ip_set.h.
const (
	oneDimension = 1
	sourceOfOne  = 1 << 1
	invalidSet   = 0xffff
	flagExist    = 1
)

// setMatch is struct xt_set_info_match_v4.
func setMatch(index uint16) extension {
	info := structure(44)
	putSet(info, index)
	return extension{"set", 4, info}
}

// putSet is struct xt_set_info.
func putSet(b []byte, index uint16) {
	binary.NativeEndian.PutUint16(b, index)
	if index != invalidSet {
		b[2], b[3] = oneDimension, sourceOfOne
	}
}

// statisticMatch is struct xt_statistic_info.
func statisticMatch(chance uint32) extension {
	return extension{name: "statistic", info: structure(24, 4, chance)}
}

// commentMatch is struct xt_comment_info, which is long.
func commentMatch(text string) extension {
	info := make([]byte, 256)
	copy(info[:255], text)
	return extension{name: "comment", info: info}
}

// extension is what does the target's work, if it is not a verdict.
func (t target) extension(v6 bool, sets setIndexes) (extension, bool) {
	switch t.verb {
	case dnat:
		return t.dnatTarget(), true
	case masquerade:
		return masqueradeTarget(v6), true
	case orMark: // struct xt_mark_tginfo2
		return extension{"MARK", 2, structure(8, 0, t.mark, 4, t.mark)}, true
	case xorMark:
		return extension{"MARK", 2, structure(8, 0, t.mark)}, true
	case reject: // struct ipt_reject_info or ip6t_reject_info
		return extension{name: "REJECT", info: structure(8, 0, t.with.code(v6))}, true
	case remember:
		return t.rememberTarget(sets[t.name]), true
	}
	return extension{}, false
}

// Flags of a range of addresses (include/uapi/linux/netfilter/nf_nat.h).
const (
	natAddress  = 1 << 0
	natPort     = 1 << 1
	natRandomly = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
)

// dnatTarget is struct nf_nat_range2.
func (t target) dnatTarget() extension {
	info := structure(44, 0, natAddress|natPort)
	copy(info[4:20], t.to.Addr().AsSlice())
	copy(info[20:36], t.to.Addr().AsSlice())
	binary.BigEndian.PutUint16(info[36:], t.to.Port())
	binary.BigEndian.PutUint16(info[38:], t.to.Port())
	return extension{"DNAT", 2, info}
}

// backendOf is where a target translates to, if it does.
func backendOf(name string, info []byte, v6 bool) (a netip.AddrPort) {
	const address, port = 4, 36
	if name != "DNAT" || len(info) < port+2 {
		return a
	}
	size := 4
	if v6 {
		size = 16
	}
	addr, _ := netip.AddrFromSlice(info[address:][:size])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(info[port:]))
}

// masqueradeTarget is struct nf_nat_ipv4_multi_range_compat or nf_nat_range.
func masqueradeTarget(v6 bool) extension {
	info := structure(20, 0, 1, 4, natRandomly)
	if v6 {
		info = structure(40, 0, natRandomly)
	}
	return extension{name: "MASQUERADE", info: info}
}

// code is the kernel's number (enum ipt_reject_with and ip6t_reject_with).
func (r refusal) code(v6 bool) uint32 {
	if v6 {
		return [...]uint32{withReset: 6, withUnreachablePort: 4}[r]
	}
	return [...]uint32{withReset: 7, withUnreachablePort: 3, withUnreachableProtocol: 2}[r]
}

// rememberTarget is struct xt_set_info_target_v3.
func (t target) rememberTarget(index uint16) extension {
	info := structure(20, 12, flagExist, 16, t.seconds())
	putSet(info, index)
	putSet(info[4:], invalidSet)
	putSet(info[8:], invalidSet)
	return extension{"SET", 3, info}
}
