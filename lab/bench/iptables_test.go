package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// BenchmarkIPTables measures both back ends of iptables, some of it beside the real kube-proxy.
func BenchmarkIPTables(b *testing.B) {
	b.Run("connect", iptablesConnect)
	b.Run("change", iptablesChange)
	b.Run("many", iptablesMany)
	b.Run("jitter", iptablesJitter)
}

// iptablesSize is the number of Services where there is one size: that of sizesVariable, or 10,000.
func iptablesSize(b *testing.B) int {
	b.Helper()
	text := os.Getenv(sizesVariable)
	if text == "" {
		return 10_000
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < probedServices {
		b.Fatalf("%s: %q is not a number of Services (at least %d)", sizesVariable, text, probedServices)
	}
	return n
}

// backends are those of iptables.
func backends() []iptables.Backend { return []iptables.Backend{iptables.Legacy, iptables.NFTables} }

// endpointNet are addresses that all lead to the server of a treeArena.
var endpointNet = netip.MustParsePrefix("10.130.0.0/15")

// newTreeArena is an arena with one server, which has all addresses of endpointNet, too.
func newTreeArena(b *testing.B) *arena {
	b.Helper()
	server := testbed.PodSpec{Name: openPod, Addrs: []netip.Addr{podAddrs[openPod], testbed.EmbedV6(podAddrs[openPod])}}
	a := &arena{bed: testbed.Need(b, testbed.Spec{Pods: []testbed.PodSpec{{Name: clientPod}, server}})}
	b.Cleanup(a.close)
	if err := a.bed.Do(openPod, a.listen); err != nil {
		b.Fatal(err)
	}
	command(b, a.bed, openPod, "ip", "route", "add", "local", endpointNet.String(), "dev", "lo")
	command(b, a.bed, testbed.Node, "ip", "route", "add", endpointNet.String(), "via", podAddrs[openPod].String(), "onlink",
		"dev", device(b, a.bed, podAddrs[openPod]))
	err := a.bed.Do(testbed.Node, func() (err error) {
		a.track, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return a
}

// command runs a program somewhere in the cluster.
func command(b *testing.B, bed *testbed.Bed, place testbed.Place, words ...string) string {
	b.Helper()
	out, err := bed.Command(b.Context(), place, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v: %s", words, err, out)
	}
	return string(out)
}

// device is the node's link to a pod.
func device(b *testing.B, bed *testbed.Bed, pod netip.Addr) string {
	words := strings.Fields(command(b, bed, testbed.Node, "ip", "route", "get", pod.String()))
	return words[slices.Index(words, "dev")+1]
}

// target is a client that connects to one address.
func (a *arena) target(to netip.AddrPort) *client {
	return &client{
		arena: a, place: clientPod, protocol: tcp, size: unix.SizeofSockaddrInet4,
		targets: []unix.RawSockaddrInet6{rawSockaddr(to.Addr(), to.Port())},
	}
}

// treeFleet is a State with Services of a number of endpoints each.
func treeFleet(services, endpoints int) *model.State {
	s := model.NewState()
	for i := range services {
		addService(s, i, endpointsOf(i, endpoints))
	}
	s.Guards[testbed.ServiceCIDRs()[0]] = model.Drop
	s.Pods.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	return s
}

func endpointsOf(i, n int) []model.Backend {
	var list []model.Backend
	for e := range n {
		a := nth(endpointNet.Addr(), (i*n+e)%(1<<17))
		list = append(list, model.Backend{Addr: a, Port: podPort, Weight: 1})
	}
	slices.SortFunc(list, model.Backend.Compare)
	return list
}

func addService(s *model.State, i int, list []model.Backend) {
	a, id := serviceAddr(i), poolOf(i)
	s.Frontends[model.Key{Addr: a, Port: servicePort, Protocol: tcp}] = model.Frontend{
		Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.OffCluster,
	}
	s.Pools[id] = model.Pool{Backends: list}
	s.Guards[netip.PrefixFrom(a, 32)] = model.Reject
}

func poolOf(i int) model.PoolID { return model.PoolID{Service: serviceName(i).String() + ":tcp"} }

// plane is one on an arena's node.
func (a *arena) plane(b *testing.B, backend iptables.Backend) dataplane.Dataplane {
	b.Helper()
	var plane dataplane.Dataplane
	err := a.bed.Do(testbed.Node, func() (err error) {
		plane, err = iptables.New(iptables.Options{Backend: backend})(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := plane.Close(); err != nil {
			b.Error(err)
		}
	})
	return plane
}

// serve has a plane hold a State on an arena's node, and returns it and what that took.
func (a *arena) serve(b *testing.B, backend iptables.Backend, s *model.State) (dataplane.Dataplane, time.Duration) {
	b.Helper()
	plane := a.plane(b, backend)
	begin := time.Now()
	if err := plane.Sync(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	return plane, time.Since(begin)
}

// serveKubeProxy has the real kube-proxy serve n Services on an arena's node, and returns the last one.
func (a *arena) serveKubeProxy(b *testing.B, n int) (last netip.AddrPort) {
	b.Helper()
	c := newCluster(b, n)
	relay, err := c.plane.Serve(a.bed)
	if err != nil {
		b.Fatal(err)
	}
	kubeconfig, err := relay.Kubeconfig(b.TempDir(), kubernetes.KubeProxy())
	if err != nil {
		b.Fatal(err)
	}
	p, err := kubernetes.StartProxy(b.Context(), kubernetes.ProxyOptions{
		Bed: a.bed, Command: kubernetes.KubeProxyCommand(kubernetes.NeedParts(b), kubeconfig, "iptables"), Env: legacyIptables(b),
	})
	if err != nil {
		b.Fatal(err)
	}
	eventually.Taking(startLimit).Nil(b, "kube-proxy makes the Services", func() error {
		var count int
		if count, last = a.kubeServices(b); count != n {
			return fmt.Errorf("it has made %d of %d:\n%s", count, n, lastWords(p.Log()))
		}
		return nil
	})
	if err := p.Kill(); err != nil { // its rules stay
		b.Fatal(err)
	}
	return last
}

// kubeServices counts the Services in the list of kube-proxy's mode iptables, and finds the last one.
func (a *arena) kubeServices(b *testing.B) (count int, last netip.AddrPort) {
	b.Helper()
	rules := command(b, a.bed, testbed.Node, "iptables-legacy-save", "-t", "nat")
	for line := range strings.Lines(rules) {
		if words := strings.Fields(line); strings.HasPrefix(line, "-A KUBE-SERVICES -d ") && strings.Contains(line, "svc-") {
			count++
			last = netip.AddrPortFrom(netip.MustParsePrefix(words[3]).Addr(), servicePort)
		}
	}
	return count, last
}

// iptablesConnect compares what it takes to connect to the last Service, by the tree and by the
// list of the real kube-proxy.
func iptablesConnect(b *testing.B) {
	pod := netip.AddrPortFrom(podAddrs[openPod], podPort)
	variants := []Variant{
		{direct, newTreeArena(b).target(pod).slice},
		{"direct again (A/A)", newTreeArena(b).target(pod).slice},
	}
	add := func(name string, c *client) { variants = append(variants, Variant{name, c.slice}) }
	last := func(n int) netip.AddrPort { return netip.AddrPortFrom(serviceAddr(n-1), servicePort) }
	const manyEndpoints = 1000
	rivalSize := iptablesSize(b)
	for _, backend := range backends() {
		for _, n := range slices.Compact([]int{1000, rivalSize, 30_000}) {
			endpoints := 2
			if n == rivalSize {
				endpoints = perService
			}
			a, s := newTreeArena(b), treeFleet(n, endpoints)
			addService(s, n, endpointsOf(0, manyEndpoints))
			a.serve(b, backend, s)
			add(fmt.Sprintf("%s, last of %d", backend, n), a.target(last(n)))
			if n == 1000 {
				add(fmt.Sprintf("%s, %d endpoints", backend, manyEndpoints), a.target(last(n+1)))
			}
		}
		progress("%s is ready", backend)
	}
	rival := newTreeArena(b)
	add("kube-proxy", rival.target(rival.serveKubeProxy(b, rivalSize)))
	runtime.GC()
	names := variantNames(variants)
	samples, err := Interleave(variants, rounds(b, 40))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{"", "p50", "ratio to direct", "extra"}}
	for _, name := range names {
		s := samples.Series(name, 0.5)
		rows = append(rows, []string{name, show(s.Duration()), s.Ratio(samples.Series(direct, 0.5)).String(),
			show(s.minus(samples.Series(direct, 0.5)).Duration())})
	}
	printTable("connect() to one Service: medians of rounds", rows...)
	extra := func(name string) Series { return samples.Series(name, 0.5).minus(samples.Series(direct, 0.5)) }
	for _, backend := range backends() {
		name := func(n int) string { return fmt.Sprintf("%s, last of %d", backend, n) }
		b.ReportMetric(extra("kube-proxy").Duration().Seconds()/extra(name(rivalSize)).Duration().Seconds(),
			"times-cheaper-"+string(backend))
		b.ReportMetric(samples.Series(name(30_000), 0.5).Ratio(samples.Series(name(1000), 0.5)).Median, "growth-"+string(backend))
		many := samples.Series(fmt.Sprintf("%s, %d endpoints", backend, manyEndpoints), 0.5)
		b.ReportMetric(many.Ratio(samples.Series(name(1000), 0.5)).Median, "endpoints-"+string(backend))
	}
}

func variantNames(variants []Variant) (names []string) {
	for _, v := range variants {
		names = append(names, v.Name)
	}
	return names
}

// minus is what is more than a control, in each round.
func (s Series) minus(control Series) (more Series) {
	for i := range s {
		more = append(more, s[i]-control[i])
	}
	return more
}

// changer changes endpoints of a plane's Services, one at a time.
type changer struct {
	plane dataplane.Dataplane
	state *model.State
	n     int
}

func (c *changer) change(ctx context.Context) (time.Duration, error) {
	c.n++
	id := poolOf(c.n * 7919 % (len(c.state.Pools) - 1)) // not the last one
	pool := c.state.Pools[id]
	pool.Backends = slices.Clone(pool.Backends)
	i := rand.IntN(len(pool.Backends))
	pool.Backends[i].Addr = nth(netip.MustParseAddr("10.200.0.0"), c.n)
	slices.SortFunc(pool.Backends, model.Backend.Compare)
	change := model.Change{Pools: model.Delta[model.PoolID, model.Pool]{Set: model.Rows[model.PoolID, model.Pool]{{Key: id, Value: pool}}}}
	c.state.Apply(change)
	begin := time.Now()
	err := c.plane.Apply(ctx, c.state, change)
	return time.Since(begin), err
}

// iptablesChange changes one endpoint among 10,000 Services of 10, and measures until the rules are in force. It
// compares that with the real kube-proxy's time from the same event to the answer of the new endpoint.
func iptablesChange(b *testing.B) {
	const perSlice = 20
	services := iptablesSize(b)
	var variants []Variant
	for _, backend := range backends() {
		a, s := newTreeArena(b), treeFleet(services, perService)
		plane, _ := a.serve(b, backend, s)
		c := &changer{plane: plane, state: s}
		variants = append(variants, Variant{string(backend), func() (took []time.Duration, err error) {
			for range perSlice {
				d, err := c.change(b.Context())
				if err != nil {
					return nil, err
				}
				took = append(took, d)
			}
			return took, nil
		}})
	}
	k := &contestant{rival: rivals()[2]}
	k.path, k.vars = k.program(b), k.env(b)
	variants = append(variants, k.changes(b, newCluster(b, services)))
	runtime.GC()
	names := variantNames(variants)
	samples, err := Interleave(variants, rounds(b, 12))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{fmt.Sprintf("%d Services × %d", services, perService), "p50", "p99", "least", "ratio to kube-proxy"}}
	for _, name := range names {
		all := samples.All(name)
		rows = append(rows, []string{name, show(quantile(all, 0.5)), show(quantile(all, 0.99)), show(quantile(all, 0)),
			samples.Series(name, 0.5).Ratio(samples.Series(k.name, 0.5)).String()})
		b.ReportMetric(quantile(all, 0.99).Seconds()*1e3, "ms-p99-"+compact(name))
	}
	printTable("the change of one endpoint", rows...)
}

// changes starts a contestant for good; a slice of it is some changes, from the news to the answer.
func (k *contestant) changes(b *testing.B, c *cluster) Variant {
	ctx := b.Context()
	bed, err := c.newNode(ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = bed.Close() })
	relay, err := c.plane.Serve(bed)
	if err != nil {
		b.Fatal(err)
	}
	kubeconfig, err := relay.Kubeconfig(b.TempDir(), kubernetes.KubeProxy())
	if err != nil {
		b.Fatal(err)
	}
	by, err := c.watch(ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(by.stop)
	r := &run{contestant: k, cluster: c, bystander: by, prober: newProber(bed)}
	b.Cleanup(func() { _ = r.prober.stop() })
	if err := r.measureStart(ctx, kubernetes.ProxyOptions{Bed: bed, Command: k.command(b, k.path, kubeconfig), Env: k.vars}); err != nil {
		b.Fatalf("%s: %v", k.name, err)
	}
	b.Cleanup(func() { _ = r.proxy.Kill() })
	return Variant{k.name, func() (took []time.Duration, err error) {
		const changes = 3
		for range changes {
			i := r.pick()
			v := r.await(i, !r.cluster.open[i])
			if err := r.toggle(ctx, i); err != nil {
				return nil, err
			}
			if _, err := v.wait(changeLimit); err != nil {
				return nil, err
			}
			event, err := r.saw(i)
			if err != nil {
				return nil, err
			}
			took = append(took, time.Duration(afterEvent(v, event)*1e9))
			letPass(r.pause)
		}
		return took, nil
	}}
}

// iptablesMany loads 200,000 endpoints and compares the rate of short connections to 500 Services
// with that beside 10,000.
func iptablesMany(b *testing.B) {
	const few, many, each = 10_000, 200_000, 20
	var variants []Variant
	rows := [][]string{{"back end", "endpoints", "load", "memory of the process", "of the kernel"}}
	for _, backend := range backends() {
		for _, n := range []int{few, many} {
			a, s := newTreeArena(b), treeFleet(n/each, each)
			runtime.GC()
			heap, kernel := heapSize(), kernelMemory()
			_, took := a.serve(b, backend, s)
			runtime.GC()
			rows = append(rows, []string{string(backend), fmt.Sprint(n), show(took),
				megabytes(Series{heapSize() - heap}), megabytes(Series{kernelMemory() - kernel})})
			b.ReportMetric(took.Seconds(), fmt.Sprintf("s-load-%s-%d", backend, n))
			c := a.client(client{place: clientPod, protocol: tcp}, few/each)
			variants = append(variants, Variant{fmt.Sprint(backend, n), c.shortConnections})
		}
	}
	samples, err := Interleave(variants, rounds(b, 40))
	if err != nil {
		b.Fatal(err)
	}
	for _, backend := range backends() {
		ratio := samples.Series(fmt.Sprint(backend, few), 0.5).Ratio(samples.Series(fmt.Sprint(backend, many), 0.5))
		rows = append(rows, []string{string(backend), "rate with many / with few", ratio.String(), "", ""})
		b.ReportMetric(ratio.Median, "rate-"+string(backend))
	}
	printTable("200,000 endpoints", rows...)
}

// shortConnections returns what a connection takes from the client's socket() to the server's close(), on
// average.
func (c *client) shortConnections() ([]time.Duration, error) {
	var took []time.Duration
	var whole time.Duration
	err := c.bed.Do(c.place, func() (err error) {
		if err := unix.PthreadSigmask(unix.SIG_BLOCK, &unix.Sigset_t{Val: [16]uint64{^uint64(0)}}, nil); err != nil {
			return os.NewSyscallError("sigmask", err)
		}
		begin := time.Now()
		for n := 0; n <= batches && err == nil; n++ {
			s := stint{begin: time.Now()}
			err = c.batch(&took)
			s.end = time.Now()
			c.stints = append(c.stints, s)
		}
		whole = time.Since(begin)
		return err
	})
	if err != nil {
		return nil, err
	}
	return []time.Duration{whole / time.Duration(len(took))}, c.track.ConntrackTableFlush(netlink.ConntrackTable)
}

func heapSize() float64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// kernelMemory is what the kernel has for itself: of slabs, of vmalloc, and for each processor.
func kernelMemory() (bytes float64) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var name string
		var kib float64
		if _, err := fmt.Sscan(s.Text(), &name, &kib); err == nil &&
			slices.Contains([]string{"SUnreclaim:", "VmallocUsed:", "Percpu:"}, name) {
			bytes += kib * 1024
		}
	}
	return bytes
}

// iptablesJitter compares the rate of short connections while endpoints change 20 times a second with that while
// nothing changes. The changes come to the plane through an engine as they do in the daemon. An engine whose plane only
// keeps a processor busy for as long tells the cost of the work from that of the changing rules.
func iptablesJitter(b *testing.B) {
	var variants []Variant
	var planes []*metered
	var dips dips
	services := iptablesSize(b)
	for _, backend := range backends() {
		a := newTreeArena(b)
		real := &metered{Dataplane: a.plane(b, backend)}
		planes = append(planes, real)
		all := fleet{services: services, endpoints: apart(perService)}
		few := fleet{services: 100, endpoints: all.endpoints}
		c := a.target(netip.AddrPortFrom(serviceAddr(services-1), servicePort))
		changing, spinning := newChurn(b, a, real, all), newChurn(b, a, &spinner{work: real}, few)
		variants = append(variants,
			Variant{string(backend) + " quiet", c.rate},
			Variant{string(backend) + " quiet again", dips.note(string(backend)+", nothing (A/A)", c, c.rate, real.likely)},
			Variant{string(backend) + " changing", dips.note(string(backend)+", changes", c, changing.beside(c), real.stints)},
			Variant{string(backend) + " beside as much work", spinning.beside(c)})
		progress("%s is ready", backend)
	}
	runtime.GC()
	names := variantNames(variants)
	samples, err := Interleave(variants, rounds(b, 10))
	if err != nil {
		b.Fatal(err)
	}
	rows := [][]string{{"", "a connection", "rate to that when quiet"}}
	for _, name := range names {
		backend, _, _ := strings.Cut(name, " ")
		took := samples.Series(name, 0.5)
		ratio := samples.Series(backend+" quiet", 0.5).Ratio(took)
		rows = append(rows, []string{name, show(took.Duration()),
			fmt.Sprintf("%.3f (%.3f–%.3f)", ratio.Median, ratio.Low, ratio.High)})
		b.ReportMetric(ratio.Median, "rate-"+compact(name))
	}
	for i, backend := range backends() {
		rows = append(rows, []string{string(backend) + ": programmed", fmt.Sprintf("%d times for %d changes, %v each",
			planes[i].times, planes[i].changes, (planes[i].all / time.Duration(max(1, planes[i].times))).Round(time.Millisecond)), ""})
	}
	printTable(fmt.Sprintf("short connections at %d changes a second, %d Services × %d", changeRate, services, perService),
		rows...)
	dips.print(b)
}

// A stint is the time that a few connections took, or one change.
type stint struct{ begin, end time.Time }

// dips are what changes cost within the same two seconds: the rate of all connections, to that of those that
// met no change. So whatever else makes one slice of time slower than another does not count.
type dips struct {
	names []string
	kept  map[string]Series
}

// aftermath is how long after a change connections may still feel it.
const aftermath = 20 * time.Millisecond

// note adds to what is measured how much of the rate is kept beside changes.
func (d *dips) note(name string, c *client, measure func() ([]time.Duration, error), changes func() []stint,
) func() ([]time.Duration, error) {
	d.names = append(d.names, name)
	return func() ([]time.Duration, error) {
		took, err := measure()
		if err != nil {
			return nil, err
		}
		var all, apart Series
		busy := changes()
		for _, s := range c.stints {
			t := s.end.Sub(s.begin).Seconds()
			all = append(all, t)
			if !slices.ContainsFunc(busy, func(b stint) bool { return s.begin.Before(b.end.Add(aftermath)) && s.end.After(b.begin) }) {
				apart = append(apart, t)
			}
		}
		if d.kept == nil {
			d.kept = map[string]Series{}
		}
		d.kept[name] = append(d.kept[name], mean(apart)/mean(all))
		return took, nil
	}
}

func (d *dips) print(b *testing.B) {
	rows := [][]string{{"beside", "rate of all connections to that of those between the changes"}}
	for _, name := range d.names {
		ones := make(Series, len(d.kept[name]))
		for i := range ones {
			ones[i] = 1
		}
		r := d.kept[name].Ratio(ones)
		rows = append(rows, []string{name, fmt.Sprintf("%.4f (%.4f–%.4f)", r.Median, r.Low, r.High)})
		b.ReportMetric(r.Median, "kept-"+compact(name))
	}
	printTable("the same within each two seconds", rows...)
}

// Changes that happen while connections are opened.
const (
	changeRate = 20              // a second
	rateTime   = 2 * time.Second // for which connections are counted
	warmUp     = time.Second     // of changes before that
)

// metered notes what the changes of a plane take.
type metered struct {
	dataplane.Dataplane
	last           atomic.Int64  // processor time of the last one
	all            time.Duration // of all
	times, changes int
	mu             sync.Mutex
	done           []stint // the times of all changes
}

func (m *metered) stints() []stint {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.done)
}

