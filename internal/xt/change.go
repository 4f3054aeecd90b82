package xt

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// Change is what shall become of a table.
type Change struct {
	Set    map[string]*Rules // the caller's chains that are made, or get other rules
	Gone   []string          // chains that go, whoever made them
	Add    map[string]*Rules // rules that come first in the kernel's own chains
	Remove []Place           // rules that go from those
}

// Place is where a rule is.
type Place struct {
	Chain string
	At    int
}

// MissingChain says that a rule leads to a chain that does not exist.
type MissingChain struct{ Chain, To string }

func (e *MissingChain) Error() string {
	return fmt.Sprintf("a rule of chain %s: no chain %s", e.Chain, e.To)
}

// Apply makes a change in the table itself: a table of tens of megabytes is neither copied nor left to the garbage
// collector for each endpoint that comes or goes. After an error the table is good for nothing.
//
//	before: others' │ KUBE-IP-… │ KUBE-PODS-AAAA │ KUBE-PODS-CCCC │ ERROR
//	after:  others' │ KUBE-IP-… │ KUBE-PODS-AAAA (longer) │ KUBE-PODS-BBBB (new) │ KUBE-PODS-CCCC │ ERROR
//	        stays               │ is made                                        │ moves
//
// Only a table in another order is copied. Jumps to chains that move are corrected.
func (t *Table) Apply(c *Change) error {
	inPlace := t.ordered
	t.arrange(c)
	fresh, err := t.fresh(c)
	if err != nil {
		return err
	}
	if err := t.checkJumps(fresh); err != nil {
		return err
	}
	moved := t.move(fresh, inPlace)
	for _, s := range t.Chains {
		f := fresh[s]
		if f != nil {
			copy(s.bytes, f.bytes)
			s.jumps = f.jumps
		}
		if f != nil || moved {
			s.lead()
		}
	}
	t.setHooks()
	return nil
}

// arrange brings the names, and the chains that have them, up to date.
func (t *Table) arrange(c *Change) {
	for _, name := range c.Gone {
		if s := t.byName[name]; s != nil && c.Set[name] == nil {
			s.gone = true
			delete(t.byName, name)
		}
	}
	t.Chains = slices.DeleteFunc(t.Chains, func(s *Chain) bool { return s.gone })
	known := len(t.Chains)
	for name := range c.Set {
		if t.byName[name] == nil {
			s := &Chain{Name: name, Own: true}
			t.byName[name], t.Chains = s, append(t.Chains, s)
		}
	}
	if t.ordered && known == len(t.Chains) {
		return
	}
	first := slices.IndexFunc(t.Chains, func(s *Chain) bool { return s.Own })
	if !t.ordered {
		own := slices.DeleteFunc(slices.Clone(t.Chains), func(s *Chain) bool { return !s.Own })
		t.Chains = slices.DeleteFunc(t.Chains, func(s *Chain) bool { return s.Own })
		first, t.Chains, t.ordered = len(t.Chains), append(t.Chains, own...), true
	}
	slices.SortFunc(t.Chains[first:], func(x, y *Chain) int { return strings.Compare(x.Name, y.Name) })
}

// fresh is what chains shall be that a change is about.
func (t *Table) fresh(c *Change) (fresh map[*Chain]*Chain, err error) {
	fresh = map[*Chain]*Chain{}
	for name, rules := range c.Set {
		rules.Begin()
		rules.Verdict(Return)
		f := &Chain{bytes: rules.B, entries: rules.n}
		if f.jumps, err = t.resolve(name, rules); err != nil {
			return nil, err
		}
		fresh[t.byName[name]] = f
	}
	if len(c.Add)+len(c.Remove) == 0 {
		return fresh, nil
	}
	for _, s := range t.Chains {
		if s.Base {
			if fresh[s], err = t.edited(s, c); err != nil {
				return nil, err
			}
		}
	}
	return fresh, nil
}

// resolve finds the chains to which rules lead.
func (t *Table) resolve(chain string, rules *Rules) (jumps []jump, err error) {
	for _, p := range rules.jumps {
		to := t.byName[p.to]
		if to == nil {
			return nil, &MissingChain{chain, p.to}
		}
		jumps = append(jumps, jump{at: p.at, to: to, delta: t.headSize(to)})
	}
	return jumps, nil
}

// edited is a chain of the kernel with rules added and removed.
func (t *Table) edited(s *Chain, c *Change) (f *Chain, err error) {
	f = &Chain{}
	if a := c.Add[s.Name]; a != nil {
		f.bytes, f.kept = a.B, slices.Repeat([]int{added}, a.n)
		if f.jumps, err = t.resolve(s.Name, a); err != nil {
			return nil, err
		}
	}
	jumps, number := s.jumps, s.first
	for at, e := range t.entries(s) {
		var own []jump
		if len(jumps) > 0 && jumps[0].at < at+len(e) {
			own, jumps = jumps[:1], jumps[1:]
		}
		if !slices.Contains(c.Remove, Place{s.Name, at}) {
			for _, j := range own {
				f.jumps = append(f.jumps, j.shifted(len(f.bytes)-at))
			}
			f.bytes, f.kept = append(f.bytes, e...), append(f.kept, number)
		}
		number++
	}
	f.entries = len(f.kept)
	return f, nil
}

