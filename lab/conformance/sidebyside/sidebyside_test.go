package sidebyside

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/model"
)

// fairlead is the agent.
var fairlead string

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(func() int {
		return programtest.WithAgent(func(agent string) int {
			fairlead = agent
			return m.Run()
		})
	}))
}

// perSetup is how many seeds in a row share a configuration, because a start takes long.
const perSetup = 3

func TestRandom(t *testing.T) {
	const usual = 4
	first, n := sample.Seed(t), uint64(sample.Seeds(usual))
	s := newStage(t)
	for seed := first; seed < first+n; seed++ {
		c := newGenerator(seed/perSetup, 0).setup()
		if err := s.configure(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if err := s.play(t, newGenerator(seed, 1)); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Fatalf("%s=%d %s=1 repeats it; the proxies' setup: %+v", sample.SeedVariable, seed, sample.SeedsVariable, c)
		}
	}
	t.Logf("%d probes compared; differences that are meant: %v", s.compared, s.met)
}

// stage is where clusters are played: an API server, and the proxies that follow it.
type stage struct {
	api   *api
	pairs []*pair
	step  marker

	mu       sync.Mutex // guards what follows
	compared int
	met      map[string]int // differences that are meant, by name
}

func newStage(t *testing.T) *stage {
	parts := kubernetes.NeedParts(t)
	plane, err := kubernetes.Start(t.Context(), kubernetes.Options{Parts: parts, Controllers: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plane.Close(); err != nil {
			t.Error(err)
		}
	})
	s := &stage{api: &api{client: plane.Client(), has: newObjects()}, met: map[string]int{}}
	if err := s.api.register(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{nftables, iptables} {
		s.pairs = append(s.pairs, &pair{
			mode: mode, theirs: newNode(t, plane, parts.Path("kube-proxy")), ours: newNode(t, plane, fairlead, "run", "--control-socket="),
		})
	}
	return s
}

// configure starts all proxies with a configuration, over what those before have left, unless they run
// with it already.
func (s *stage) configure(ctx context.Context, c setup) error {
	if s.pairs[0].theirs.proxy != nil && reflect.DeepEqual(c, s.pairs[0].setup) {
		return nil
	}
	for _, p := range s.pairs {
		p.setup = c
	}
	err := each(ctx, s.pairs, func(ctx context.Context, p *pair, n *node) error { return n.restart(ctx, c, p.mode) })
	if err != nil {
		return err
	}
	return s.awaitGuards(ctx)
}

// awaitGuards restarts kube-proxy in mode nftables until it guards the Service CIDRs. It writes that rule in
// full syncs only, of which there is one at the start and one an hour later. If it has not heard of the
// ServiceCIDRs by then, in one family or the other, it lets packets to addresses of no Service pass.
func (s *stage) awaitGuards(ctx context.Context) error {
	p := s.pairs[slices.IndexFunc(s.pairs, func(p *pair) bool { return p.mode == nftables })]
	for {
		if err := s.bring(ctx, newObjects()); err != nil { // it has synced
			return err
		}
		if guarded, err := guarded(ctx, p.theirs.bed); guarded || err != nil {
			return err
		}
		if err := p.theirs.restart(ctx, p.setup, p.mode); err != nil {
			return err
		}
	}
}

// guarded reports whether packets to addresses that no Service has stay on a bed's node, in both families.
func guarded(ctx context.Context, bed *testbed.Bed) (bool, error) {
	got := outcomes{}
	for _, nobodys := range both("10.96.88.88") {
		q := probe{"client", model.TCP, netip.AddrPortFrom(nobodys, 80)}
		if err := got.ask(ctx, bed, q, 5*patience); err != nil {
			return false, err
		}
	}
	return got.are(timedOut), nil
}

// play compares a random cluster, some changes of it, and what is left when all is gone.
func (s *stage) play(t *testing.T, g generator) error {
	o := g.cluster()
	for range 3 {
		probes := g.probes(o)
		if err := s.compare(t, o, probes); err != nil || t.Failed() {
			return err
		}
		o = g.change(o)
	}
	last := g.probes(o)
	gone := newObjects()
	gone.zone = o.zone
	return s.compare(t, gone, last)
}

// compare brings objects to the API server, waits for all proxies, and sends probes.
func (s *stage) compare(t *testing.T, o objects, probes []probe) error {
	if err := s.bring(t.Context(), o); err != nil {
		return err
	}
	const atOnce = 64
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(atOnce)
	var unexplained []contrast
	for _, p := range s.pairs {
		group.Go(func() error { return s.compareHealth(ctx, p, o) })
		for _, q := range probes {
			group.Go(func() error {
				c, err := p.contrast(ctx, q, o)
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.compared++; err == nil && !s.settled(c) {
					unexplained = append(unexplained, c)
				}
				return err
			})
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return s.report(t, o, unexplained)
}

func (s *stage) compareHealth(ctx context.Context, p *pair, o objects) error {
	for _, c := range p.health(ctx, o) {
		if c.theirs == c.ours {
			continue
		}
		d := explainHealth(c)
		if d == nil {
			return fmt.Errorf("%s\n%s", c, o.only(c.service.Name))
		}
		s.mu.Lock()
		s.met[d.name]++
		s.mu.Unlock()
	}
	return nil
}

// settled reports whether a contrast is no difference, or one that is meant, which it counts.
func (s *stage) settled(c contrast) bool {
	if c.agree() {
		return true
	}
	d := explain(c)
	if d != nil {
		s.met[d.name]++
	}
	return d != nil
}

// report makes differences failures. It tries each Service again alone, with nothing else that could
// matter.
func (s *stage) report(t *testing.T, o objects, unexplained []contrast) error {
	const most = 5
	for _, c := range unexplained[:min(most, len(unexplained))] {
		if c.service == nil {
			t.Errorf("%s", c)
			continue
		}
		alone := o.only(c.service.Name)
		if err := s.bring(t.Context(), alone); err != nil {
			return err
		}
		again, err := c.pair.contrast(t.Context(), c.probe, alone)
		if err != nil {
			return err
		}
		t.Errorf("%s\n\twith no other Service:\n\tkube-proxy: %s\n\tfairlead:   %s\n%s", c, again.theirs, again.ours, alone)
	}
	if n := len(unexplained) - most; n > 0 {
		t.Errorf("and %d more", n)
	}
	return nil
}

// bring makes the API server hold objects, and returns when all proxies have followed.
func (s *stage) bring(ctx context.Context, o objects) error {
	s.step++
	o = o.clone()
	s.step.addTo(o)
	if err := s.api.apply(ctx, o); err != nil {
		return fmt.Errorf("apply: %w\n%s", err, o)
	}
	return each(ctx, s.pairs, func(ctx context.Context, _ *pair, n *node) error {
		return s.step.await(ctx, n.bed, o.zone)
	})
}

// register makes the Node object.
func (a *api) register(ctx context.Context) error {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)}}
	for _, c := range testbed.PodCIDRs(testbed.Node) {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, c.String())
	}
	n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	n, err := a.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for _, addr := range texts(both(nodeAddrs[0])) {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr})
	}
	_, err = a.client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
	return err
}