// likely are changes that there might have been lately: as long as the last one, one in a second.
func (m *metered) likely() (stints []stint) {
	length, now := time.Duration(m.last.Load()), time.Now()
	for at := now.Add(-2 * rateTime); at.Before(now); at = at.Add(time.Second) {
		stints = append(stints, stint{at, at.Add(length)})
	}
	return stints
}

func (m *metered) Apply(ctx context.Context, s *model.State, c model.Change) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin, at := processorTime(), time.Now()
	err := m.Dataplane.Apply(ctx, s, c)
	used := processorTime() - begin
	m.mu.Lock()
	m.done = append(m.done, stint{at, time.Now()})
	m.mu.Unlock()
	m.last.Store(int64(used))
	m.all, m.times, m.changes = m.all+used, m.times+1, m.changes+len(c.Pools.Set)
	return err
}

// spinner is a plane that works as long for a change as another one has for its last, and changes nothing.
type spinner struct {
	dataplane.Dataplane // nil
	work                *metered
}

func (*spinner) Sync(context.Context, *model.State) error { return nil }

func (*spinner) Audit(context.Context, *model.State, dataplane.Depth) (dataplane.Report, error) {
	return dataplane.Report{}, nil
}

func (*spinner) Repair(context.Context, *model.State, dataplane.Report) error { return nil }

