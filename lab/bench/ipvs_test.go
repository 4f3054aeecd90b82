package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// The contenders of BenchmarkIPVS at each number of Services; the environment may name other numbers.
const (
	ipvsSizes     = "1,10,100,1000,10000,20000" // sizesVariable
	ipvsEndpoints = 2                           // of each Service
	ipvsRounds    = 2                           // roundsVariable: of starts and additions
	additions     = 6                           // Services added in each of these
	fewServices   = 100                         // fewer Services than these start in the last round only,
	manyServices  = 10_000                      // and from these on as well: it takes minutes

	firstSyncLimit = 20 * time.Minute
	additionLimit  = 5 * time.Minute

	roundsVariable = "FAIRLEAD_BENCH_ROUNDS"
	rivalsVariable = "FAIRLEAD_BENCH_RIVALS" // modes of kube-proxy: "ipvs,iptables", or "none"
)

// BenchmarkIPVS compares Fairlead's plane ipvs with the real kube-proxy in modes ipvs and iptables, in one run of
// the test kernel where this kernel has no IPVS.
//
//	for each round, number of Services and proxy: an arena of its own
//	   start ─► all answer ─► memory ─► Services are added, one at a time ─► the proxy is killed, its rules stay
//	the arenas of the last round: new flows, established flows, interleaved with those to a pod without rules
func BenchmarkIPVS(b *testing.B) {
	b.Setenv(daemonVariable, buildDaemon(b))
	if inTestKernel(b) {
		return
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4)) // a client that waits must not keep the API server from serving
	sizes := sizesOf(b, ipvsSizes)
	var all []*ipvsEntry
	for _, n := range sizes {
		for _, r := range ipvsRivals() {
			all = append(all, &ipvsEntry{rival: r, services: n})
		}
	}
	for round, n := 0, roundsOf(b, ipvsRounds); round < n; round++ {
		for _, e := range shuffled(all) {
			if round < n-1 && (e.services < fewServices || e.services >= manyServices) {
				continue
			}
			begin := time.Now()
			if err := e.run(b, round == n-1); err != nil {
				b.Fatalf("%s, %d Services: %v", e.name, e.services, err)
			}
			progress("round %d of %d: %s, %d Services: %v; start %.1f s, idle after %.1f s, additions %.3f s", round+1, n, e.name,
				e.services, time.Since(begin).Round(time.Second), e.start[len(e.start)-1], e.idle[len(e.idle)-1], Series(e.added).Median())
		}
	}
	printIPVSControl(b, all)
	ipvsFlows(b, sizes, all) // Loop in it forgets what was reported before
	for _, e := range all {
		b.ReportMetric(Series(e.added).Median()*1e3, fmt.Sprintf("ms-add-%s-%d", compact(e.name), e.services))
		b.ReportMetric(Series(e.start).Median(), fmt.Sprintf("s-start-%s-%d", compact(e.name), e.services))
	}
}

