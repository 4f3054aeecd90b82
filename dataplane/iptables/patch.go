package iptables

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/xtables"
)

// after is the blob after a change; the one before must not be used any more.
func (b *blob) after(c *change, sets setIndexes) (*blob, error) {
	if ours := len(c.add) == 0 && len(c.remove) == 0; ours && b.ordered {
		return b, b.patch(c, sets)
	}
	return b.changed(c, sets)
}

// patch makes the change of chains of ours in the blob itself: a table of tens of megabytes is neither copied
// nor left to the garbage collector for each endpoint that comes or goes. The rules of others, and the kernel's own
// chains, stay where they are, at the beginning. After an error the blob is good for nothing.
//
//	before: others' │ KUBE-IP-… │ KUBE-PODS-AAAA │ KUBE-PODS-CCCC │ ERROR
//	after:  others' │ KUBE-IP-… │ KUBE-PODS-AAAA (longer) │ KUBE-PODS-BBBB (new) │ KUBE-PODS-CCCC │ ERROR
//	        stays               │ is made                                        │ moves
//
// Where a chain moves, the jumps that lead to it are put right.
func (b *blob) patch(c *change, sets setIndexes) error {
	b.rename(c)
	fresh := map[*segment]*segment{} // what a segment shall be
	for name, rules := range c.set {
		s := &segment{name: name, owned: true}
		if err := b.encode(s, rules, sets); err != nil {
			return err
		}
		fresh[b.byName[name]] = s
	}
	if err := b.checkJumps(fresh); err != nil {
		return err
	}
	moved := b.move(fresh)
	for _, s := range b.segments {
		f := fresh[s]
		if f != nil {
			copy(s.bytes, f.bytes)
			s.jumps = f.jumps
		}
		if f != nil || moved {
			s.lead()
		}
	}
	b.keepAll()
	return nil
}

// rename brings the names, and the segments that have them, up to date.
func (b *blob) rename(c *change) {
	for _, name := range c.gone {
		if _, set := c.set[name]; !set {
			delete(b.byName, name)
		}
	}
	b.segments = slices.DeleteFunc(b.segments, func(s *segment) bool { return b.byName[s.name] != s })
	known := len(b.segments)
	for name := range c.set {
		if b.byName[name] == nil {
			s := &segment{name: name, owned: true}
			b.byName[name], b.segments = s, append(b.segments, s)
		}
	}
	if known < len(b.segments) {
		first := slices.IndexFunc(b.segments, func(s *segment) bool { return s.owned })
		slices.SortFunc(b.segments[first:], func(x, y *segment) int { return strings.Compare(x.name, y.name) })
	}
}

// checkJumps reports a rule that leads to a chain that is gone.
func (b *blob) checkJumps(fresh map[*segment]*segment) error {
	for _, s := range b.segments {
		if fresh[s] != nil {
			continue
		}
		for _, j := range s.jumps {
			if b.byName[j.to.name] != j.to {
				return &refusedError{"a rule of chain " + s.name, fmt.Errorf("no chain %s", j.to.name)}
			}
		}
	}
	return nil
}

// stretch is a part of a blob whose place changes, behind the header.
type stretch struct{ from, to, size int }

// move gives every segment its place, and takes those along that are not fresh. It reports whether any has
// another one than before.
func (b *blob) move(fresh map[*segment]*segment) (moved bool) {
	var list []stretch
	end, number := 0, 0
	for _, s := range b.segments {
		size := len(s.bytes)
		if f := fresh[s]; f != nil {
			size, s.entries = len(f.bytes), f.entries
		} else {
			list = appendStretch(list, stretch{s.offset, end, size})
		}
		moved = moved || s.offset != end || size != len(s.bytes)
		s.offset, s.first = end, number
		end += size
		number += s.entries
	}
	b.reserve(list, end)
	for i, s := range b.segments {
		next := end
		if i+1 < len(b.segments) {
			next = b.segments[i+1].offset
		}
		s.bytes = b.raw[xtables.Header+s.offset : xtables.Header+next : xtables.Header+next]
	}
	tail := entryEncoder{v6: b.id.v6, b: b.raw[:xtables.Header+end]}
	tail.head(xtables.ErrorTarget)
	b.raw = tail.b
	b.Number, b.Size = uint32(number+1), uint32(len(b.raw)-xtables.Header)
	return moved
}

// appendStretch joins what stays together.
func appendStretch(list []stretch, s stretch) []stretch {
	if n := len(list); n > 0 {
		if last := &list[n-1]; last.from+last.size == s.from && last.to+last.size == s.to {
			last.size += s.size
			return list
		}
	}
	return append(list, s)
}

// spare is which part of a blob's size is kept for it to grow.
const spare = 32

// reserve makes room for entries of so many bytes, and moves stretches. Those that move up begin with the last one,
// those that move down with the first: so none is overwritten before it is moved.
func (b *blob) reserve(list []stretch, size int) {
	layout := xtables.LayoutOf(b.id.v6)
	need := xtables.Header + size + layout.Size + chainTarget
	old := b.raw[xtables.Header:cap(b.raw)]
	if need > cap(b.raw) {
		b.raw = make([]byte, need, need+need/spare)
	}
	b.raw = b.raw[:need]
	to := b.raw[xtables.Header:cap(b.raw)]
	for _, s := range slices.Backward(list) {
		if s.to > s.from {
			copy(to[s.to:s.to+s.size], old[s.from:])
		}
	}
	for _, s := range list {
		if s.to < s.from || &to[0] != &old[0] && s.to == s.from {
			copy(to[s.to:s.to+s.size], old[s.from:])
		}
	}
}

// lead writes where the jumps of a segment lead.
func (s *segment) lead() {
	for _, j := range s.jumps {
		binary.NativeEndian.PutUint32(s.bytes[j.at:], uint32(j.to.offset+j.delta))
	}
}

// keepAll notes that all entries of others are as before.
func (b *blob) keepAll() {
	b.kept = map[int]int{}
	for _, s := range b.segments {
		if s.owned {
			return
		}
		for i := range s.entries {
			b.kept[s.first+i] = s.first + i
		}
	}
}
