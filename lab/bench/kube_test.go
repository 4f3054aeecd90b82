package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
)

const tcp = model.TCP

// sizesVariable names the numbers of Services, in place of kubeSizes: "1000" or "1000,5000".
const sizesVariable = "FAIRLEAD_BENCH_SERVICES"

const kubeSizes = "1000,5000,10000"

// A rival is a proxy to compare, started with the same flags as the others.
type rival struct {
	name    string
	mode    string
	program func(b *testing.B) string
	env     func(b *testing.B) []string
	args    []string // before those that all have
	// pause between one change and the next, so that a proxy that collects changes (minSyncPeriod) does
	// not wait because of the one before.
	pause time.Duration
	// fewBuckets makes the kernel's table of virtual servers a small one.
	fewBuckets bool
	switches   bool // from one of Fairlead's planes to another
}

// fairleadArgs make Fairlead understand the arguments of kube-proxy.
var fairleadArgs = []string{"run", "--control-socket="}

func rivals() []rival {
	kubeProxy := func(b *testing.B) string { return kubernetes.NeedParts(b).Path("kube-proxy") }
	nothing := func(*testing.B) []string { return nil }
	const minSyncPeriod = 1100 * time.Millisecond
	return []rival{
		{name: "fairlead", mode: "nftables", program: buildDaemon, env: nothing, args: fairleadArgs, pause: 50 * time.Millisecond},
		{name: "kube-proxy, nftables", mode: "nftables", program: kubeProxy, env: nothing, pause: minSyncPeriod},
		{name: "kube-proxy, iptables", mode: "iptables", program: kubeProxy, env: legacyIptables, pause: minSyncPeriod},
	}
}

// legacyIptables makes a proxy use the older of the two kernel interfaces of iptables, with which kube-proxy's mode
// iptables is the faster. With the other one and 5,000 Services it does not get ready within four minutes.
func legacyIptables(b *testing.B) []string {
	dir := b.TempDir()
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			if err := os.Symlink("/usr/sbin/xtables-legacy-multi", filepath.Join(dir, name+suffix)); err != nil {
				b.Fatal(err)
			}
		}
	}
	return []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
}

// contestant is a rival ready to run, and its figures: one of each round, but for latencies.
type contestant struct {
	rival
	path string
	vars []string

	start, startCPU          Series // seconds
	settled, peak, childPeak Series // bytes
	anonymous                Series // bytes, of the settled ones
	single, churn            latencies
	churnCPU                 Series // seconds a second
}

// latencies are those of changes, from the PATCH to the first connection at the new endpoint. event is the part of it
// that comes after a bare watch has seen the change. The prober cannot tell less than its interval, so all shorter
// times count as the interval.
type latencies struct {
	patch, event       Series // seconds: the median of each round
	allPatch, allEvent Series // of all changes
}

// add takes the changes of a round.
func (l *latencies) add(patch, event Series) {
	l.patch, l.event = append(l.patch, Series(patch).Median()), append(l.event, Series(event).Median())
	l.allPatch, l.allEvent = append(l.allPatch, patch...), append(l.allEvent, event...)
}

func afterEvent(v *vigil, event time.Time) float64 {
	return max(v.since.Add(v.took).Sub(event), probeInterval).Seconds()
}

// Limits, after which a figure is given up.
const (
	startLimit  = 2 * time.Minute
	changeLimit = 30 * time.Second
)

// How changes are measured.
const (
	fewest, most = 6, 100           // changes one at a time
	singleTime   = 10 * time.Second // after which the fewest suffice
	churnTime    = 10 * time.Second
	churnRate    = 100 // changes a second, of which
	probedRate   = 25  // are probed
)

// BenchmarkKube compares Fairlead with the real kube-proxy, all following the same API server. A round
// gives each of them a node of its own: it starts, and then endpoints change.
func BenchmarkKube(b *testing.B) {
	sizes := os.Getenv(sizesVariable)
	if sizes == "" {
		sizes = kubeSizes
	}
	var all []*contestant
	for _, r := range rivals() {
		all = append(all, newContestant(b, r))
	}
	for text := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < probedServices {
			b.Fatalf("%s: %q is not a number of Services (at least %d)", sizesVariable, text, probedServices)
		}
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) { benchmarkKube(b, n, all) })
	}
}

func benchmarkKube(b *testing.B, n int, all []*contestant) {
	c := newCluster(b, n)
	for _, k := range all {
		*k = contestant{rival: k.rival, path: k.path, vars: k.vars}
	}
	order := slices.Clone(all)
	for next := rounds(b, 3); next(); {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, k := range order {
			if err := k.run(b, c, (*run).measure); err != nil {
				b.Fatalf("%s: %v", k.name, err)
			}
		}
	}
	reportKube(b, n, all)
}