func shuffled(all []*ipvsEntry) []*ipvsEntry {
	order := slices.Clone(all)
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// bucketsSysctl is how many virtual servers share a bucket of their table, as a power of two.
const bucketsSysctl = "/proc/sys/net/ipv4/vs/svc_lfactor"

// ipvsRivals has Fairlead first. Since 2026 the kernel's table of virtual servers grows with their number. There
// Fairlead is also measured with the 256 buckets that 20,000 virtual servers had to share before.
func ipvsRivals() []rival {
	kubeProxy := func(b *testing.B) string { return kubernetes.NeedParts(b).Path("kube-proxy") }
	nothing := func(*testing.B) []string { return nil }
	fairlead := rival{name: "Fairlead, ipvs", mode: "ipvs", program: buildDaemon, env: nothing, args: fairleadArgs}
	rivals := []rival{fairlead}
	if _, err := os.Stat(bucketsSysctl); err == nil {
		fairlead.name, fairlead.fewBuckets = fairlead.name+", few buckets", true
		rivals = append(rivals, fairlead)
	}
	modes := os.Getenv(rivalsVariable)
	if modes == "" {
		modes = "ipvs,iptables"
	}
	for mode := range strings.SplitSeq(modes, ",") {
		if mode != "none" {
			rivals = append(rivals, rival{name: "kube-proxy, " + mode, mode: mode, program: kubeProxy, env: legacyIptables})
		}
	}
	return rivals
}

// ipvsEntry is a rival at a number of Services, and its figures: one of each round, but for additions.
type ipvsEntry struct {
	rival
	services int
	arena    *arena         // of the last round, with its rules
	last     netip.AddrPort // the Service that a packet finds last, where there is a list

	start, idle, cpu                Series // seconds
	added                           Series // seconds, of all additions
	settled, peak, childPeak, slabs Series // bytes
}

// run is a rival's turn of a round.
func (e *ipvsEntry) run(b *testing.B, last bool) error {
	a := newFlowArena(b)
	objects, err := newStock(e.services, additions)
	if err != nil {
		return err
	}
	dir := b.TempDir()
	kubeconfig, err := objects.Serve(a.bed, dir)
	if err != nil {
		return err
	}
	defer objects.Close()
	if e.fewBuckets {
		if err := a.bed.Do(testbed.Node, func() error { return os.WriteFile(bucketsSysctl, []byte("7"), 0) }); err != nil {
			return err
		}
	}
	command := e.command(b, e.program(b), kubeconfig)
	runtime.GC()
	before := kernelMemory()
	begin := time.Now()
	proxy, err := kubernetes.StartProxy(b.Context(), kubernetes.ProxyOptions{Bed: a.bed, Command: command, Env: e.env(b)})
	if err != nil {
		return err
	}
	t := &turn{ipvsEntry: e, arena: a, stock: objects, proxy: proxy}
	if err := t.measure(begin, before); err != nil {
		return errors.Join(fmt.Errorf("%w; its last words:\n%s", err, lastWords(proxy.Log())), proxy.Kill())
	}
	if last {
		e.arena, e.last = a, netip.AddrPortFrom(serviceAddr(e.services-1), servicePort)
		if e.mode == "iptables" {
			_, e.last = a.kubeServices(b)
		}
		return nil
	}
	return a.bed.Close()
}

// child is the size of the largest program that was started, if the kernel tells whose children there are.
func (e *ipvsEntry) child() string {
	if Series(e.childPeak).Median() == 0 {
		return "–"
	}
	return megabytes(e.childPeak)
}

// turn is a rival on a node.
type turn struct {
	*ipvsEntry
	arena *arena
	stock *stock
	proxy *kubernetes.Proxy
}

func (t *turn) measure(begin time.Time, kernelBefore float64) error {
	started, err := t.arena.expect(t.sample(), firstSyncLimit, t.proxy.Ended())()
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	idle, err := t.quiet()
	if err != nil {
		return err
	}
	u, err := t.proxy.Usage()
	if err != nil {
		return err
	}
	t.start, t.idle = append(t.start, started.Sub(begin).Seconds()), append(t.idle, idle.Sub(begin).Seconds())
	t.cpu = append(t.cpu, u.CPU.Seconds())
	t.settled = append(t.ipvsEntry.settled, float64(u.RSS))
	for range additions {
		if err := t.addOne(); err != nil {
			return fmt.Errorf("add a Service: %w", err)
		}
		if _, err := t.quiet(); err != nil {
			return err
		}
	}
	if u, err = t.proxy.Usage(); err != nil {
		return err
	}
	t.peak, t.childPeak = append(t.peak, float64(u.Peak)), append(t.childPeak, float64(u.ChildPeak))
	if err := t.proxy.Kill(); err != nil {
		return err
	}
	t.slabs = append(t.slabs, max(0, kernelMemory()-kernelBefore))
	return nil
}

// sample are Services that tell whether all are served: at most so many, evenly spread. kube-proxy programs them in
// an order of its own.
func (t *turn) sample() (sample []int) {
	const most = 100
	n := min(t.services, most)
	for j := range n {
		sample = append(sample, j*t.services/n)
	}
	return sample
}

// addOne measures from the watch event to the first connection.
func (t *turn) addOne() error {
	i, s := t.stock.another()
	wait := t.arena.expect([]int{i}, additionLimit, t.proxy.Ended())
	begin := time.Now()
	if err := t.stock.Add(s); err != nil {
		return err
	}
	answered, err := wait()
	if err != nil {
		return err
	}
	t.added = append(t.added, answered.Sub(begin).Seconds())
	return nil
}

// quiet waits until the proxy does nothing for longer than its minSyncPeriod, so that neither delays what comes next,
// and returns when that began.
func (t *turn) quiet() (idle time.Time, err error) {
	const window, nothing = 1100 * time.Millisecond, 100 * time.Millisecond
	for end := time.Now().Add(firstSyncLimit); time.Now().Before(end); {
		before, err := t.proxy.Usage()
		if err != nil {
			return idle, err
		}
		idle = time.Now()
		letPass(window)
		after, err := t.proxy.Usage()
		if err != nil {
			return idle, err
		}
		if after.CPU-before.CPU < nothing {
			return idle, nil
		}
	}
	return idle, errors.New("the proxy is busy without end")
}

// programStart is what starting a small program takes: in the test kernel more than elsewhere.
func programStart(b *testing.B) string {
	var took Series
	for range 20 {
		begin := time.Now()
		if out, err := exec.Command("ipset", "version").CombinedOutput(); err != nil {
			b.Fatalf("ipset version: %v: %s", err, out)
		}
		took = append(took, time.Since(begin).Seconds())
	}
	return show(took.Duration())
}

// printIPVSControl prints what the proxies need.
func printIPVSControl(b *testing.B, all []*ipvsEntry) {
	b.Helper()
	rows := [][]string{{"Services", "proxy", "start → all answer", "→ idle", "processor time", "one Service added: p50 (most)",
		"ratio of start", "of addition", "resident then", "peak", "peak of largest child", "kernel"}}
	sizes, medians := map[string][]float64{}, map[string][]float64{}
	var ours *ipvsEntry
	for _, e := range all {
		if e.name == ipvsRivals()[0].name {
			ours = e
		}
		rows = append(rows, []string{fmt.Sprint(e.services), e.name, show(e.start.Duration()), show(e.idle.Duration()), show(e.cpu.Duration()),
			fmt.Sprintf("%s (%s)", show(e.added.Duration()), show(quantile(e.added, 1))),
			e.start.Ratio(ours.start).String(), e.added.Ratio(ours.added).String(),
			megabytes(e.settled), megabytes(e.peak), e.child(), megabytes(e.slabs)})
		sizes[e.name], medians[e.name] = append(sizes[e.name], float64(e.services)), append(medians[e.name], Series(e.added).Median())
	}
	printTable(fmt.Sprintf("start and addition: medians of up to %d rounds, %d additions each; ratios to Fairlead; "+
		"a program like ipset, of which kube-proxy starts many, takes %s here", roundsOf(b, ipvsRounds), additions, programStart(b)), rows...)
	growth := [][]string{{"one Service added", "largest / smallest", "exponent"}}
	for _, r := range ipvsRivals() {
		if y := medians[r.name]; len(y) > 1 {
			growth = append(growth, []string{r.name, fmt.Sprintf("%.2f", y[len(y)-1]/y[0]),
				fmt.Sprintf("%.3f", Exponent(sizes[r.name], y))})
		}
	}
	printTable("growth with the number of Services", growth...)
}
