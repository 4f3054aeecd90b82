package conformance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// TestModel holds every case against service and model: the rows, the problems, and what Lookup says
// of each probe. It needs no root.
func TestModel(t *testing.T) {
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	orders := map[string]order{
		"services-first": servicesFirst,
		"slices-first":   slicesFirst,
		"at-once":        allAtOnce,
		"shuffled":       shuffled(t),
	}
	for _, c := range cases {
		for name, order := range orders {
			t.Run(fmt.Sprintf("%s/%s/%s", c.name, c.family, name), func(t *testing.T) {
				t.Parallel()
				runModel(t, c, order)
			})
		}
	}
}

func shuffled(t *testing.T) order {
	seed := sample.Seed(t)
	return func(objects []object) [][]object {
		r := rand.New(rand.NewPCG(seed, 0))
		objects = slices.Clone(objects)
		r.Shuffle(len(objects), func(i, j int) { objects[i], objects[j] = objects[j], objects[i] })
		return slices.Collect(slices.Chunk(objects, 1))
	}
}

func runModel(t *testing.T, c *testCase, order order) {
	w, state, err := newWorld(c)
	if err != nil {
		t.Fatal(err)
	}
	sum := state.Clone()
	empty := state.String()
	follow := func(s *model.State, change model.Change) {
		sum.Apply(change)
		if err := s.Validate(); err != nil {
			t.Error(err)
		}
		if sum.String() != s.String() {
			t.Errorf("the changes add up to\n%s\nbut the State is\n%s", sum, s)
		}
		state = s
	}
	for i, s := range c.steps {
		if s.rows != nil {
			checkProbes(t, c, s, s.rows)
			continue
		}
		for _, objects := range order(s.objects) {
			follow(w.change(objects))
		}
		if len(s.deleted) > 0 {
			follow(w.change(nil, s.deleted...))
		}
		if got := state.String(); got != s.state {
			t.Errorf("step %d: State:\n%s\n%s", i+1, got, difference(s.state, got))
		}
		if i == 0 && len(order(s.objects)) == 1 { // otherwise some were reported earlier
			checkProblems(t, w, s.problems)
		}
		checkProbes(t, c, s, state)
	}
	for _, id := range w.ids() {
		follow(w.change(nil, id))
	}
	if state.String() != empty {
		t.Errorf("after everything was deleted:\n%s", difference(empty, state.String()))
	}
}

func checkProbes(t *testing.T, c *testCase, s step, state *model.State) {
	for _, p := range s.probes {
		if p.again {
			continue
		}
		if err := p.check(state, c); err != nil {
			t.Error(err)
		}
	}
}

// checkProblems compares the beginnings of problems, which name object and field.
func checkProblems(t *testing.T, w *world, want []string) {
	var have []string
	for _, p := range w.problem {
		have = append(have, p.Error())
	}
	slices.Sort(have)
	if !slices.EqualFunc(want, have, func(w, h string) bool { return strings.HasPrefix(h, w) }) {
		t.Errorf("problems:\n%s\nshould begin\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}
