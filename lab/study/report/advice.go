package report

import (
	"cmp"
	"math"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/lab/study"
)

// Advice is which plane suits this node, and at which size another one would.
type Advice struct {
	advise.Choice
	Services int      `json:"services"` // for which the choice was made
	Changes  []Change `json:"changes,omitempty"`
	// AsGood are planes that would come first there, but are ahead of the choice in nothing.
	AsGood []string `json:"asGood,omitempty"`
	// Without says what the choice had to do without.
	Without []string `json:"without,omitempty"`
}

// Change is a size from which on another plane is chosen.
type Change struct {
	Services int    `json:"services"`
	Plane    string `json:"plane"`
}

// Advice is the choice of fairlead recommend, by the same rules, with the figures of this run.
func (s *Statistics) Advice() Advice {
	sizes := s.advisable()
	a := Advice{}
	if len(sizes) == 0 {
		a.Why = "None: neither connect nor lookup was measured on this kernel."
		return a
	}
	a.Services = sizes[len(sizes)-1]
	last := ""
	for _, n := range sizes {
		a.Choice, a.AsGood = s.steady(n, last)
		if a.Plane != last {
			a.Changes = append(a.Changes, Change{n, a.Plane})
		}
		last = a.Plane
	}
	switch {
	case !s.measuredHere("http"):
		a.Without = append(a.Without, "http was not measured on this kernel")
	case !s.requestsTold():
		a.Without = append(a.Without, "requests on open connections (http), as their bounds are too wide")
	}
	if !s.measuredHere("update") {
		a.Without = append(a.Without, "update was not measured on this kernel")
	}
	return a
}

func (s *Statistics) measuredHere(experiment string) bool {
	return slices.Contains(s.kernels(experiment), study.This)
}

// steady is the choice for so many Services: the plane that was chosen for fewer, unless the one that would be chosen
// now is ahead of it in something. Those that are not are asGood.
func (s *Statistics) steady(services int, last string) (c advise.Choice, asGood []string) {
	findings := s.findings(services)
	for {
		c = s.choice(services, findings)
		if last == "" || c.Plane == last || c.Plane == "" || s.ahead(c.Plane, last, services) {
			return c, asGood
		}
		asGood = append(asGood, c.Plane)
		findings = slices.DeleteFunc(findings, func(f advise.Finding) bool { return f.Plane == c.Plane })
	}
}

// ahead reports whether a plane is better than another one, by more than chance, in connections, requests or changes.
// Of each of these less is better.
func (s *Statistics) ahead(plane, other string, services int) bool {
	a, b := judged{s, study.This, study.Fairlead}, []string{"lookup", "connect", "http", "update"}
	return slices.ContainsFunc(b, func(experiment string) bool {
		for _, of := range slices.Backward(s.cases(experiment, study.This)) {
			x, err := a.main(experiment, plane, of)
			y, failed := a.main(experiment, other, of)
			if err != nil || failed != nil {
				continue
			}
			size := slices.MinFunc(x.sizes(), func(n, m int) int { return cmp.Compare(apart(n, services), apart(m, services)) })
			r, ok := s.compare(x.at(size), y.at(size), x.figure.Name)
			return ok && r.Less()
		}
		return false
	})
}

// choice is for so many Services.
func (s *Statistics) choice(services int, findings []advise.Finding) advise.Choice {
	c := advise.Case{Rows: advise.Rows{Services: services}, Findings: findings}
	if !s.requestsTold() {
		c.Traffic = advise.Short
	}
	return advise.Choose(c)
}

// requestsTold reports whether requests on open connections were measured, and well enough to choose by them.
func (s *Statistics) requestsTold() bool {
	told, vague := 0, 0
	for _, c := range s.Contenders {
		if c.Kind != study.Fairlead {
			continue
		}
		if r := s.near(c, "http", 1); r != nil {
			told, vague = told+one(!r.Vague()), vague+one(r.Vague())
		}
	}
	return told > vague
}

// advisable are the sizes for which connections were measured on this kernel.
func (s *Statistics) advisable() []int {
	for _, experiment := range []string{"lookup", "connect"} {
		for _, of := range slices.Backward(s.cases(experiment, study.This)) {
			if all := s.sizes(experiment, study.This, of); len(all) > 0 {
				return all
			}
		}
	}
	return nil
}

// findings are what was measured of Fairlead's planes on this kernel, with the size that is nearest.
func (s *Statistics) findings(services int) (all []advise.Finding) {
	for _, c := range s.Contenders {
		known := slices.ContainsFunc(all, func(f advise.Finding) bool { return f.Plane == c.Plane })
		if c.Kind != study.Fairlead || len(c.Args) > 0 || known {
			continue
		}
		all = append(all, s.finding(c, services))
	}
	return all
}

func (s *Statistics) finding(c study.Contender, services int) advise.Finding {
	f := advise.Finding{Plane: c.Plane}
	connection := s.near(c, "lookup", services) // its bounds are the narrowest
	if connection == nil {
		connection = s.near(c, "connect", services)
	}
	if connection == nil {
		f.Missing = "it was not measured on this kernel"
		return f
	}
	request := s.near(c, "http", services)
	if request == nil {
		request = connection
	}
	change := s.measuredNear(c, "update", services, func(Estimate) bool { return true })
	f.Figures = &advise.Figures{
		Services: services, Connection: advise.Ratio(connection.Ratio), Request: advise.Ratio(request.Ratio),
		Change: time.Duration(change.Value * float64(time.Second)), Rounds: connection.Rounds,
	}
	return f
}

// near is the comparison with direct access of an experiment's main figure, at the size that is nearest in proportion.
func (s *Statistics) near(c study.Contender, experiment string, services int) *Comparison {
	d, _ := s.Experiment(experiment)
	f, _ := mainFigure(d)
	e := s.measuredNear(c, experiment, services, func(e Estimate) bool { return e.Direct != nil })
	if e.Direct == nil {
		return nil
	}
	r := curve{figure: f}.worse(*e.Direct)
	return &r
}

// measuredNear is the useful estimate at the nearest size.
func (s *Statistics) measuredNear(
	c study.Contender, experiment string, services int, useful func(Estimate) bool,
) (best Estimate) {
	d, _ := s.Experiment(experiment)
	f, _ := mainFigure(d)
	distance := math.Inf(1)
	for _, of := range s.cases(experiment, study.This) {
		for _, n := range s.sizes(experiment, study.This, of) {
			e, ok := s.estimate(turns{place{experiment, study.This, of, n}, c.Name}, f.Name)
			if away := apart(n, services); ok && useful(e) && away <= distance {
				best, distance = e, away
			}
		}
	}
	return best
}

// apart is how far two sizes are, in proportion.
func apart(a, b int) float64 { return math.Abs(math.Log(float64(max(a, 1)) / float64(max(b, 1)))) }
