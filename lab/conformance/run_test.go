package conformance

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// workers is how many clusters a test uses at the same time. Mostly it waits: for packets that must
// not come, and for the kernel to free what was removed.
const workers = 4

// Run plays every case on a data plane, with real packets, in one of the orders of events that there are: the seed of the
// run draws it. It needs root and nft. Cases of protocols
// that this kernel lacks are played in the test kernel, see vm_test.go. The name is what "skip" in a
// case's options calls the plane.
func Run(t *testing.T, name string, new dataplane.New) { run(t, name, stage{on: onBeds(new)}) }

// RunSockets is Run for a plane that serves sockets: the node and its pods are in a cgroup, and New is called by a
// thread in it. A pod that reaches itself may see its own address in place of the node's.
func RunSockets(t *testing.T, name string, new dataplane.New) {
	run(t, name, stage{on: onBeds(new), spec: testbed.Spec{Cgroup: true}})
}

// RunAccelerated is RunSockets on a LAN like that of hardware: packets have their checksums, and what drivers of the
// node send past its stack arrives. A run plays the cases in which these have something to do, and a part of the others.
func RunAccelerated(t *testing.T, name string, new dataplane.New) {
	run(t, name, stage{on: onBeds(new), spec: testbed.Spec{Cgroup: true}, hardware: true})
}

// RunOnlySockets is RunSockets for a plane with nothing behind it: probes from elsewhere are left out, and pods may
// keep their addresses where others would see the node's.
func RunOnlySockets(t *testing.T, name string, new dataplane.New) {
	run(t, name, stage{on: onBeds(new), spec: testbed.Spec{Cgroup: true}, onlySockets: true})
}

// RunHiding is Run for a plane whose backends never see their client's address.
func RunHiding(t *testing.T, name string, new dataplane.New) {
	run(t, name, stage{on: onBeds(new), hiding: true})
}

func run(t *testing.T, name string, s stage) {
	has := s.has
	if has == nil {
		has = testbed.HasProtocol
	}
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("cases", func(t *testing.T) {
		plays := make(chan play)
		var group sync.WaitGroup
		for range workers {
			s := s
			s.nodes = map[bool]*kernel{}
			group.Go(func() { s.playAll(t, plays) })
		}
		for _, p := range s.plays(t, cases) {
			if reason := p.skip(name, p.way); reason != "" {
				t.Logf("%s deviates: %s", p.title(), reason)
			} else if has(model.SCTP) || !p.needs(model.SCTP) { // else see the subtest sctp
				plays <- p
			}
		}
		close(plays)
		group.Wait()
	})
	sctp := slices.ContainsFunc(cases, func(c *testCase) bool { return c.needs(model.SCTP) && c.skip(name, way{}) == "" })
	if sctp && !has(model.SCTP) && !s.onlySockets {
		t.Run("sctp", runInTestKernel)
	}
}

// play is a case and a way to bring it to the kernel.
type play struct {
	*testCase
	way way
}

func (p play) title() string { return fmt.Sprintf("%s/%s/%s", p.name, p.family, p.way.name) }

// stage is where a worker plays, one case after the other.
type stage struct {
	on   ground
	spec testbed.Spec
	// onlySockets leaves out what no process on the node sends.
	onlySockets bool
	// hiding leaves out what cases say of sources.
	hiding bool
	// hardware makes cables like those of hardware, for what programs in drivers do.
	hardware bool
	// all plays the cases in all ways.
	all bool
	// has reports whether nodes have a protocol; nil: those of testbeds.
	has   func(model.Protocol) bool
	nodes map[bool]*kernel // with the pods on a bridge, and without; each has no plane
}

// plays are the cases in all families, each in a way that the run draws. Of those that have nothing to do with hardware
// it draws a part.
func (s *stage) plays(t *testing.T, cases []*testCase) []play {
	var all, others []play
	for i, c := range cases {
		to := &all
		if s.hardware && !c.ofDrivers() {
			to = &others
		}
		for j := range ways() {
			*to = append(*to, play{c, ways()[(i+j)%len(ways())]}) // neighbours differ in the way that is drawn
		}
	}
	parts := len(ways())
	if s.all {
		parts = 1
	}
	drawn := sample.Of(t, parts, all)
	if s.hardware {
		drawn = append(drawn, sample.Of(t, sample.Runs, others)...)
	}
	return drawn
}

func (s *stage) playAll(t *testing.T, plays <-chan play) {
	for p := range plays {
		t.Run(p.title(), func(t *testing.T) { s.play(t, p) })
	}
	for _, k := range s.nodes {
		if err := k.at.Close(); err != nil {
			t.Error(err)
		}
	}
}

func (s *stage) play(t *testing.T, p play) {
	made, err := s.node(p.bridged())
	if err != nil {
		t.Fatal(err)
	}
	if err := made.at.forget(); err != nil {
		t.Fatal(err)
	}
	k := *made
	k.log = logger(t)
	if s.onlySockets {
		p.testCase = p.ofSockets()
	}
	if s.hiding {
		p.testCase = p.testCase.hiding()
	}
	if err := k.play(t.Context(), p.testCase, p.way); err != nil {
		t.Error(err)
		if err := k.abandon(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}
}

// node builds the cluster when the first case needs it.
func (s *stage) node(bridged bool) (*kernel, error) {
	if s.nodes[bridged] == nil {
		spec := s.spec
		spec.PodBridge = bridged
		node, new, err := s.on(context.Background(), spec)
		if err != nil {
			return nil, err
		}
		s.nodes[bridged] = &kernel{at: node, new: new}
		if s.hardware {
			return s.nodes[bridged], likeHardware(node.(bed).Bed)
		}
	}
	return s.nodes[bridged], nil
}
