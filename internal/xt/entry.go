package xt

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"golang.org/x/sys/unix"
)

// Layout is where struct ipt_entry or ip6t_entry (include/uapi/linux/netfilter_ip…/ip…_tables.h) has its parts,
// on machines of 64 bits.
type Layout struct {
	V6        bool
	condition int // how long the part is that is compared with packets
	offsets   int // of the target, and of the next entry
	size      int // of the whole; matches and the target follow
}

// LayoutOf is that of a family.
func LayoutOf(v6 bool) Layout {
	if v6 {
		return Layout{V6: true, condition: 136, offsets: 140, size: 168}
	}
	return Layout{condition: 84, offsets: 88, size: 112}
}

// These are parts of struct xt_entry_match and xt_entry_target. The extension's own data follow the header. For the
// target without a name they are a verdict or an offset, for errorTarget the name of the chain that begins there.
const (
	extensionHeader = 32 // size, name, revision
	nameOffset      = 2
	nameLength      = 29
	revisionOffset  = 31
	errorTarget     = "ERROR"

	verdictTarget = extensionHeader + 8
	chainTarget   = extensionHeader + 32
)

// Verdicts are those of netfilter, minus one, negative. Values from 0 on are offsets to jump to.
const (
	Drop   = -1
	Accept = -2
	Return = -5
)

// entry is the one that begins there.
func (l Layout) entry(raw []byte) ([]byte, error) {
	if len(raw) < l.size {
		return nil, fmt.Errorf("%d bytes are too few", len(raw))
	}
	target, size := l.target(raw), l.next(raw)
	if target < l.size || size < target+extensionHeader || size > len(raw) {
		return nil, fmt.Errorf("target at %d and size %d of %d bytes make no sense", target, size, len(raw))
	}
	return raw[:size], nil
}

// target is where an entry has its target.
func (l Layout) target(entry []byte) int { return int(binary.NativeEndian.Uint16(entry[l.offsets:])) }

// next is where the next entry begins.
func (l Layout) next(entry []byte) int { return int(binary.NativeEndian.Uint16(entry[l.offsets+2:])) }

// verdictAt is where an entry without a named target has its verdict.
func (l Layout) verdictAt(entry []byte) int { return l.target(entry) + extensionHeader }

// TargetName is the target's name, and what is behind its header.
func (l Layout) TargetName(entry []byte) (name string, data []byte) {
	t := entry[l.target(entry):]
	return unix.ByteSliceToString(t[nameOffset:][:nameLength]), t[extensionHeader:]
}

// Verdict is what an entry without a named target says; ok is false for others.
func (l Layout) Verdict(entry []byte) (verdict int, ok bool) {
	name, data := l.TargetName(entry)
	if name != "" || len(data) < 4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(data))), true
}

// Looks calls f with what an entry compares packets with: addresses and interfaces, which have no name, then matches.
func (l Layout) Looks(entry []byte, f func(match string, data []byte)) {
	f("", entry[:l.condition])
	for m := entry[l.size:l.target(entry)]; len(m) >= extensionHeader; {
		size := int(binary.NativeEndian.Uint16(m))
		if size < extensionHeader || size > len(m) {
			return
		}
		f(unix.ByteSliceToString(m[nameOffset:][:nameLength]), m[extensionHeader:size])
		m = m[size:]
	}
}

// Unconditional reports whether an entry is for all packets.
func (l Layout) Unconditional(entry []byte) bool {
	for _, b := range entry[:l.condition] {
		if b != 0 {
			return false
		}
	}
	return l.target(entry) == l.size
}

// Counted is how many packets have met an entry, as the kernel lists it.
func (l Layout) Counted(entry []byte) uint64 {
	const packetsAndBytes = 16
	return binary.NativeEndian.Uint64(entry[l.size-packetsAndBytes:])
}

// said is what an entry says, without what the kernel writes into it.
func (l Layout) said(entry []byte) [3][]byte {
	return [3][]byte{entry[:l.condition], entry[l.offsets : l.offsets+4], entry[l.size:]}
}

// Hash is a number for what an entry says. Of a jump to a chain it has the name instead of the offset.
func (l Layout) Hash(entry []byte, to string) uint64 {
	said := l.said(entry)
	return hash(said[0], said[1], said[2], to)
}

// deed is a number for what an entry does with packets from somewhere to somewhere, whatever its matches.
func (l Layout) deed(entry []byte, to string) uint64 {
	return hash(entry[:l.condition], nil, entry[l.target(entry):], to)
}

func hash(condition, offsets, rest []byte, to string) uint64 {
	h := fnv.New64a()
	if to != "" {
		rest = rest[:len(rest)-8]
	}
	for _, part := range [][]byte{condition, offsets, rest} {
		_, _ = h.Write(part)
	}
	_, _ = h.Write([]byte(to))
	return h.Sum64()
}

// Rules are entries under construction. A rule begins with its condition; matches and one target follow.
type Rules struct {
	Layout

	B     []byte
	start int // of the last entry
	n     int
	jumps []pending
}

// pending is a jump to a chain whose place is not known yet.
type pending struct {
	at int
	to string
}

// Begin begins a rule. The condition (struct ipt_ip or ip6t_ip6) is empty, and so that all packets fulfil it.
func (r *Rules) Begin() (condition []byte) {
	r.start = len(r.B)
	r.n++
	r.B = append(r.B, make([]byte, r.size)...)
	return r.B[r.start:][:r.condition]
}

// Match appends a match.
func (r *Rules) Match(name string, revision uint8, info []byte) {
	start := len(r.B)
	r.B = append(r.B, make([]byte, extensionHeader)...)
	binary.NativeEndian.PutUint16(r.B[start:], uint16(extensionHeader+len(info)))
	copy(r.B[start+nameOffset:], name)
	r.B[start+revisionOffset] = revision
	r.B = append(r.B, info...)
}

// Target ends a rule.
func (r *Rules) Target(name string, revision uint8, info []byte) {
	binary.NativeEndian.PutUint16(r.B[r.start+r.offsets:], uint16(len(r.B)-r.start))
	r.Match(name, revision, info)
	binary.NativeEndian.PutUint16(r.B[r.start+r.offsets+2:], uint16(len(r.B)-r.start))
}

// Verdict ends a rule, too.
func (r *Rules) Verdict(v int) {
	info := make([]byte, verdictTarget-extensionHeader)
	binary.NativeEndian.PutUint32(info, uint32(int32(v)))
	r.Target("", 0, info)
}

// Jump ends a rule that leads to a chain.
func (r *Rules) Jump(chain string) {
	r.Verdict(0)
	r.jumps = append(r.jumps, pending{len(r.B) - verdictTarget + extensionHeader, chain})
}

// NewChain begins the rules of a chain.
func NewChain(l Layout, name string) *Rules {
	r := &Rules{Layout: l}
	r.head(name)
	return r
}

func (r *Rules) head(chain string) {
	r.Begin()
	info := make([]byte, chainTarget-extensionHeader)
	copy(info, chain)
	r.Target(errorTarget, 0, info)
}
