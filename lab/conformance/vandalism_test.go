package conformance

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// A Deed is what a Vandal has done.
type Deed struct {
	What  string   // was done; empty: nothing, as it was not possible
	Names []string // what an audit's report must have one of
}

// A Site is a node with the rules of a plane, and with traffic.
type Site struct {
	*rand.Rand
	State *model.State
	Cases string // the name of what is served
	at    node
}

// Run runs a command on the node.
func (s *Site) Run(ctx context.Context, words ...string) (string, error) {
	var said bytes.Buffer
	c := s.at.(bed).Command(ctx, testbed.Node, words[0], words[1:]...)
	c.Stderr = &said
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, said.String())
	}
	return string(out), err
}

// A Vandal does one thing, as chance has it, to what a plane has made. An error is for deeds that must be possible.
type Vandal func(context.Context, *Site) (Deed, error)

const (
	deeds      = 100
	deedProbes = 10 // after so many, and in the end, packets are sent
	maxTries   = 1000
)

// RunVandalism has a vandal do a hundred things to a plane's rules, while it holds rows of some of the cases. An audit
// finds and names each, Sync repairs it, and packets find their way.
func RunVandalism(t *testing.T, new dataplane.New, spec testbed.Spec, vandal Vandal) {
	runVandalism(t, onBeds(new), spec, vandal)
}

func runVandalism(t *testing.T, on ground, spec testbed.Spec, vandal Vandal) {
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	node, new, err := on(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	seed := sample.Seed(t)
	random := rand.New(rand.NewPCG(seed, 0))
	victims := []string{"cluster-ip/ipv4", "cluster-ip/ipv6", "source-ranges/ipv4", "affinity/ipv4", "guards/ipv4"}
	played := 0
	for _, c := range cases {
		if !slices.Contains(victims, c.name+"/"+string(c.family)) {
			continue
		}
		played++
		v := vandalism{
			kernel: kernel{at: node, new: new, log: logger(t)}, vandal: vandal, testing: t,
			site: &Site{Rand: random, at: node, Cases: c.name},
		}
		if err := v.run(t.Context(), c, deeds/len(victims)); err != nil {
			t.Errorf("seed %d: %s/%s: %v", seed, c.name, c.family, err)
			_ = v.abandon(context.WithoutCancel(t.Context())) // the bed goes
			return
		}
	}
	if played != len(victims) {
		t.Errorf("%d cases of %d", played, len(victims))
	}
}

type vandalism struct {
	kernel
	site    *Site
	vandal  Vandal
	testing *testing.T
}

func (v *vandalism) run(ctx context.Context, c *testCase, times int) error {
	if err := v.at.forget(); err != nil {
		return err
	}
	w, empty, err := newWorld(c)
	if err != nil {
		return err
	}
	empty = empty.Clone()
	if err := v.start(); err != nil {
		return err
	}
	step := &c.steps[0]
	state, _ := w.change(step.objects, step.deleted...)
	if step.rows != nil {
		state = step.rows
	}
	if err := v.sync(ctx, state); err != nil {
		return err
	}
	v.site.State = v.state
	traffic := &traffic{node: v.at, flows: map[string]*flow{}}
	defer traffic.close()
	for i := range times {
		if err := v.once(ctx); err != nil {
			return err
		}
		if i%deedProbes == deedProbes-1 || i == times-1 {
			if err := traffic.run(ctx, step.probes); err != nil {
				return fmt.Errorf("after the repair: %w", err)
			}
		}
	}
	if err := v.sync(ctx, empty); err != nil {
		return err
	}
	return v.stop(ctx)
}

// once has one thing done, found, and repaired.
func (v *vandalism) once(ctx context.Context) error {
	var deed Deed
	var err error
	for try := 0; deed.What == "" && err == nil; try++ {
		if try == maxTries {
			return fmt.Errorf("the vandal finds nothing to do")
		}
		deed, err = v.vandal(ctx, v.site)
	}
	if err != nil {
		return err
	}
	depth := dataplane.Depth(v.site.Rand.IntN(2)) // Full: as after a notification of the kernel
	report, err := v.plane.Audit(ctx, v.state, depth)
	if err != nil {
		return fmt.Errorf("audit after %q: %w", deed.What, err)
	}
	var drifts []string
	for _, d := range report.Drifts {
		drifts = append(drifts, d.String())
	}
	slices.Sort(drifts)
	v.testing.Logf("%s\n\t%s", deed.What, strings.Join(drifts[:min(len(drifts), 5)], "\n\t"))
	text := strings.Join(drifts, "\n")
	if !slices.ContainsFunc(deed.Names, func(name string) bool { return strings.Contains(text, name) }) {
		return fmt.Errorf("after %q the report names none of %q:\n%s", deed.What, deed.Names, text)
	}
	if v.site.Rand.IntN(4) > 0 {
		err = v.plane.Repair(ctx, v.state, report)
	} else { // as a new process does it
		err = v.sync(ctx, v.state)
	}
	if err != nil {
		return fmt.Errorf("repair of %q: %w", deed.What, err)
	}
	if err := v.audit(ctx, dataplane.Full); err != nil {
		return fmt.Errorf("after the repair of %q: %w", deed.What, err)
	}
	return nil
}