func (p *spinner) Apply(context.Context, *model.State, model.Change) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for begin, used := processorTime(), p.work.last.Load(); int64(processorTime()-begin) < used; {
	}
	return nil
}

// churn is an engine and the source of what it follows.
type churn struct {
	fleet   fleet
	engine  *engine.Engine
	batches chan service.Batch
	n       int
}

// newChurn has a plane follow a fleet, as in the daemon.
func newChurn(b *testing.B, a *arena, plane dataplane.Dataplane, f fleet) *churn {
	b.Helper()
	c := &churn{fleet: f, batches: make(chan service.Batch)}
	c.engine = engine.New(engine.Options{Source: c, Table: newTable(b), Plane: plane, MaxRest: time.Second})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.engine.Run(ctx) }()
	b.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	c.batches <- f.batch(a.bed)
	if err := c.engine.Do(b.Context(), func(context.Context, engine.View) error { return nil }); err != nil {
		b.Fatal(err)
	}
	return c
}

// Next implements source.Source.
func (c *churn) Next(ctx context.Context) (service.Batch, error) {
	select {
	case batch := <-c.batches:
		return batch, nil
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

// Close implements source.Source.
func (*churn) Close() error { return nil }

// change is news of another endpoint of one of the Services, but for the last one.
func (c *churn) change() service.Batch {
	c.n++
	i := c.n * 7919 % (c.fleet.services - 1)
	addrs := c.fleet.endpoints(i)
	addrs[rand.IntN(len(addrs))] = nth(netip.MustParseAddr("10.200.0.0"), c.n)
	batch := service.Batch{}
	fleet{endpoints: func(int) []netip.Addr { return addrs }}.add(&batch, i)
	return batch
}

// beside is what connections take while there are changes all the time.
func (c *churn) beside(from *client) func() ([]time.Duration, error) {
	return func() ([]time.Duration, error) {
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			c.keepChanging(stop)
		}()
		letPass(warmUp)
		took, err := from.rate()
		close(stop)
		<-stopped
		return took, errors.Join(err, c.settle())
	}
}

func (c *churn) keepChanging(stop chan struct{}) {
	tick := time.NewTicker(time.Second / changeRate)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			c.batches <- c.change()
		}
	}
}

// settle waits until the last change is programmed.
func (c *churn) settle() error {
	return eventually.Taking(changeLimit).Poll(context.Background(), func() error {
		switch s := c.engine.Status(); {
		case s.Error != "":
			return errors.New(s.Error)
		case !s.WaitingSince.IsZero():
			return errors.New("the changes are not programmed")
		}
		return nil
	})
}

// rate is what a connection takes, of all that are opened for a while.
func (c *client) rate() ([]time.Duration, error) {
	var all Series
	c.stints = nil
	for begin := time.Now(); time.Since(begin) < rateTime; {
		took, err := c.shortConnections()
		if err != nil {
			return nil, err
		}
		all = append(all, took[0].Seconds())
	}
	return []time.Duration{time.Duration(mean(all) * 1e9)}, nil
}

func mean(s Series) (mean float64) {
	for _, v := range s {
		mean += v / float64(len(s))
	}
	return mean
}

// processorTime is that of the calling thread.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
