package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// watchersVariable names the numbers of virtual nodes, in place of watcherCounts: "1000" or "100,1000".
const watchersVariable = "FAIRLEAD_BENCH_WATCHERS"

const watcherCounts = "100,1000,2000,4000"

// How virtual nodes are measured.
const (
	crowdServices = 20  // that the nodes follow: few, as benchmarkStarts measures their start
	fullSlice     = 100 // endpoints: the controller makes no larger slices by default
	crowdChanges  = 40  // one at a time
	crowdRate     = 10  // changes a second, for
	crowdSeconds  = 10  // seconds
	zippedNodes   = 1000
	starters      = 10               // nodes that start at once
	idleTime      = 65 * time.Second // a watch has a bookmark each minute
)

// BenchmarkWatchers has many virtual nodes follow a real API server. Each has a connection and the watches of an agent,
// and counts what comes. They share the processors with the server, so that delays are upper bounds.
func BenchmarkWatchers(b *testing.B) {
	b.Run("changes", benchmarkChanges)
	for _, n := range sizesOf(b, "1000,10000") {
		b.Run(fmt.Sprintf("start/services=%d", n), func(b *testing.B) { benchmarkStarts(b, n) })
	}
}

// wave is what a series of changes costs.
type wave struct {
	bytes     float64 // that a node receives for a change
	cpu       float64 // seconds of the API server's for a change
	all, last Series  // delays: of all nodes; of the last one
	ended     int64   // watches that the server ended
}

// stage is a crowd of one size.
type stage struct {
	name   string
	nodes  int
	joined float64 // seconds of the API server's since the stage before
	memory float64 // bytes of the API server
	waves  []wave
}

// stir is a series of changes.
type stir struct {
	name     string
	changes  int
	interval time.Duration               // between two changes; 0: the next one comes once all nodes have the one before
	change   func(context.Context) error // those at an interval are of small slices
}

func benchmarkChanges(b *testing.B) {
	c := newClusterOf(b, crowdServices, map[int]bool{})
	if err := c.create(b.Context(), crowdServices, apart(fullSlice)(crowdServices)); err != nil {
		b.Fatal(err)
	}
	small, full := fmt.Sprintf("%d endpoints", perService), fmt.Sprintf("%d endpoints", fullSlice)
	stirs := []stir{
		{name: small, changes: crowdChanges, change: c.touch},
		{name: full, changes: crowdChanges, change: c.touchFull},
		{name: fmt.Sprintf("%s, %d/s", small, crowdRate), changes: crowdRate * crowdSeconds, interval: time.Second / crowdRate},
	}
	for next := rounds(b, 1); next(); {
		var stages []stage
		w := newCrowd(b, c, false)
		for _, n := range numbersOf(b, watchersVariable, watcherCounts) {
			stages = append(stages, w.stage(b, n, stirs))
		}
		w.reportIdle(b)
		w.close()
		w = newCrowd(b, c, true)
		zipped := w.stage(b, min(zippedNodes, stages[len(stages)-1].nodes), stirs)
		w.close()
		reportMemory(b, stages)
		reportChanges(b, append(stages, zipped), stirs)
		c.reportSizes(b)
	}
}

// touch changes an endpoint of a small slice, and touchFull one of the full slice.
func (c *cluster) touch(ctx context.Context) error {
	i, endpoint, a := c.turn()
	return c.patch(ctx, i, endpoint, a)
}

func (c *cluster) touchFull(ctx context.Context) error {
	c.others++
	return c.patch(ctx, crowdServices, c.others%fullSlice, nth(netip.MustParseAddr("10.200.0.0"), c.others))
}

