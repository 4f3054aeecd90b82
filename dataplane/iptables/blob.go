package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/xtables"
)

// Sizes of an entry's target.
const (
	verdictTarget = xtables.ExtensionHeader + 8
	chainTarget   = xtables.ExtensionHeader + 32
)

// blob is a table: a segment for each chain, those of others first. Jumps are offsets into it.
type blob struct {
	xtables.Info // as the kernel answers
	id           tableID
	raw          []byte // what is sent to the kernel: a header, then the entries
	foreign      int    // bytes up to the end of the last entry of others
	ordered      bool   // others come first, then our chains by their names
	segments     []*segment
	byName       map[string]*segment
	kept         map[int]int // entries whose counters are those of entries of the blob before
}

// segment is a chain: for the kernel's own chains the rules and, last, the policy; for others a head that
// has the chain's name, the rules and a return.
type segment struct {
	name    string
	base    bool
	owned   bool
	offset  int    // behind the header of the blob
	bytes   []byte // in the blob
	entries int
	first   int // number of the first entry
	jumps   []jumpAt
}

// jumpAt is a verdict of a segment that is an offset.
type jumpAt struct {
	at    int // in the segment
	to    *segment
	delta int // behind the segment's beginning
}

// headSize is that of a chain's first entry.
func (s *segment) headSize(layout xtables.Layout) int {
	if s.base {
		return 0
	}
	return layout.Size + chainTarget
}

