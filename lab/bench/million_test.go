package bench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

const (
	millionSizes  = "100,1000,10000,100000" // sizesVariable: each Service has ten endpoints
	millionPlanes = "nftables,ebpf"

	planesVariable = "FAIRLEAD_BENCH_PLANES" // of Fairlead
	churnVariable  = "FAIRLEAD_BENCH_CHURN"  // how long endpoints change: "10m"

	steadyRate  = 200 // changes a second, each of another Service, of which
	steadyProbe = 10  // one of so many is probed
)

// BenchmarkMillion is how Fairlead grows up to a million endpoints, which it gets from a real API server:
//
//	for each size and plane, on a node of its own
//	  start ─► changes, one at a time ─► idle ─► SIGKILL, a change, start ─► switch, and back ─► changes all the time
func BenchmarkMillion(b *testing.B) {
	for _, n := range sizesOf(b, millionSizes) {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportMetric(0, "ns/op")
			c := newCluster(b, n)
			c.cgroup = true
			rows := [][]string{millionHeader(n)}
			for mode := range strings.SplitSeq(cmp.Or(os.Getenv(planesVariable), millionPlanes), ",") {
				k := newContestant(b, rival{name: mode, mode: mode, program: buildDaemon, args: fairleadArgs,
					env: func(*testing.B) []string { return nil }, pause: 50 * time.Millisecond, switches: true})
				m := million{to: map[bool]string{true: "ebpf", false: "nftables"}[mode == "nftables"]}
				measure := func(r *run, ctx context.Context, o kubernetes.ProxyOptions) error { return m.measure(ctx, r, o) }
				if err := k.run(b, c, measure); err != nil {
					b.Errorf("%s: %v", mode, err)
					continue
				}
				rows = append(rows, m.row(k))
				printTable("one of them", rows[0], rows[len(rows)-1])
			}
			printTable("a million endpoints", rows...)
		})
	}
}

// million are figures that no other benchmark has.
type million struct {
	to                        string        // the other plane
	alone                     time.Duration // the API server's answer, to a client that does nothing with it
	behind, behindAgain       time.Duration // from the end of its answer to the proxy until all is in force; after SIGKILL
	startPeak                 float64       // bytes
	idle                      float64       // processors
	accepted, switched, back  time.Duration // after SIGKILL, and by the command
	asked, failed             int           // connections while the plane changed
	single, many              time.Duration // 99 % of changes take no longer from their arrival to the kernel; of many
	rate                      float64       // changes a second, as many as the API server took
	early, late, acceptedPeak float64       // bytes: after a tenth of the changes, and after all; after SIGKILL
}

func (m *million) measure(ctx context.Context, r *run, o kubernetes.ProxyOptions) error {
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"the API server's answer", func() error { return m.measureAnswer(ctx, r.cluster) }},
		{"start", func() error { return m.measureStart(ctx, r, o) }},
		{"one change", func() (err error) {
			m.single, err = r.programming(ctx, func() error { return r.measureSingle(ctx) })
			return err
		}},
		{"idle", func() error { return m.measureIdle(r) }},
		{"SIGKILL", func() error { return m.measureKill(ctx, r, o) }},
		{"switch", func() error { return m.measureSwitch(ctx, r) }},
		{"changes", func() (err error) {
			m.many, err = r.programming(ctx, func() error { return m.measureChanges(ctx, r) })
			return err
		}},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		progress("%d Services: %s: %s: start %.3g s with %.3g s of processor time, settled %.4g; %+v; one change %v",
			r.services, r.name, step.name, r.start, r.startCPU, r.settled, *m, r.single.event)
	}
	return r.proxy.Kill()
}

// measureAnswer reads all objects as they come, and does nothing with them.
func (m *million) measureAnswer(ctx context.Context, c *cluster) error {
	begin := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for resource, from := range map[string]rest.Interface{
		"services": c.client.CoreV1().RESTClient(), "endpointslices": c.client.DiscoveryV1().RESTClient(),
	} {
		group.Go(func() error {
			body, err := from.Get().Resource(resource).Param("resourceVersion", "0").Stream(ctx)
			if err != nil {
				return err
			}
			defer body.Close()
			_, err = io.Copy(io.Discard, body)
			return err
		})
	}
	err := group.Wait()
	m.alone = time.Since(begin)
	return err
}

