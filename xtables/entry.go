package xtables

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Layout is where struct ipt_entry or ip6t_entry (include/uapi/linux/netfilter_ip…/ip…_tables.h) has its parts,
// on machines of 64 bits.
type Layout struct {
	Condition int // how long the part is that is compared with packets
	Offsets   int // of the target, and of the next entry
	Size      int // of the whole; matches and the target follow
}

// LayoutOf is that of a family.
func LayoutOf(v6 bool) Layout {
	if v6 {
		return Layout{Condition: 136, Offsets: 140, Size: 168}
	}
	return Layout{Condition: 84, Offsets: 88, Size: 112}
}

// Parts of struct xt_entry_match and xt_entry_target. Behind the header there is what the extension wants; for
// the target without a name that is a Verdict or an offset, for ErrorTarget the name of the chain that begins there.
const (
	ExtensionHeader = 32 // size, name, revision
	NameOffset      = 2
	NameLength      = 29
	RevisionOffset  = 31
	ErrorTarget     = "ERROR"
)

// Verdicts are those of netfilter, minus one, negative. What is not negative is an offset to jump to.
const (
	Drop   = -1
	Accept = -2
	Return = -5
)

// Entry is the one that begins there.
func (l Layout) Entry(raw []byte) ([]byte, error) {
	if len(raw) < l.Size {
		return nil, fmt.Errorf("%d bytes are too few", len(raw))
	}
	target, size := l.Target(raw), l.Next(raw)
	if target < l.Size || size < target+ExtensionHeader || size > len(raw) {
		return nil, fmt.Errorf("target at %d and size %d of %d bytes make no sense", target, size, len(raw))
	}
	return raw[:size], nil
}

// Target is where an entry has its target.
func (l Layout) Target(entry []byte) int { return int(binary.NativeEndian.Uint16(entry[l.Offsets:])) }

// Next is where the next entry begins.
func (l Layout) Next(entry []byte) int { return int(binary.NativeEndian.Uint16(entry[l.Offsets+2:])) }

// TargetName is the target's name, and what is behind its header.
func (l Layout) TargetName(entry []byte) (name string, data []byte) {
	t := entry[l.Target(entry):]
	return unix.ByteSliceToString(t[NameOffset:][:NameLength]), t[ExtensionHeader:]
}

// Verdict is what an entry without a named target says; ok is false for others.
func (l Layout) Verdict(entry []byte) (verdict int, ok bool) {
	name, data := l.TargetName(entry)
	if name != "" || len(data) < 4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(data))), true
}