// run is what a contestant does in a round: it is measured on a node of its own.
func (k *contestant) run(b *testing.B, c *cluster, measure measurement) error {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	bed, err := c.newNode(ctx)
	if err != nil {
		return err
	}
	defer bed.Close()
	relay, err := c.plane.Serve(bed)
	if err != nil {
		return err
	}
	kubeconfig, err := relay.Kubeconfig(b.TempDir(), kubernetes.KubeProxy())
	if err != nil {
		return err
	}
	by, err := c.watch(ctx)
	if err != nil {
		return err
	}
	defer by.stop()
	o := kubernetes.ProxyOptions{Bed: bed, Command: k.command(b, k.path, kubeconfig), Env: k.vars}
	r := run{contestant: k, cluster: c, bystander: by, prober: newProber(bed), relay: relay}
	if k.switches {
		// Where it is mounted nowhere, a plane's leftovers are not found.
		pins := b.TempDir()
		if err := unix.Mount("bpf", pins, "bpf", 0, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		defer func() { _ = unix.Unmount(pins, unix.MNT_DETACH) }()
		r.socket = filepath.Join(b.TempDir(), "control")
		o.Command = append(o.Command, "--cgroup-root="+bed.Cgroup(), "--bpf-root="+pins, "--control-socket="+r.socket)
	}
	begin := time.Now()
	err = measure(&r, ctx, o)
	if err != nil && r.proxy != nil {
		err = fmt.Errorf("%w; its last words:\n%s", err, lastWords(r.proxy.Log()))
	}
	progress("%d Services: a round of %s took %v", c.services, k.name, time.Since(begin).Round(time.Second))
	return errors.Join(err, r.prober.stop())
}

// progress is written to standard error.
func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }

// command starts the rival whose program is at path.
func (r rival) command(b *testing.B, path, kubeconfig string) []string {
	common := kubernetes.KubeProxyCommand(kubernetes.NeedParts(b), kubeconfig, r.mode)[1:]
	return slices.Concat([]string{path}, r.args, common)
}

func lastWords(log string) string { return log[max(0, len(log)-2000):] }

// run is a contestant's turn.
type run struct {
	*contestant
	*cluster
	*bystander
	*prober
	relay  *kubernetes.Relay
	proxy  *kubernetes.Proxy
	socket string // for commands; empty: there is none
}

// measurement starts the proxy, measures and kills it.
type measurement func(*run, context.Context, kubernetes.ProxyOptions) error

func (r *run) measure(ctx context.Context, o kubernetes.ProxyOptions) error {
	if err := r.measureStart(ctx, o); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	if err := r.measureSingle(ctx); err != nil {
		return fmt.Errorf("one change: %w", err)
	}
	if err := r.measureChurn(ctx); err != nil {
		return fmt.Errorf("%d changes a second: %w", churnRate, err)
	}
	u, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	r.peak, r.childPeak = append(r.peak, float64(u.Peak)), append(r.childPeak, float64(u.ChildPeak))
	return r.proxy.Kill()
}

// measureStart is over when all probed Services are as they should be.
func (r *run) measureStart(ctx context.Context, o kubernetes.ProxyOptions) (err error) {
	begin := time.Now()
	if r.proxy, err = kubernetes.StartProxy(ctx, o); err != nil {
		return err
	}
	if err := r.allRight(); err != nil {
		return err
	}
	r.start = append(r.start, time.Since(begin).Seconds())
	letPass(settleTime)
	u, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	r.startCPU = append(r.startCPU, u.CPU.Seconds())
	r.settled, r.anonymous = append(r.settled, float64(u.RSS)), append(r.anonymous, float64(u.Anonymous))
	return nil
}

// allRight returns when all probed Services are as they should be.
func (r *run) allRight() error {
	for i, open := range r.cluster.open {
		if _, err := r.await(i, open).wait(startLimit); err != nil {
			return err
		}
	}
	return nil
}

// await begins a vigil for a probed Service.
func (r *run) await(i int, open bool) *vigil {
	return r.prober.watch(netip.AddrPortFrom(serviceAddr(i), servicePort), open)
}

// measureSingle changes one endpoint at a time.
func (r *run) measureSingle(ctx context.Context) error {
	var took, events Series
	for begin := time.Now(); len(took) < fewest || len(took) < most && time.Since(begin) < singleTime; {
		i := r.pick()
		v := r.await(i, !r.cluster.open[i])
		if err := r.toggle(ctx, i); err != nil {
			return err
		}
		d, event, err := r.seen(i, v)
		if err != nil {
			return err
		}
		took, events = append(took, d), append(events, event)
		letPass(r.pause)
	}
	r.single.add(took, events)
	return nil
}

