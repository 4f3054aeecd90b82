package report

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// Answer is what becomes of a published conclusion here.
type Answer string

// The answers.
const (
	Holds   Answer = "holds"
	SoFar   Answer = "holds as far as was measured"
	Fails   Answer = "does not hold"
	Differs Answer = "differs"
	Unknown Answer = "undecided"
)

// sign is one that does without colour.
func (a Answer) sign() string {
	return map[Answer]string{Holds: "✓", SoFar: "~", Fails: "✗", Differs: "≠", Unknown: "?"}[a]
}

// Verdict is the answer for a kernel, and for whose planes.
type Verdict struct {
	Conclusion string `json:"conclusion"`
	Published  string `json:"published"` // by whom
	Answer     Answer `json:"answer"`
	Says       string `json:"says"` // with this run's figures; of Unknown: why
	// Why is the cause of what is seen against it, where that is known.
	Why    string `json:"why,omitempty"`
	Of     string `json:"of,omitempty"`
	Kernel string `json:"kernel,omitempty"`

	open []question // of Unknown
}

// judged says whose planes were, and on which kernel if it is not this one.
func (v Verdict) judged() string {
	if v.Kernel == "" || v.Kernel == study.This {
		return v.Of
	}
	return v.Of + ", " + v.Kernel
}

// judged is whose planes are judged, and where.
type judged struct {
	*Statistics
	kernel string
	kind   study.Kind
}

// Verdicts are those of all published conclusions: of each for whom it can be told, or why it cannot.
func (s *Statistics) Verdicts() (all []Verdict) {
	var unknown []Verdict
	for _, c := range conclusions() {
		of := s.verdicts(c)
		if len(of) == 1 && of[0].Of == "" {
			unknown = append(unknown, of...)
			continue
		}
		all = append(all, of...)
	}
	return append(all, unknown...)
}

// verdicts are of one conclusion.
func (s *Statistics) verdicts(c conclusion) []Verdict {
	unknown := Verdict{Conclusion: c.says, Published: c.source, Answer: Unknown}
	if missing := s.unmeasured(c.needs); len(missing) == len(c.needs) {
		unknown.Says = itNeeds + strings.Join(missing, " or ") + "."
		return []Verdict{unknown}
	}
	var told []Verdict
	var reasons []string
	for _, of := range s.benches(c.needs) {
		if slices.ContainsFunc(told, func(v Verdict) bool { return v.Of == of.whose() }) {
			continue // this kernel has told it already
		}
		v, err := c.judged(of)
		if err == nil {
			told = append(told, v)
		} else if !slices.Contains(reasons, err.Error()) {
			reasons = append(reasons, err.Error())
		}
	}
	if len(told) > 0 {
		return told
	}
	unknown.Says = strings.Join(reasons, "; ") + "."
	return []Verdict{unknown}
}

// itNeeds is how reasons begin.
const itNeeds = "it needs "

// unmeasured are the experiments that have no figures.
func (s *Statistics) unmeasured(names []string) (missing []string) {
	for _, name := range names {
		if !slices.ContainsFunc(s.Rows, func(r study.Row) bool { return r.Experiment == name && r.Failed == "" }) {
			missing = append(missing, name)
		}
	}
	return missing
}

// benches are the kernels of some experiments, with kube-proxy's planes and Fairlead's, this kernel first.
func (s *Statistics) benches(needs []string) (all []judged) {
	var kernels []string
	for _, name := range needs {
		for _, k := range s.kernels(name) {
			if !slices.Contains(kernels, k) {
				kernels = append(kernels, k)
			}
		}
	}
	for _, kind := range []study.Kind{study.Peer, study.Fairlead} {
		for _, k := range kernels {
			all = append(all, judged{s, k, kind})
		}
	}
	return all
}

func (b judged) whose() string {
	if b.kind == study.Peer {
		return "kube-proxy"
	}
	return "Fairlead"
}