// stage has the crowd grow, and stirs it.
func (w *crowd) stage(b *testing.B, nodes int, stirs []stir) stage {
	b.Helper()
	begin, before := time.Now(), w.usage(b)
	if err := w.grow(nodes); err != nil {
		b.Fatal(err)
	}
	s := stage{name: fmt.Sprint(nodes), nodes: nodes, joined: (w.usage(b).CPU - before.CPU).Seconds()}
	if w.gzip {
		s.name += ", gzip"
	}
	for _, t := range stirs {
		result, err := w.stir(b, t)
		if err != nil {
			b.Fatalf("%s nodes, %s: %v", s.name, t.name, err)
		}
		s.waves = append(s.waves, result)
	}
	s.memory = float64(w.usage(b).RSS)
	progress("%s virtual nodes took %v", s.name, time.Since(begin).Round(time.Second))
	return s
}

func (w *crowd) usage(b *testing.B) kubernetes.Usage {
	b.Helper()
	u, err := w.plane.APIServerUsage()
	if err != nil {
		b.Fatal(err)
	}
	return u
}

func (w *crowd) stir(b *testing.B, t stir) (result wave, err error) {
	b.Helper()
	before, bytes, ended := w.usage(b), w.received(), w.ended.Load()
	w.tally.clear()
	if t.interval == 0 {
		err = w.oneByOne(b.Context(), t)
	} else {
		err = w.atRate(b.Context(), t)
	}
	result.all, result.last = w.tally.figures()
	result.cpu = (w.usage(b).CPU - before.CPU).Seconds() / float64(t.changes)
	result.bytes = float64(w.received()-bytes) / float64(t.changes*len(w.nodes))
	result.ended = w.ended.Load() - ended
	return result, err
}

func (w *crowd) oneByOne(ctx context.Context, t stir) error {
	for range t.changes {
		all := w.tally.expect(w.listeners())
		if err := t.change(ctx); err != nil {
			return err
		}
		if err := w.await(all); err != nil {
			return err
		}
	}
	return nil
}

