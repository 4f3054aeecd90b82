package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// RunRandom holds a data plane against the model: it programs random clusters by random changes,
// with restarts and failing kernel calls, sends packets, and compares what becomes of each with
// State.Lookup. FAIRLEAD_SEED and FAIRLEAD_SEEDS say which clusters, and how many.
func RunRandom(t *testing.T, new dataplane.New) { runRandom(t, onBeds(new), testbed.Spec{}, 60) }

// RunRandomSockets is to RunRandom what RunSockets is to Run. By itself it does fewer: whatever has failed, the kernel
// verifies programs again.
func RunRandomSockets(t *testing.T, new dataplane.New) {
	runRandom(t, onBeds(new), testbed.Spec{Cgroup: true}, 15)
}

func runRandom(t *testing.T, on ground, spec testbed.Spec, usual int) {
	first, n := sample.Seed(t), uint64(sample.Seeds(usual))
	group, ctx := errgroup.WithContext(t.Context())
	for w := range uint64(workers) {
		group.Go(func() error {
			node, new, err := on(ctx, spec)
			if err != nil {
				return err
			}
			defer node.Close()
			for seed := first + w; seed < first+n; seed += workers {
				r := newRandomRun(seed, kernel{at: node, new: new})
				if err := r.run(ctx); err != nil {
					return fmt.Errorf("%s=%d %s=1 repeats it: %w\nState:\n%s", sample.SeedVariable, seed, sample.SeedsVariable, err, r.state)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// randomRun is what one seed does.
type randomRun struct {
	generator
	kernel
	world *world
	test  *testCase // the options
	calm  bool      // no faults for now
}

func newRandomRun(seed uint64, k kernel) *randomRun {
	r := &randomRun{generator: generator{rand.New(rand.NewPCG(seed, 1))}, kernel: k}
	r.test = &testCase{family: dual, options: r.options()}
	faults := rand.New(rand.NewPCG(seed, 2))
	r.fault = func(operation string) error {
		if !r.calm && faults.IntN(10) == 0 {
			return fmt.Errorf("%s: %w", operation, errInjected)
		}
		return nil
	}
	return r
}

var errInjected = errors.New("injected fault")

func (r *randomRun) run(ctx context.Context) error {
	if err := r.begin(ctx); err != nil {
		return err
	}
	for range 2 + r.IntN(8) {
		if err := r.mutate(ctx); err != nil {
			return err
		}
	}
	r.calm = true
	if err := r.verify(ctx); err != nil {
		return err
	}
	if err := r.packets(ctx); err != nil {
		return err
	}
	return r.stop(ctx)
}

// begin programs the first State.
func (r *randomRun) begin(ctx context.Context) (err error) {
	if r.world, _, err = newWorld(r.test); err != nil {
		return err
	}
	if err := r.start(); err != nil {
		return err
	}
	state, _ := r.world.change(r.cluster())
	return r.settle(ctx, state)
}

// mutate changes some objects and applies that; now and then a new process starts instead.
func (r *randomRun) mutate(ctx context.Context) error {
	var objects []object
	var deleted []string
	for range 1 + r.IntN(3) {
		more, id := r.mutation()
		objects, deleted = append(objects, more...), append(deleted, id)
	}
	state, change := r.world.change(objects, deleted...)
	if err := state.Validate(); err != nil {
		return err
	}
	if r.chance(10) {
		if err := r.restart(); err != nil {
			return err
		}
		return r.settle(ctx, state)
	}
	err := r.apply(ctx, state, change)
	if errors.Is(err, errInjected) {
		return r.settle(ctx, state)
	}
	return err
}

// settle calls Sync until it works, as the engine does.
func (r *randomRun) settle(ctx context.Context, s *model.State) error {
	for {
		if err := r.sync(ctx, s); !errors.Is(err, errInjected) {
			return err
		}
	}
}

// verify compares the kernel with the State, and with what a new plane's Sync makes of it: nothing else.
func (r *randomRun) verify(ctx context.Context) error {
	if err := r.audit(ctx, dataplane.Quick); err != nil {
		return err
	}
	before, err := r.at.rules(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(r.restart(), r.sync(ctx, r.state), r.audit(ctx, dataplane.Quick)); err != nil {
		return fmt.Errorf("by a new plane: %w", err)
	}
	after, err := r.at.rules(ctx)
	if err == nil && before != after {
		err = fmt.Errorf("a new plane's Sync changed what was right:\n%s", difference(before, after))
	}
	return err
}

// packets sends some to what has a row, some to what has none.
func (r *randomRun) packets(ctx context.Context) error {
	rows := slices.SortedFunc(maps.Keys(r.state.Frontends), model.Key.Compare)
	var packets []testbed.Probe
	for range 10 {
		if len(rows) > 0 {
			key := rows[r.IntN(len(rows))]
			packets = append(packets, testbed.Probe{To: key.AddrPort(), Protocol: key.Protocol})
		}
	}
	for range 4 {
		packets = append(packets, testbed.Probe{To: r.destination(), Protocol: pick(r.generator, model.TCP, model.UDP)})
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range packets {
		p.From = pick(r.generator, "client", "pod-a", "pod-c", testbed.Node, testbed.NodeB, testbed.Outside)
		if p.To.Addr().IsLoopback() {
			p.From = testbed.Node
		}
		group.Go(func() error { return r.packet(ctx, p) })
	}
	return group.Wait()
}

// packet compares what becomes of a packet with what the model says.
func (r *randomRun) packet(ctx context.Context, p testbed.Probe) error {
	source, iface := r.test.arrival(p.From, p.To.Addr())
	d := r.state.Lookup(model.Packet{Protocol: p.Protocol, Source: source, Destination: p.To, Interface: iface})
	backends := r.state.Pools[d.Pool].Serving()
	if d.Verdict == model.Forward && !answerable(p.From, d, backends) {
		return nil
	}
	p.Timeout = patience
	if d.Verdict == model.Drop {
		p.Timeout = silence / 2
	}
	o, err := r.at.Probe(ctx, p)
	if err != nil {
		return err
	}
	if o.Result == testbed.Unreachable && onNode(p.From) && p.From != testbed.Node && r.passesPods(d.Key) {
		return nil
	}
	if !expected(o, d, backends, source) && !(r.at.Cgroup() != "" && itself(o, d, backends, source)) {
		return fmt.Errorf("%s %s to %s: %s, but the model says %s by %v, backends %v",
			p.Protocol, p.From, p.To, o, d.Verdict, d.Key, backends)
	}
	return nil
}

// passesPods reports whether packets of pods may pass though the model has them served: IPVS cannot serve them where those
// of clients outside pass.
func (r *randomRun) passesPods(key model.Key) bool {
	open := key
	open.Scope = model.Any
	_, ok := r.state.Frontends[open]
	return key.Scope == model.Internal && !ok
}

// answerable reports whether the answer of each backend finds back through the node under test. It need not if neither
// end is on the node and the source was not replaced. Then the other node, which has no proxy, or the LAN takes it
// straight to the client, which does not know the sender.
func answerable(from testbed.Place, d model.Decision, backends []model.Backend) bool {
	lost := func(b model.Backend) bool { return !b.Local && !d.Masquerade(b) }
	return onNode(from) || !slices.ContainsFunc(backends, lost)
}

func expected(o testbed.Outcome, d model.Decision, backends []model.Backend, source netip.Addr) bool {
	switch d.Verdict {
	case model.Drop:
		return o.Result == testbed.TimedOut
	case model.Reject:
		return o.Result == testbed.Refused
	case model.Pass:
		return o.Result == testbed.Refused || o.Result == testbed.Unreachable
	}
	return o.Result == testbed.Answered && slices.ContainsFunc(backends, func(b model.Backend) bool {
		return podAt(b.AddrPort()) == o.Backend && sees(b, d, source, o.Source)
	})
}

// itself reports whether a pod has reached itself, and sees its own address.
func itself(o testbed.Outcome, d model.Decision, backends []model.Backend, source netip.Addr) bool {
	return d.Verdict == model.Forward && o.Source == source && slices.ContainsFunc(backends, func(b model.Backend) bool {
		return b.Addr == source && podAt(b.AddrPort()) == o.Backend
	})
}

// sees reports whether a backend may see an address as that of a client.
func sees(b model.Backend, d model.Decision, client, seen netip.Addr) bool {
	switch {
	case isNodeAddr(b.Addr): // packets for the node itself take no way on which sources are replaced
		return seen == client || isNodeAddr(seen)
	case d.Masquerade(b) || isNodeAddr(client): // the node has several addresses
		return isNodeAddr(seen)
	}
	return seen == client
}