// shifted is the jump of an entry that has moved within its chain.
func (j jump) shifted(by int) jump {
	j.at += by
	if j.next {
		j.delta += by
	}
	return j
}

// checkJumps reports a rule that leads to a chain that is gone.
func (t *Table) checkJumps(fresh map[*Chain]*Chain) error {
	for _, s := range t.Chains {
		jumps := s.jumps
		if f := fresh[s]; f != nil {
			jumps = f.jumps
		}
		for _, j := range jumps {
			if j.to.gone {
				return &MissingChain{s.Name, j.to.Name}
			}
		}
	}
	return nil
}

// stretch is a part of a table whose place changes, behind the header.
type stretch struct{ from, to, size int }

// move gives every chain its place, and takes those along that are not fresh. It reports whether any has
// another one than before.
func (t *Table) move(fresh map[*Chain]*Chain, inPlace bool) (moved bool) {
	var list []stretch
	end, number := 0, 0
	t.kept = t.kept[:0]
	for _, s := range t.Chains {
		size, f := len(s.bytes), fresh[s]
		if f == nil {
			f = s
			list = appendStretch(list, stretch{s.offset, end, size})
		}
		moved = moved || s.offset != end || size != len(f.bytes)
		t.keep(s, f)
		s.offset, s.first, s.entries = end, number, f.entries
		end += len(f.bytes)
		number += s.entries
		if !s.Own {
			t.Foreign = end
		}
	}
	t.reserve(list, end, inPlace)
	for i, s := range t.Chains {
		next := end
		if i+1 < len(t.Chains) {
			next = t.Chains[i+1].offset
		}
		s.bytes = t.raw[Header+s.offset : Header+next : Header+next]
	}
	tail := Rules{Layout: t.Layout, B: t.raw[:Header+end]}
	tail.head(errorTarget)
	t.raw = tail.B
	t.Number, t.Info.Size = uint32(number+1), uint32(len(t.raw)-Header)
	return moved
}

// keep notes which entries a chain had before, if f takes its place.
func (t *Table) keep(s, f *Chain) {
	switch {
	case f == s:
		for i := range s.entries {
			t.kept = append(t.kept, s.first+i)
		}
	case s.Own:
		t.keepDeeds(s, f)
	default:
		t.kept = append(t.kept, f.kept...)
	}
}

// keepDeeds does that for a chain of the caller. A rule has counted for the one that does the same in its place, even
// if that has another chance to be met.
func (t *Table) keepDeeds(s, f *Chain) {
	had, number := map[uint64][]int{}, s.first
	for e := range t.Entries(s) {
		deed := t.deed(e.Bytes, e.To)
		had[deed] = append(had[deed], number)
		number++
	}
	for e := range t.Entries(f) {
		from, deed := added, t.deed(e.Bytes, e.To)
		if old := had[deed]; len(old) > 0 {
			from, had[deed] = old[0], old[1:]
		}
		t.kept = append(t.kept, from)
	}
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

// spare is which part of a table's size is kept for it to grow.
const spare = 32

// reserve makes room for entries of so many bytes, and moves stretches. In place those that move up begin with the last
// one, those that move down with the first: so none is overwritten before it is moved.
func (t *Table) reserve(list []stretch, size int, inPlace bool) {
	need := Header + size + t.headSize(&Chain{})
	old := t.raw[Header:cap(t.raw)]
	switch {
	case !inPlace:
		t.raw = make([]byte, need)
	case need > cap(t.raw):
		t.raw = make([]byte, need, need+need/spare)
	}
	t.raw = t.raw[:need]
	to := t.raw[Header:]
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

// lead writes where the jumps of a chain lead.
func (c *Chain) lead() {
	for _, j := range c.jumps {
		binary.NativeEndian.PutUint32(c.bytes[j.at:], uint32(j.to.offset+j.delta))
	}
}

// noHook is where the kernel says that a table begins for a hook that it does not have.
const noHook = 1<<32 - 1

func (t *Table) setHooks() {
	for h, name := range HookNames {
		t.Hooks[h], t.Underflows[h] = noHook, noHook
		if t.has(h) {
			s := t.byName[name]
			t.Hooks[h] = uint32(s.offset)
			t.Underflows[h] = uint32(s.offset + len(s.bytes) - t.Layout.size - verdictTarget)
		}
	}
}
