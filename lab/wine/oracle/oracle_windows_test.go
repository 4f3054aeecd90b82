package oracle

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
)

var write = flag.Bool("write", false, "write differences.txt anew")

// known is how many clusters of each setup are always the same. For these the numbers of differences.txt hold.
const known = 12

func TestMain(m *testing.M) {
	flags := flag.NewFlagSet("", flag.PanicOnError)
	klog.InitFlags(flags)
	if err := flags.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		panic(err)
	}
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// TestOracle gives both the objects of random clusters, changes these to those of another cluster, and deletes them. Each
// time it compares
//
//   - Fairlead's objects with those that the specification says without a deviation;
//   - kube-proxy's with those with all deviations.
//
// On every other node Fairlead takes over from kube-proxy before the objects are deleted.
// FAIRLEAD_SEEDS is how many clusters of each setup are random, of FAIRLEAD_SEED.
func TestOracle(t *testing.T) {
	seed, random := uint64(time.Now().Unix()), 8
	if n, err := strconv.ParseUint(os.Getenv("FAIRLEAD_SEED"), 10, 64); err == nil {
		seed = n
	}
	if n, err := strconv.Atoi(os.Getenv("FAIRLEAD_SEEDS")); err == nil {
		random = n
	}
	version := hns.Version{Major: 13, Minor: 3} // load balancers cannot be modified
	if seed%2 == 0 {
		version = hns.Version{Major: 15, Minor: 5}
	}
	t.Logf("FAIRLEAD_SEED=%d repeats this, with HNS %s", seed, version)
	counts, sum := map[deviation]int{}, map[deviation]int{}
	for _, s := range []setup{
		{kind: "L2Bridge", dsr: true}, {kind: "L2Bridge"}, {kind: "L2Bridge", dsr: true, dual: true},
		{kind: "L2Bridge", dual: true}, {kind: hns.Overlay, dsr: true}, {kind: hns.Overlay},
	} {
		s.version = version
		r := newRunner(t, s)
		for i := range known {
			g := generator{rand.New(rand.NewPCG(1, uint64(i))), s.dual}
			r.compare(t, fmt.Sprintf("known cluster %d", i), g.cluster(), g.cluster())
		}
		for d, n := range r.counts {
			counts[d] += n
		}
		for i := range random {
			g := generator{rand.New(rand.NewPCG(seed, uint64(i))), s.dual}
			r.compare(t, fmt.Sprintf("cluster %d", i), g.cluster(), g.cluster())
		}
		for d, n := range r.counts {
			sum[d] += n
		}
		t.Logf("%s: %d clusters, %v", s, known+random, r.counts)
	}
	t.Logf("clusters with a deviation: %v", sum)
	table(t, counts)
}

// table holds the numbers of the known clusters against the file, which has the reasons.
func table(t *testing.T, counts map[deviation]int) {
	t.Helper()
	text := fmt.Sprintf("# %d clusters of each of 6 setups: in how many kube-proxy's objects differ from Fairlead's, and why. ./dev wine\n"+
		"# checks that nothing else differs.\n", known)
	for _, d := range deviations() {
		text += fmt.Sprintf("\n%s: %d clusters\n%s\n", d, counts[d], reasons()[d])
	}
	text += fmt.Sprintf("\n%s: after a few changes\n%s\n", remains, reasons()[remains])
	if *write {
		if err := os.WriteFile("differences.txt", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile("differences.txt"); err != nil || strings.ReplaceAll(string(have), "\r", "") != text {
		t.Errorf("%v; differences.txt is\n%s\nshould be\n%s", err, have, text)
	}
}

// runner compares in one setup. kube-proxy waits for ten seconds when it finds an overlay network, so that one proxier
// gets all clusters there, one after the other.
type runner struct {
	setup  setup
	theirs node
	lasts  *kubeProxy
	node   node // whose addresses all have
	counts map[deviation]int

	handsOver bool // at the end Fairlead takes over from kube-proxy; else all is deleted
}

func newRunner(t *testing.T, s setup) *runner {
	r := &runner{setup: s, node: newNode(t, s), counts: map[deviation]int{}}
	if s.kind == hns.Overlay {
		r.theirs = newNode(t, s)
		r.lasts = newKubeProxy(t, r.theirs, s)
	}
	return r
}

func (r *runner) compare(t *testing.T, name string, c, next cluster) {
	t.Helper()
	ours, theirs, p := newNode(t, r.setup), r.theirs, r.lasts
	if p == nil {
		theirs = newNode(t, r.setup)
		p = newKubeProxy(t, theirs, r.setup)
		defer p.server.Close()
	}
	f := newFairlead(t, ours, r.setup, c)
	p.feed(cluster{}, c)
	r.classify(t, name, c, theirs.sim.Lines(), ours.sim.Lines())

	f.feed(t, c, next)
	r.same(t, name+", changed: Fairlead", ours.sim.Lines(), r.spec(next, nil))
	p.feed(c, next)
	r.same(t, name+", changed: kube-proxy", r.withoutRemains(theirs.sim.Lines(), c, next), r.spec(next, all()))
	f.feed(t, next, cluster{})
	r.same(t, name+", deleted: Fairlead", ours.sim.Lines(), r.spec(cluster{}, nil))
	if r.handsOver = !r.handsOver && r.lasts == nil; r.handsOver {
		newFairlead(t, theirs, r.setup, next)
		r.same(t, name+", taken over: Fairlead", theirs.sim.Lines(), r.spec(next, nil))
		return
	}
	p.feed(next, cluster{})
	r.same(t, name+", deleted: kube-proxy", theirs.sim.Lines(), r.spec(cluster{}, all()))
}

// withoutRemains takes away, and counts, the remote endpoints of before that kube-proxy leaves after some changes,
// depending on the order of its maps.
func (r *runner) withoutRemains(lines []string, before, now cluster) []string {
	old, wanted := r.spec(before, all()), r.spec(now, all())
	return slices.DeleteFunc(lines, func(l string) bool {
		if !strings.HasPrefix(l, "endpoint ") || slices.Contains(wanted, l) || !slices.Contains(old, l) {
			return false
		}
		r.counts[remains]++
		return true
	})
}

// all are all deviations.
func all() map[deviation]bool {
	m := map[deviation]bool{}
	for _, d := range deviations() {
		m[d] = true
	}
	return m
}

func (r *runner) spec(c cluster, has map[deviation]bool) []string {
	return (&spec{setup: r.setup, node: r.node, has: has}).lines(c)
}

// classify holds both against the specification, and counts the deviations without which kube-proxy's objects would be
// others.
func (r *runner) classify(t *testing.T, name string, c cluster, theirs, ours []string) {
	t.Helper()
	has := all()
	r.same(t, name+": Fairlead", ours, r.spec(c, nil))
	r.same(t, name+": kube-proxy", theirs, r.spec(c, has))
	if slices.Equal(theirs, ours) {
		return
	}
	for _, d := range deviations() {
		if has[d] = false; !slices.Equal(theirs, r.spec(c, has)) {
			r.counts[d]++
		}
		has[d] = true
	}
}

func (r *runner) same(t *testing.T, name string, have, want []string) {
	t.Helper()
	var lines []string
	for _, l := range have {
		if !slices.Contains(want, l) {
			lines = append(lines, "  has  "+l)
		}
	}
	for _, l := range want {
		if !slices.Contains(have, l) {
			lines = append(lines, "  want "+l)
		}
	}
	if len(lines) > 0 {
		t.Errorf("%s, %s\n%s", r.setup, name, strings.Join(lines, "\n"))
	}
}