func (m *million) measureStart(ctx context.Context, r *run, o kubernetes.ProxyOptions) error {
	begin := time.Now()
	if err := r.measureStart(ctx, o); err != nil {
		return err
	}
	m.behind = begin.Add(r.start.Duration()).Sub(r.relay.Busy())
	u, err := r.proxy.Usage()
	m.startPeak = float64(u.Peak)
	return err
}

// programming is the limit in the agent's histogram below which 99 % of the changes are that f makes.
func (r *run) programming(ctx context.Context, f func() error) (time.Duration, error) {
	before, err := r.programmed(ctx)
	if err == nil {
		err = f()
	}
	if err != nil {
		return 0, err
	}
	after, err := r.programmed(ctx)
	all := after[math.Inf(1)] - before[math.Inf(1)]
	for _, limit := range slices.Sorted(maps.Keys(after)) {
		if after[limit]-before[limit] >= 0.99*all {
			return time.Duration(limit * float64(time.Second)), err
		}
	}
	return 0, err
}

// programmed is how many changes took no longer than some limits, in seconds, from their arrival to the kernel.
func (r *run) programmed(ctx context.Context) (map[float64]float64, error) {
	_, body, err := r.proxy.Get(ctx, netip.MustParseAddrPort("127.0.0.1:10249"), "/metrics")
	counts := map[float64]float64{}
	for line := range strings.Lines(string(body)) {
		var le string
		var n float64
		if _, err := fmt.Sscanf(line, "fairlead_programming_duration_seconds_bucket{le=%q} %f", &le, &n); err == nil {
			limit, _ := strconv.ParseFloat(le, 64) // +Inf is one
			counts[limit] = n
		}
	}
	return counts, err
}

// measureIdle is what audits cost, and all else that goes on.
func (m *million) measureIdle(r *run) error {
	letPass(15 * time.Second) // the engine finishes its start meanwhile
	before, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	letPass(idle)
	after, err := r.proxy.Usage()
	m.idle = (after.CPU - before.CPU).Seconds() / idle.Seconds()
	return err
}

// measureKill has a change come while there is no process.
func (m *million) measureKill(ctx context.Context, r *run, o kubernetes.ProxyOptions) (err error) {
	i := r.pick()
	if err := r.proxy.Kill(); err != nil {
		return err
	}
	if err := r.toggle(ctx, i); err != nil {
		return err
	}
	if _, err := r.saw(i); err != nil {
		return err
	}
	begin := time.Now()
	if r.proxy, err = kubernetes.StartProxy(ctx, o); err != nil {
		return err
	}
	if err := r.allRight(); err != nil {
		return err
	}
	m.accepted, m.behindAgain = time.Since(begin), time.Since(r.relay.Busy())
	letPass(settleTime)
	u, err := r.proxy.Usage()
	m.acceptedPeak = float64(u.Peak)
	return err
}

// measureSwitch changes the plane, and changes it back, while a client opens connections.
func (m *million) measureSwitch(ctx context.Context, r *run) error {
	i := r.pick()
	if !r.cluster.open[i] {
		if err := r.toggle(ctx, i); err != nil {
			return err
		}
		if _, err := r.saw(i); err != nil {
			return err
		}
	}
	if err := r.allRight(); err != nil {
		return err
	}
	asking, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return r.bed.Do(clientPod, func() error { return m.ask(asking, netip.AddrPortFrom(serviceAddr(i), servicePort)) })
	})
	var err error
	if m.switched, err = r.switchTo(ctx, m.to); err == nil {
		m.back, err = r.switchTo(ctx, r.mode)
	}
	stop()
	return cmp.Or(err, group.Wait())
}

