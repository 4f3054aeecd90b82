package report

import (
	"cmp"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// placed is a contender with its figure.
type placed struct {
	study.Contender
	Estimate
}

// ranking are the proxies of a block at a size, the best first.
func (s *Statistics) ranking(b block, size int) (all []placed) {
	for _, c := range b.who {
		if c.Kind != study.Fairlead && c.Kind != study.Peer {
			continue
		}
		if e, ok := s.estimate(b.at(size, c), b.figure.Name); ok {
			all = append(all, placed{c, e})
		}
	}
	sign := 1
	if b.figure.Better == study.Higher {
		sign = -1
	}
	slices.SortStableFunc(all, func(x, y placed) int {
		if x.Direct != nil && y.Direct != nil {
			return sign * cmp.Compare(x.Direct.Median, y.Direct.Median)
		}
		return sign * cmp.Compare(x.Value, y.Value)
	})
	return all
}

// sentence says of an experiment on a kernel which contender comes first. It goes by the main figure, in the last case,
// at the largest size.
func (s *Statistics) sentence(d study.Description, kernel string) string {
	main, ok := mainFigure(d)
	if !ok {
		return ""
	}
	for _, of := range slices.Backward(s.cases(d.Name, kernel)) {
		b := block{
			place: place{experiment: d.Name, kernel: kernel, of: of}, figure: main, axis: d.Axis,
			sizes: s.sizes(d.Name, kernel, of),
		}
		if b.who = s.who(b); len(b.who) == 0 {
			continue
		}
		all := s.ranking(b, b.largest())
		if len(all) == 0 {
			return "No proxy was measured."
		}
		return b.where(b.largest()) + s.ranked(b, all) + "."
	}
	return "Nothing was measured."
}

// where begins a sentence with the place.
func (b block) where(size int) string {
	var parts []string
	if b.of != "" {
		parts = append(parts, b.of)
	}
	if size > 0 && b.axis != "" {
		parts = append(parts, "at "+counted(size, b.axis))
	}
	parts = append(parts, b.figure.Name)
	text := strings.Join(parts, ", ")
	return strings.ToUpper(text[:1]) + text[1:] + ": "
}

// ranked says which contenders are ahead, alike, and last.
func (s *Statistics) ranked(b block, all []placed) string {
	size := b.largest()
	var ahead, rest []string
	vague := false
	for i, p := range all {
		c, ok := s.compare(b.at(size, p.Contender), b.at(size, all[0].Contender), b.figure.Name)
		if i == 0 || ok && c.Alike() || p.Value == all[0].Value {
			ahead = append(ahead, p.Name)
			continue
		}
		vague = vague || ok && c.Vague()
		rest = append(rest, p.Name+" "+b.figured(p))
	}
	text := listed(ahead)
	switch {
	case len(ahead) > 1:
		text += " alike with " + b.said(all[0])
	case len(rest) == 0:
		text += " with " + b.said(all[0])
	case vague:
		text += " " + b.said(all[0])
	default:
		text += " first with " + b.said(all[0])
	}
	if len(rest) > 0 {
		text += ", then " + listed(rest)
	}
	if vague {
		text += "; bounds are too wide to rank all of them"
	}
	return text
}

// said is a figure, and what it is compared with no proxy.
func (b block) said(p placed) string {
	switch {
	case p.Direct == nil:
		return b.figured(p)
	case p.Direct.Alike():
		return "no difference seen from direct access"
	}
	return b.figured(p) + " times direct access"
}

// figured is the figure alone.
func (b block) figured(p placed) string {
	if p.Direct == nil {
		return quantity(b.figure.Unit, p.Value)
	}
	return times(p.Direct.Median)
}
