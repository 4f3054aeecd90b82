package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// table is one of any of the outputs.
type table struct {
	Title string
	Note  string // what is in it
	Head  []string
	Rows  [][]string
}

// section is an experiment.
type section struct {
	study.Description
	Sentences []string // of each kernel
	Verdicts  []Verdict
	Exhibits  []exhibit
	Failures  []string
}

// block is a figure of a case.
type block struct {
	place  // size 0
	figure study.Figure
	axis   string
	sizes  []int
	who    []study.Contender // that have it
}

// sections are all that the Result has rows of, in its order.
func (s *Statistics) sections() (all []section) {
	verdicts := s.verdictsBy()
	for _, d := range s.Experiments {
		kernels := s.kernels(d.Name)
		if len(kernels) == 0 {
			continue
		}
		c := section{Description: d, Verdicts: verdicts[d.Name], Exhibits: s.exhibits(d)}
		for _, k := range kernels {
			of := ""
			if len(s.Kernels) > 1 {
				of = upper(k) + ": "
			}
			c.Sentences = append(c.Sentences, of+s.sentence(d, k))
			c.Failures = append(c.Failures, s.failures(d.Name, k, of)...)
		}
		all = append(all, c)
	}
	return all
}

// verdictsBy are the verdicts that say something, by the experiment that they are about.
func (s *Statistics) verdictsBy() map[string][]Verdict {
	all := map[string][]Verdict{}
	for _, v := range s.Verdicts() {
		i := slices.IndexFunc(conclusions(), func(c conclusion) bool { return c.says == v.Conclusion })
		if of := conclusions()[i].needs[0]; !strings.HasPrefix(v.Says, itNeeds) {
			all[of] = append(all[of], v)
		}
	}
	return all
}

// failures says of each contender how many turns failed, and why.
func (s *Statistics) failures(experiment, kernel, of string) (all []string) {
	in := func(p place) bool { return p.experiment == experiment && p.kernel == kernel }
	for _, who := range s.contendersAt(in) {
		if failed, turns, why := s.Failures(experiment, kernel, who.Name); failed > 0 {
			all = append(all, fmt.Sprintf("%s%s: %d of %s failed: %s", of, who.Name, failed, counted(turns, "turns"), cut(why)))
		}
	}
	return all
}

// kernel is the one of a name.
func (s *Statistics) kernel(name string) study.Kernel {
	i := slices.IndexFunc(s.Kernels, func(k study.Kernel) bool { return k.Name == name })
	if i < 0 {
		return study.Kernel{Name: name}
	}
	return s.Kernels[i]
}

// cut keeps the beginning of what programs have said at length; the Result has all of it.
func cut(text string) string {
	const most = 240
	text = strings.Join(strings.Fields(text), " ")
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// who are the contenders that have a block's figure at some size.
func (s *Statistics) who(b block) (all []study.Contender) {
	in := func(p place) bool { p.size = 0; return p == b.place }
	for _, c := range s.contendersAt(in) {
		if slices.ContainsFunc(b.sizes, func(n int) bool { return len(s.values(b.at(n, c), b.figure.Name)) > 0 }) {
			all = append(all, c)
		}
	}
	return all
}

// largest is the largest size.
func (b block) largest() int { return b.sizes[len(b.sizes)-1] }

// String is the exponent with its bounds.
func (g Growth) String() string {
	if math.IsInf(g.High, 1) { // there was one round
		return "n^" + signed(g.Exponent) + " (?)"
	}
	return "n^" + signed(g.Exponent) + " (" + signed(g.Low) + " to " + signed(g.High) + ")"
}