// ask opens a connection every millisecond.
func (m *million) ask(ctx context.Context, to netip.AddrPort) error {
	if err := blockSignals(); err != nil {
		return err
	}
	for begin := time.Now(); ctx.Err() == nil; {
		at := time.Since(begin)
		open, refused, err := connects(to, time.Second)
		if err != nil {
			return err
		}
		if m.asked++; !open {
			m.failed++
			progress("a connection failed after %v of switching, refused: %t", at, refused)
		}
		letPass(time.Millisecond)
	}
	return nil
}

func (r *run) switchTo(ctx context.Context, plane string) (time.Duration, error) {
	begin := time.Now()
	out, err := r.bed.Command(ctx, testbed.Node, r.path, "switch", plane, "--control-socket", r.socket).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("to %s: %w: %s", plane, err, out)
	}
	return time.Since(begin), nil
}

// measureChanges changes many Services a second, and looks on how some of them follow.
func (m *million) measureChanges(ctx context.Context, r *run) error {
	length, err := time.ParseDuration(cmp.Or(os.Getenv(churnVariable), "1m"))
	if err != nil {
		return fmt.Errorf("%s: %w", churnVariable, err)
	}
	rested := make(chan int, len(r.cluster.open)) // Services that are as they should be
	for i := range r.cluster.open {
		rested <- i
	}
	before, err := r.proxy.Usage()
	if err != nil {
		return err
	}
	var lock sync.Mutex
	var took, events Series
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(steadyRate) // the API server may be too slow
	begin, all := time.Now(), int(length.Seconds()*steadyRate)
	for n := range all {
		letPass(time.Until(begin.Add(time.Duration(n) * time.Second / steadyRate)))
		if n == all/10 {
			u, err := r.proxy.Usage()
			if err != nil {
				return err
			}
			m.early = float64(u.RSS)
		}
		if n%steadyProbe != 0 || len(rested) == 0 {
			i, endpoint, a := r.turn()
			group.Go(func() error { return r.patch(ctx, i, endpoint, a) })
			continue
		}
		i := <-rested
		a := r.flip(i)
		v := r.await(i, r.cluster.open[i])
		group.Go(func() error {
			if err := r.patch(ctx, i, 0, a); err != nil {
				return err
			}
			d, event, err := r.seen(i, v)
			lock.Lock()
			defer lock.Unlock()
			took, events = append(took, d), append(events, event)
			rested <- i
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	r.churn.add(took, events)
	lasted := time.Since(begin)
	after, err := r.proxy.Usage()
	m.rate, m.late = float64(all)/lasted.Seconds(), float64(after.RSS)
	r.churnCPU = append(r.churnCPU, (after.CPU-before.CPU).Seconds()/lasted.Seconds())
	r.peak = append(r.peak, float64(after.Peak))
	return err
}

func millionHeader(n int) []string {
	return []string{fmt.Sprintf("%d × %d", n, perService), "API server's answer alone", "start", "after its answer", "processor time", "settled",
		"peak", "change, from watch event: p50 (p99)", "in the agent: p99 at most", "idle", "SIGKILL → change in force", "after the answer", "peak then", "switch", "back",
		"failed of asked", fmt.Sprintf("under changes, of %d/s: rate", steadyRate), "from watch event", "in the agent: p99 at most", "processors",
		"memory after a tenth", "at the end", "peak"}
}

func (m *million) row(k *contestant) []string {
	bytes := func(n float64) string { return megabytes(Series{n}) }
	return []string{
		k.name, show(m.alone), show(k.start.Duration()), show(m.behind), show(k.startCPU.Duration()), megabytes(k.settled),
		bytes(m.startPeak), both(k.single.allEvent), show(m.single), fmt.Sprintf("%.2f %%", 100*m.idle), show(m.accepted), show(m.behindAgain),
		bytes(m.acceptedPeak), show(m.switched), show(m.back), fmt.Sprintf("%d of %d", m.failed, m.asked), fmt.Sprintf("%.0f/s", m.rate),
		both(k.churn.allEvent), show(m.many), fmt.Sprintf("%.2f", k.churnCPU.Median()), bytes(m.early), bytes(m.late), megabytes(k.peak),
	}
}
