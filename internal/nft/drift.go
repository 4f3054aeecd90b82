package nft

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Drifts says what is wrong if the steps have to be done to make the kernel hold s. Steps that are about the same row,
// or chain, make one difference. Of a table that has to be made as a whole one tells of all.
func (t *Transaction) Drifts(s *model.State) (drifts []dataplane.Drift) {
	type place struct{ class, object string }
	at := map[place]int{}
	for i := range t.Steps {
		step := &t.Steps[i]
		if step.Table.made || step.set != nil && t.isEnd(step) {
			continue
		}
		d := t.drift(i, s)
		p := place{d.Class, d.Object}
		n, known := at[p]
		if !known {
			at[p] = len(drifts)
			drifts = append(drifts, d)
			continue
		}
		drifts[n].Want, drifts[n].Have = cmp.Or(d.Want, drifts[n].Want), cmp.Or(d.Have, drifts[n].Have)
	}
	const rows = "all its rows"
	for _, table := range t.tables() {
		if table.made {
			drifts = append(drifts, dataplane.Drift{Class: "table", Object: table.String(), Want: rows})
		}
	}
	return drifts
}

// tables are those of the steps.
func (t *Transaction) tables() (tables []*Table) {
	for i := range t.Steps {
		if table := t.Steps[i].Table; !slices.Contains(tables, table) {
			tables = append(tables, table)
		}
	}
	return tables
}

// isEnd reports whether a step is about the end of a range, which is told with its beginning.
func (t *Transaction) isEnd(s *Step) bool { return t.element(s).End }

func (t *Transaction) element(s *Step) Element { return decodeElement(t.B[s.from:s.to][4:]) }

func (t *Transaction) drift(i int, s *model.State) dataplane.Drift {
	step := &t.Steps[i]
	about, deletes := step.subject()
	d := dataplane.Drift{Class: "structure"}
	want, have := about.want, about.have
	if step.set == nil {
		d.Object = t.object(step, about)
	} else {
		d.Class = step.set.Name
		d.Object, want = t.row(i, s)
		have = fmt.Sprintf("another element of %s in %s", step.set.Name, step.Table)
	}
	if deletes {
		d.Have = have
	} else {
		d.Want = want
	}
	return d
}

// row names the row of which an element is a part, in the words of the model, and what it should say.
func (t *Transaction) row(i int, s *model.State) (row, want string) {
	step := &t.Steps[i]
	e, set := t.element(step), step.set
	if f := step.Table.Row; f != nil {
		if row, want = f(set, e); row != "" {
			return row, want
		}
	}
	want = "in " + set.Name
	scope, name := model.Any, set.Name
	if rest, ok := strings.CutPrefix(name, "internal-"); ok {
		scope, name = model.Internal, rest
	}
	key, isKey := DecodeKey(e.Key, scope)
	isKey = isKey && slices.Equal(set.Key[:min(3, len(set.Key))], step.Table.Family.FrontendKey())
	switch {
	case isKey && name == "sources":
		first, last := t.rangeOf(i)
		key, _ = DecodeKey(e.Key[:len(e.Key)-len(first)], scope)
		return fmt.Sprintf("frontend %s allow %s", key, interval(first, last)), want
	case isKey && name == "virtual-servers":
		return fmt.Sprintf("record of virtual server %s/%s", key.AddrPort(), key.Protocol), want
	case isKey && name == "health-checks":
		return "health " + key.AddrPort().String(), want
	case isKey:
		if f, ok := s.Frontends[key]; ok {
			want = f.String()
		}
		return "frontend " + key.String(), want
	case strings.HasSuffix(name, "-addresses"), strings.HasSuffix(name, "-ranges"), name == "pods":
		return t.rangeRow(i)
	}
	return fmt.Sprintf("%s of %s: %s", set.Name, step.Table, set.describe(e)), want
}

// rangeOf are the first and the last address of a range, of which the next step is the end, or of a single one.
func (t *Transaction) rangeOf(i int) (first, last []byte) {
	step := &t.Steps[i]
	key, n := t.element(step).Key, int(step.Table.Family.Address.size())
	first = key[len(key)-n:]
	if !step.set.Interval() {
		return first, first
	}
	last = bytes.Repeat([]byte{0xff}, n) // where there is no end
	if i+1 < len(t.Steps) && t.Steps[i+1].set == step.set && t.isEnd(&t.Steps[i+1]) {
		end := before(t.element(&t.Steps[i+1]).Key)
		last = end[len(end)-n:]
	}
	return first, last
}

// rangeRow is row for an address or a range.
func (t *Transaction) rangeRow(i int) (row, want string) {
	set := t.Steps[i].set
	first, last := t.rangeOf(i)
	kind, _, _ := strings.Cut(set.Name, "-")
	switch kind {
	case "pods":
		return "pods " + interval(first, last), "in " + set.Name
	case "local":
		return "address of the node " + interval(first, last), "in " + set.Name
	}
	return "guard " + interval(first, last), kind
}

// interval writes a range as a prefix, if it is one.
func interval(from, to []byte) string {
	first, _ := netip.AddrFromSlice(from)
	last, _ := netip.AddrFromSlice(to)
	for bits := 0; bits <= first.BitLen(); bits++ {
		p := netip.PrefixFrom(first, bits)
		if p.Masked() == p && prefixSpan(p) == (Span{first, last}) {
			return p.String()
		}
	}
	return first.String() + "-" + last.String()
}