// of is the contender with a plane, the plainest of several.
func (b judged) of(experiment, plane string) (study.Contender, bool) {
	in := func(p place) bool { return p.experiment == experiment && p.kernel == b.kernel }
	var best study.Contender
	for _, c := range b.contendersAt(in) {
		if c.Kind == b.kind && family(c.Plane) == plane && (best.Name == "" || len(c.Name) < len(best.Name)) {
			best = c
		}
	}
	return best, best.Name != ""
}

// curve is a figure of a contender in a case, by size.
type curve struct {
	judged
	place  // size 0
	figure study.Figure
	axis   string
	who    study.Contender
}

// curves are those of some planes, see main.
func (b judged) curves(experiment, of string, planes ...string) (all []curve, err error) {
	for _, plane := range planes {
		c, err := b.main(experiment, plane, of)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// main is the curve of an experiment's main figure, in the first case that has these words.
func (b judged) main(experiment, plane, of string) (c curve, err error) {
	d, ok := b.Experiment(experiment)
	f, measured := mainFigure(d)
	if !ok || !measured {
		return c, fmt.Errorf("%s was not measured", experiment)
	}
	who, ok := b.of(d.Name, plane)
	if !ok {
		return c, fmt.Errorf("%s of %s was not measured for %s", plane, b.whose(), d.Name)
	}
	cases := b.cases(d.Name, b.kernel)
	i := slices.IndexFunc(cases, func(name string) bool { return of == "" || has(name, of) })
	if i < 0 {
		return c, fmt.Errorf("%s has no case %q", d.Name, of)
	}
	c = curve{b, place{experiment: d.Name, kernel: b.kernel, of: cases[i]}, f, d.Axis, who}
	if len(c.sizes()) == 0 {
		return c, fmt.Errorf("no turn of %s succeeded for %s", who.Name, d.Name)
	}
	return c, nil
}

func has(text, word string) bool {
	return word != "" && strings.Contains(strings.ToLower(text), strings.ToLower(word))
}

// sizes are those with figures.
func (c curve) sizes() (all []int) {
	for _, n := range c.judged.sizes(c.experiment, c.place.kernel, c.place.of) {
		if len(c.values(c.at(n), c.figure.Name)) > 0 {
			all = append(all, n)
		}
	}
	return all
}

// largest is the largest of them.
func (c curve) largest() int { return slices.Max(c.sizes()) }

// at are the turns at a size.
func (c curve) at(size int) turns { return c.place.at(size, c.who) }

// value is the median at a size, with its unit.
func (c curve) value(size int) string {
	return quantity(c.figure.Unit, series(c.values(c.at(size), c.figure.Name)).Median())
}

// worse turns a ratio of figures around where more is better: above 1 is the worse one.
func (c curve) worse(r Comparison) Comparison {
	if c.figure.Better == study.Higher {
		r = r.inverse()
	}
	return r.asPublished()
}

// against is how many times as bad a curve is as another one, at each size that both have.
func (c curve) against(other curve) (all []sizedRatio) {
	for _, n := range c.sizes() {
		if r, ok := c.compare(c.at(n), other.at(n), c.figure.Name); ok {
			all = append(all, sizedRatio{n, c.worse(r)})
		}
	}
	return all
}

// sizedRatio is a comparison at a size.
type sizedRatio struct {
	size int
	Comparison
}

// named is what the curve shows.
func (c curve) named() string { return c.experiment + ", " + c.figure.Name }

// beside says how two curves compare.
func (c curve) beside(other curve, all []sizedRatio) string {
	return fmt.Sprintf("beside %s, %s takes %s times as long (%s)", other.who.Name, c.who.Name, ends(all, c.axis),
		c.named())
}

// ends says the first and the last of a row of ratios, and one between.
func ends(all []sizedRatio, axis string) string {
	var parts []string
	for i, r := range all {
		if i == 0 || i == len(all)-1 || i == (len(all)-1)/2 {
			parts = append(parts, r.String()+" at "+counted(r.size, axis))
		}
	}
	return listed(parts)
}