func parseBlob(id tableID, info xtables.Info, raw []byte) (*blob, error) {
	b := &blob{id: id, Info: info, raw: raw, byName: map[string]*segment{}}
	entries := b.raw[xtables.Header:]
	layout := xtables.LayoutOf(id.v6)
	number := 0
	var current *segment
	for at := 0; at < len(entries); {
		e, err := layout.Entry(entries[at:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d: %w", at, err)
		}
		if next := b.begins(at, e, layout); next != nil {
			current = next
			current.offset, current.first = at, number
			b.segments = append(b.segments, current)
			b.byName[current.name] = current
		}
		if current == nil {
			return nil, fmt.Errorf("entry at %d belongs to no chain", at)
		}
		current.entries++
		number++
		at += len(e)
		current.bytes = entries[current.offset:at]
	}
	if err := b.checkChains(); err != nil {
		return nil, err
	}
	b.findJumps(layout)
	b.findOrder()
	return b, nil
}

// checkChains takes the last entry away, the head of a chain ERROR that has no rules, and refuses a table that lacks
// something.
func (b *blob) checkChains() error {
	if len(b.segments) == 0 {
		return errors.New("there are no entries")
	}
	last := b.segments[len(b.segments)-1]
	b.segments = b.segments[:len(b.segments)-1]
	delete(b.byName, last.name)
	for _, s := range b.segments {
		if s.owned && s.entries < 2 {
			return fmt.Errorf("chain %s does not end with a return", s.name)
		}
	}
	for h, name := range xtables.HookNames {
		if s := b.byName[name]; b.ValidHooks&(1<<h) != 0 && (s == nil || !s.base) {
			return fmt.Errorf("no entry is where chain %s begins, at %d", name, b.Hooks[h])
		}
	}
	return nil
}

// findOrder finds where the entries of others end, and whether the table is laid out as we do it: others first,
// then our chains by their names. Whoever rewrites it by iptables sorts all chains by their names.
func (b *blob) findOrder() {
	b.ordered = true
	last := "" // of our chains
	for _, s := range b.segments {
		if s.owned {
			b.ordered = b.ordered && last < s.name
			last = s.name
			continue
		}
		b.ordered = b.ordered && last == ""
		b.foreign = s.offset + len(s.bytes)
	}
}

// begins is the chain that begins with an entry, or nil.
func (b *blob) begins(at int, e []byte, layout xtables.Layout) *segment {
	for h, name := range xtables.HookNames {
		if b.ValidHooks&(1<<h) != 0 && int(b.Hooks[h]) == at {
			return &segment{name: name, base: true}
		}
	}
	if name, data := layout.TargetName(e); name == xtables.ErrorTarget {
		chain := unix.ByteSliceToString(data)
		return &segment{name: chain, owned: owned(chain)}
	}
	return nil
}

// eachEntry calls f with each entry of a segment and its place.
func (s *segment) eachEntry(layout xtables.Layout, f func(at int, e []byte)) {
	for at := 0; at < len(s.bytes); {
		size := layout.Next(s.bytes[at:])
		f(at, s.bytes[at:at+size])
		at += size
	}
}

func (b *blob) findJumps(layout xtables.Layout) {
	for _, s := range b.segments {
		s.eachEntry(layout, func(at int, e []byte) {
			offset, ok := layout.Verdict(e)
			if !ok || offset < 0 {
				return
			}
			i, found := slices.BinarySearchFunc(b.segments, offset, func(s *segment, o int) int { return s.offset - o })
			if !found {
				i--
			}
			to := b.segments[i]
			s.jumps = append(s.jumps, jumpAt{at + layout.Target(e) + xtables.ExtensionHeader, to, offset - to.offset})
		})
	}
}

// theNext is where a rule without a target leads.
const theNext = "."

// leadsTo is the chain to whose first rule an entry jumps; empty if it does not.
func (s *segment) leadsTo(at int, e []byte, layout xtables.Layout) string {
	verdict := at + layout.Target(e) + xtables.ExtensionHeader
	i, found := slices.BinarySearchFunc(s.jumps, verdict, func(j jumpAt, at int) int { return j.at - at })
	switch {
	case !found:
		return ""
	case s.jumps[i].to == s || s.jumps[i].to.base:
		return theNext
	}
	return s.jumps[i].to.name
}

func (b *blob) content() *content {
	c := &content{chains: map[string][]uint64{}}
	layout := xtables.LayoutOf(b.id.v6)
	for _, s := range b.segments {
		var marks []uint64
		s.eachEntry(layout, func(at int, e []byte) {
			to := s.leadsTo(at, e, layout)
			switch {
			case s.owned:
				marks = append(marks, hashEntry(layout, e, to))
			case owned(to):
				c.base = append(c.base, foundRule{
					chain: s.name, id: uint64(at), mark: hashEntry(layout, e, to), to: to, base: s.base,
				})
			}
		})
		if s.owned {
			c.chains[s.name] = marks[1 : len(marks)-1] // not the head, and not the return
		}
	}
	return c
}

// changed is the blob after a change.
func (b *blob) changed(c *change, sets setIndexes) (*blob, error) {
	next := &blob{id: b.id, ordered: true, byName: map[string]*segment{}}
	next.ValidHooks = b.ValidHooks
	gone := map[string]bool{}
	for _, name := range c.gone {
		gone[name] = true
	}
	renewed := map[*segment]*segment{} // what takes the place of a segment
	var mine []*segment
	for _, s := range b.segments {
		_, set := c.set[s.name]
		switch {
		case s.owned && (gone[s.name] || set):
			renewed[s] = nil
			continue
		case s.base:
			n := b.baseChanged(s, c, sets)
			renewed[s] = n
			next.segments = append(next.segments, n)
		case s.owned:
			mine = append(mine, s.copy())
			renewed[s] = mine[len(mine)-1]
		default:
			next.segments = append(next.segments, s.copy())
			renewed[s] = next.segments[len(next.segments)-1]
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.set)) {
		s := &segment{name: name, owned: true}
		mine = append(mine, s)
		if old := b.byName[name]; old != nil {
			renewed[old] = s
		}
	}
	slices.SortFunc(mine, func(x, y *segment) int { return bytes.Compare([]byte(x.name), []byte(y.name)) })
	next.segments = append(next.segments, mine...)
	for _, s := range next.segments {
		next.byName[s.name] = s
	}
	if err := next.resolve(c, renewed, sets); err != nil {
		return nil, err
	}
	next.assemble(b, renewed)
	return next, nil
}

func (s *segment) copy() *segment {
	n := *s
	return &n
}

// encoded is a segment under construction for the rules of a chain.
func (b *blob) encode(s *segment, rules []rule, sets setIndexes) error {
	e := entryEncoder{v6: b.id.v6, sets: sets}
	if !s.base {
		e.head(s.name)
	}
	layout := xtables.LayoutOf(b.id.v6)
	s.entries = len(rules) + 2
	for i := range rules {
		start := len(e.b)
		e.rule(&rules[i])
		name := rules[i].do.chainName()
		if name == "" {
			continue
		}
		to := b.byName[name]
		if to == nil {
			return &refusedError{fmt.Sprintf("-A %s %s", s.name, &rules[i]), fmt.Errorf("no chain %s", name)}
		}
		at := start + layout.Target(e.b[start:]) + xtables.ExtensionHeader
		s.jumps = append(s.jumps, jumpAt{at, to, to.headSize(layout)})
	}
	e.verdict(xtables.Return)
	s.bytes = e.b
	return nil
}

// baseChanged is a chain of the kernel with rules of ours added and removed. Its jumps are still those of b.
func (b *blob) baseChanged(s *segment, c *change, sets setIndexes) *segment {
	layout := xtables.LayoutOf(b.id.v6)
	n := &segment{name: s.name, base: true}
	e := entryEncoder{v6: b.id.v6, sets: sets}
	for i := len(c.add) - 1; i >= 0; i-- {
		if a := &c.add[i]; a.chain == s.name {
			start := len(e.b)
			e.rule(&a.rule)
			at := start + layout.Target(e.b[start:]) + xtables.ExtensionHeader
			n.jumps = append(n.jumps, jumpAt{at, &segment{name: a.do.name}, layout.Size + chainTarget})
			n.entries++
		}
	}
	s.eachEntry(layout, func(at int, entry []byte) {
		if slices.ContainsFunc(c.remove, func(f foundRule) bool { return f.chain == s.name && int(f.id) == at }) {
			return
		}
		verdict := at + layout.Target(entry) + xtables.ExtensionHeader
		if i, ok := slices.BinarySearchFunc(s.jumps, verdict, func(j jumpAt, at int) int { return j.at - at }); ok {
			j := s.jumps[i]
			j.at += len(e.b) - at
			if j.to == s { // a rule without a target leads to the next one
				j.delta += len(e.b) - at
			}
			n.jumps = append(n.jumps, j)
		}
		e.b = append(e.b, entry...)
		n.entries++
	})
	n.bytes = e.b
	return n
}

// resolve makes the jumps of all segments lead to segments of b.
func (b *blob) resolve(c *change, renewed map[*segment]*segment, sets setIndexes) error {
	for _, s := range b.segments {
		if rules, set := c.set[s.name]; set && s.owned {
			if err := b.encode(s, rules, sets); err != nil {
				return err
			}
			continue
		}
		jumps := make([]jumpAt, len(s.jumps))
		for i, j := range s.jumps {
			to := b.byName[j.to.name]
			if n, ok := renewed[j.to]; ok {
				to = n
			}
			if to == nil {
				return &refusedError{"a rule of chain " + s.name, fmt.Errorf("no chain %s", j.to.name)}
			}
			j.to = to
			jumps[i] = j
		}
		s.jumps = jumps
	}
	return nil
}

// assemble puts the segments together.
func (b *blob) assemble(before *blob, renewed map[*segment]*segment) {
	layout := xtables.LayoutOf(b.id.v6)
	size := xtables.Header + layout.Size + chainTarget
	offset, number := 0, 0
	for _, s := range b.segments {
		s.offset, s.first = offset, number
		offset += len(s.bytes)
		number += s.entries
		size += len(s.bytes)
		if !s.owned {
			b.foreign = offset
		}
	}
	b.raw = make([]byte, xtables.Header, size)
	for _, s := range b.segments {
		at := len(b.raw)
		b.raw = append(b.raw, s.bytes...)
		s.bytes = b.raw[at:len(b.raw):len(b.raw)]
		for _, j := range s.jumps {
			binary.NativeEndian.PutUint32(s.bytes[j.at:], uint32(j.to.offset+j.delta))
		}
	}
	tail := entryEncoder{v6: b.id.v6, b: b.raw}
	tail.head(xtables.ErrorTarget)
	b.raw = tail.b
	b.Number, b.Size = uint32(number+1), uint32(len(b.raw)-xtables.Header)
	for h, name := range xtables.HookNames {
		b.Hooks[h], b.Underflows[h] = noHook, noHook
		if b.ValidHooks&(1<<h) != 0 {
			s := b.byName[name]
			b.Hooks[h] = uint32(s.offset)
			b.Underflows[h] = uint32(s.offset + len(s.bytes) - layout.Size - verdictTarget)
		}
	}
	b.keepCounters(before, renewed)
}

// keepCounters notes which entries of others were there before. Added rules come first in a chain.
func (b *blob) keepCounters(before *blob, renewed map[*segment]*segment) {
	b.kept = map[int]int{}
	layout := xtables.LayoutOf(b.id.v6)
	for _, s := range before.segments {
		n := renewed[s]
		if n == nil || s.owned {
			continue
		}
		old := map[uint64][]int{} // by content, in order
		i := s.first
		s.eachEntry(layout, func(at int, e []byte) {
			h := hashEntry(layout, e, s.leadsTo(at, e, layout))
			old[h] = append(old[h], i)
			i++
		})
		i = n.first
		n.eachEntry(layout, func(at int, e []byte) {
			h := hashEntry(layout, e, n.leadsTo(at, e, layout))
			if from := old[h]; len(from) > 0 {
				b.kept[i], old[h] = from[0], from[1:]
			}
			i++
		})
	}
}

// noHook is where the kernel says that a table begins for a hook that it does not have.
const noHook = 1<<32 - 1

// sameUpTo reports whether the entries up to an offset are those of a table that was read.
func (b *blob) sameUpTo(end int, read []byte) bool {
	layout := xtables.LayoutOf(b.id.v6)
	mine := b.raw[xtables.Header:]
	for at := 0; at < end; {
		size := layout.Next(mine[at:])
		x, y := mine[at:at+size], read[at:at+size]
		if !bytes.Equal(x[:layout.Condition], y[:layout.Condition]) ||
			!bytes.Equal(x[layout.Offsets:layout.Offsets+4], y[layout.Offsets:layout.Offsets+4]) ||
			!bytes.Equal(x[layout.Size:], y[layout.Size:]) {
			return false
		}
		at += size
	}
	return true
}

// entryEncoder appends entries.
type entryEncoder struct {
	v6   bool
	sets setIndexes
	b    []byte
}

// begin appends an entry without matches and target.
func (e *entryEncoder) begin() (start int) {
	start = len(e.b)
	e.b = append(e.b, make([]byte, xtables.LayoutOf(e.v6).Size)...)
	return start
}

func (e *entryEncoder) extension(x extension) {
	start := len(e.b)
	e.b = append(e.b, make([]byte, xtables.ExtensionHeader)...)
	binary.NativeEndian.PutUint16(e.b[start:], uint16(xtables.ExtensionHeader+len(x.info)))
	copy(e.b[start+xtables.NameOffset:], x.name)
	e.b[start+xtables.RevisionOffset] = x.revision
	e.b = append(e.b, x.info...)
}

// finish appends the target.
func (e *entryEncoder) finish(start int, target extension) {
	layout := xtables.LayoutOf(e.v6)
	binary.NativeEndian.PutUint16(e.b[start+layout.Offsets:], uint16(len(e.b)-start))
	e.extension(target)
	binary.NativeEndian.PutUint16(e.b[start+layout.Offsets+2:], uint16(len(e.b)-start))
}

// head begins a chain.
func (e *entryEncoder) head(chain string) {
	start := e.begin()
	info := make([]byte, chainTarget-xtables.ExtensionHeader)
	copy(info, chain)
	e.finish(start, extension{name: xtables.ErrorTarget, info: info})
}

func verdictInfo(v int) []byte {
	info := make([]byte, verdictTarget-xtables.ExtensionHeader)
	binary.NativeEndian.PutUint32(info, uint32(int32(v)))
	return info
}

// verdict appends an entry for all packets.
func (e *entryEncoder) verdict(v int) {
	start := e.begin()
	e.finish(start, extension{info: verdictInfo(v)})
}

// rule appends a rule. The verdict of a jump is filled in later.
func (e *entryEncoder) rule(r *rule) {
	start := e.begin()
	e.match(e.b[start:], r)
	for _, m := range r.matches(e.sets) {
		e.extension(m)
	}
	if r.comment != "" {
		e.extension(commentMatch(r.comment))
	}
	if x, ok := r.do.extension(e.v6, e.sets); ok {
		e.finish(start, x)
		return
	}
	v := 0
	switch r.do.verb {
	case accept:
		v = xtables.Accept
	case drop:
		v = xtables.Drop
	case back:
		v = xtables.Return
	}
	e.finish(start, extension{info: verdictInfo(v)})
}

// match fills in struct ipt_ip or ip6t_ip6.
func (e *entryEncoder) match(ip []byte, r *rule) {
	const inverseIn, inverseSource = 1, 8
	size, protocol, flags, invert := 4, 80, 82, 83
	goToFlag := byte(2)
	if e.v6 {
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
	e.putInterface(ip[4*size:], r.in)
	if r.notIn {
		ip[invert] |= inverseIn
	}
	if r.notSrc {
		ip[invert] |= inverseSource
	}
	binary.NativeEndian.PutUint16(ip[protocol:], uint16(r.protocol))
	if e.v6 && r.protocol != 0 {
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
func (e *entryEncoder) putInterface(b []byte, name string) {
	if name == "" {
		return
	}
	wild := false
	if name[len(name)-1] == '*' {
		name, wild = name[:len(name)-1], true
	}
	copy(b[:interfaceName], name)
	n := len(name)
	if !wild {
		n++
	}
	for i := range n {
		b[2*interfaceName+i] = 0xff
	}
}