// seen is how long a change took, from the PATCH and from the watch event, in seconds.
func (r *run) seen(i int, v *vigil) (took, event float64, err error) {
	d, err := v.wait(changeLimit)
	if err != nil {
		return 0, 0, err
	}
	at, err := r.saw(i)
	return d.Seconds(), afterEvent(v, at), err
}

// pick is a probed Service.
func (r *run) pick() int {
	all := slices.Collect(keys(r.cluster.open))
	return all[rand.IntN(len(all))]
}

func keys(m map[int]bool) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for i := range m {
			if !yield(i) {
				return
			}
		}
	}
}

// measureChurn changes endpoints at a rate that does not depend on how fast the proxy follows. Each
// probed Service changes once at most, because one that changes back before the proxy has followed would
// never be seen to change.
func (r *run) measureChurn(ctx context.Context) error {
	probed := slices.Collect(keys(r.cluster.open))
	before, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	vigils := map[int]*vigil{}
	group, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	for n := 0; n < int(churnTime.Seconds())*churnRate; n++ {
		letPass(time.Until(begin.Add(time.Duration(n) * time.Second / churnRate)))
		if n%(churnRate/probedRate) != 0 {
			i, endpoint, a := r.turn()
			group.Go(func() error { return r.patch(ctx, i, endpoint, a) })
			continue
		}
		i := probed[len(vigils)]
		a := r.flip(i)
		vigils[i] = r.await(i, r.cluster.open[i])
		group.Go(func() error { return r.patch(ctx, i, 0, a) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	after, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	r.churnCPU = append(r.churnCPU, (after.CPU-before.CPU).Seconds()/time.Since(begin).Seconds())
	return r.collect(vigils)
}

func (r *run) collect(vigils map[int]*vigil) error {
	var took, events Series
	for i, v := range vigils {
		d, event, err := r.seen(i, v)
		if err != nil {
			return err
		}
		took, events = append(took, d), append(events, event)
	}
	r.churn.add(took, events)
	return nil
}

// quantile of all values of a series.
func quantile(s Series, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return time.Duration(sorted[int(q*float64(len(sorted)-1))] * 1e9)
}

// reportKube prints the figures, and how many times as long or as much the rivals take.
func reportKube(b *testing.B, n int, all []*contestant) {
	b.Helper()
	rows := [][]string{{fmt.Sprintf("%d Services × %d endpoints", n, perService), "start → last Service answers",
		"processor time for that", "PATCH → new endpoint answers: p50 (p99)", "watch event → new endpoint answers",
		fmt.Sprintf("under %d changes/s: from PATCH", churnRate), "from watch event", "processors busy then",
		"settled", "peak", "peak of largest child"}}
	for _, k := range all {
		rows = append(rows, []string{
			k.name, show(k.start.Duration()), show(k.startCPU.Duration()),
			both(k.single.allPatch), both(k.single.allEvent), both(k.churn.allPatch), both(k.churn.allEvent),
			fmt.Sprintf("%.2f", Series(k.churnCPU).Median()),
			megabytes(k.settled), megabytes(k.peak), megabytes(k.childPeak),
		})
	}
	ours := all[0]
	for _, k := range all[1:] {
		row := []string{k.name + " / fairlead"}
		for _, s := range [][2]Series{
			{k.start, ours.start}, {k.startCPU, ours.startCPU},
			{k.single.patch, ours.single.patch}, {k.single.event, ours.single.event},
			{k.churn.patch, ours.churn.patch}, {k.churn.event, ours.churn.event}, {k.churnCPU, ours.churnCPU},
			{k.settled, ours.settled}, {k.total(), ours.total()},
		} {
			row = append(row, s[0].Ratio(s[1]).String())
		}
		rows = append(rows, append(row, ""))
		b.ReportMetric(k.start.Ratio(ours.start).Median, "start-ratio-"+compact(k.name))
		b.ReportMetric(k.single.event.Ratio(ours.single.event).Median, "change-ratio-"+compact(k.name))
		b.ReportMetric(k.total().Ratio(ours.total()).Median, "memory-ratio-"+compact(k.name))
	}
	b.ReportMetric(quantile(ours.churn.allPatch, 0.99).Seconds()*1e3, "ms-p99-churn")
	printTable(fmt.Sprintf("beside kube-proxy: medians of %d rounds, latencies of all changes: p50 (p99); ratios with the "+
		"bounds of 95 %%, that of the peak with the child's", len(ours.start)), rows...)
}

func both(s Series) string {
	return fmt.Sprintf("%s (%s)", show(quantile(s, 0.5)), show(quantile(s, 0.99)))
}

// total is the peak with that of the largest child.
func (k *contestant) total() (sum Series) {
	for i := range k.peak {
		sum = append(sum, k.peak[i]+k.childPeak[i])
	}
	return sum
}