func (w *crowd) atRate(ctx context.Context, t stir) error {
	all := w.tally.expect(t.changes * w.listeners())
	group, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	for n := range t.changes {
		letPass(time.Until(begin.Add(time.Duration(n) * t.interval)))
		// The endpoint is chosen here, one after the other; the server may take longer than the interval.
		i, endpoint, a := w.turn()
		group.Go(func() error { return w.patch(ctx, i, endpoint, a) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return w.await(all)
}

// await gives up where watches have ended: what they miss does not come.
func (w *crowd) await(all <-chan struct{}) error {
	select {
	case <-all:
	case <-time.After(changeLimit): //nolint:forbidigo // the limit is part of the experiment
		if w.ended.Load() == 0 {
			return errors.New("some nodes did not hear of a change")
		}
	}
	return nil
}

// reportIdle prints what the largest crowd costs while nothing changes.
func (w *crowd) reportIdle(b *testing.B) {
	b.Helper()
	before, bytes := w.usage(b), w.received()
	letPass(idleTime)
	nodes, seconds := float64(len(w.nodes)), idleTime.Seconds()
	cpu := (w.usage(b).CPU - before.CPU).Seconds() / seconds
	printTable("no changes", []string{"nodes", "bytes a second for a node", "processors busy", "for a node"},
		[]string{fmt.Sprint(len(w.nodes)), fmt.Sprintf("%.1f", float64(w.received()-bytes)/seconds/nodes),
			fmt.Sprintf("%.3f", cpu), show(time.Duration(cpu / nodes * 1e9))})
}

func reportMemory(b *testing.B, stages []stage) {
	b.Helper()
	rows := [][]string{{"nodes", "memory of the API server", "for a node more", "processor time for a node to join"}}
	first, had := stages[0], 0
	for _, s := range stages {
		more := "–"
		if s.nodes > first.nodes {
			each := (s.memory - first.memory) / float64(s.nodes-first.nodes)
			more = fmt.Sprintf("%.0f kB", each/1e3)
			b.ReportMetric(each, "bytes:node")
		}
		joined := s.joined / float64(s.nodes-had)
		rows = append(rows, []string{
			s.name, fmt.Sprintf("%.0f MB", s.memory/1e6), more, show(time.Duration(joined * 1e9)),
		})
		had = s.nodes
	}
	printTable(fmt.Sprintf("nodes that follow %d Services × %d", crowdServices, perService), rows...)
}

func reportChanges(b *testing.B, stages []stage, stirs []stir) {
	b.Helper()
	rows := [][]string{{"nodes", "changes of a slice of", "bytes for a node and change", "PATCH → a node: p50 (p99)",
		"→ the last node: p50 (p99)", "processor time of the API server for a change", "for a node more",
		"watches that the server ended"}}
	for i, t := range stirs {
		first := stages[0]
		for _, s := range stages {
			x, more := s.waves[i], "–"
			if s.nodes > first.nodes {
				each := (x.cpu - first.waves[i].cpu) / float64(s.nodes-first.nodes)
				more = show(time.Duration(each * 1e9))
			}
			rows = append(rows, []string{s.name, t.name, fmt.Sprintf("%.0f", x.bytes), both(x.all), both(x.last),
				show(time.Duration(x.cpu * 1e9)), more, fmt.Sprint(x.ended)})
		}
	}
	printTable("changes, one at a time if no rate is named", rows...)
}

// reportSizes prints what one slice takes in each encoding.
func (c *cluster) reportSizes(b *testing.B) {
	b.Helper()
	rows := [][]string{{"endpoints of a slice", "protobuf", "JSON"}}
	w := newCrowd(b, c, false)
	defer w.close()
	for _, i := range []int{0, crowdServices} {
		// Kube-proxy may not get objects, but list them.
		one := url.Values{"fieldSelector": {"metadata.name=" + serviceName(i).Name}}
		u := url.URL{Path: "/apis/discovery.k8s.io/v1/endpointslices", RawQuery: one.Encode()}
		row := []string{fmt.Sprint(map[bool]int{true: fullSlice, false: perService}[i == crowdServices])}
		for _, accept := range []string{"application/vnd.kubernetes.protobuf", "application/json"} {
			body, err := w.get(w.newNode(), u, accept)
			if err != nil {
				b.Fatal(err)
			}
			n, err := io.Copy(io.Discard, body)
			if err != nil {
				b.Fatal(err)
			}
			body.Close()
			row = append(row, fmt.Sprintf("%d bytes", n))
		}
		rows = append(rows, row)
	}
	printTable("size of a slice", rows...)
}

// benchmarkStarts has some nodes start at once, in each way.
func benchmarkStarts(b *testing.B, n int) {
	c := newClusterOf(b, n, map[int]bool{})
	for next := rounds(b, 1); next(); {
		rows := [][]string{{"lists", "bytes for a node", "processor time of the API server for a node",
			fmt.Sprintf("%d nodes at once take", starters), "peak memory of the API server so far"}}
		for _, way := range []struct {
			name string
			gzip bool
			do   func(*crowd, *virtualNode, string) error
		}{
			{"streaming", false, (*crowd).follow},
			{"streaming, gzip", true, (*crowd).follow},
			{"ordinary", false, (*crowd).list},
			{"ordinary, gzip", true, (*crowd).list},
		} {
			w := newCrowd(b, c, way.gzip)
			begin, before := time.Now(), w.usage(b)
			group := errgroup.Group{}
			for i := range starters {
				node := w.newNode()
				w.nodes = append(w.nodes, node)
				group.Go(func() error { return way.do(w, node, fmt.Sprintf("node-%d", i)) })
			}
			if err := group.Wait(); err != nil {
				b.Fatal(err)
			}
			took, after := time.Since(begin), w.usage(b)
			rows = append(rows, []string{way.name, fmt.Sprint(w.received() / starters),
				show((after.CPU - before.CPU) / starters), show(took), fmt.Sprintf("%.0f MB", float64(after.Peak)/1e6)})
			w.close()
		}
		printTable(fmt.Sprintf("start with %d Services × %d", n, perService), rows...)
	}
}
