package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// TestRun_pairsKilled changes from data planes to others under load, kills the program in the middle of each change,
// and starts it with the new or the old mode. No client notices, but those whose connections the process carries.
func TestRun_pairsKilled(t *testing.T) {
	all := hostPlanes()
	way := everyChange(all[0], func(from served) []served { return others(all, from) })
	for _, stops := range sample.Of(t, tours, parts(way, tours)) {
		t.Run(fmt.Sprint(stops), func(t *testing.T) { newTour(t, 400*time.Millisecond).run(stops) })
	}
}

// TestRun_pairsKilledIPVS does it with IPVS as one of the two.
func TestRun_pairsKilledIPVS(t *testing.T) {
	if needIPVS(t) {
		return
	}
	ipvs := served{"ipvs", ""}
	way := everyChange(ipvs, func(from served) []served {
		if from == ipvs {
			return hostPlanes()
		}
		return []served{ipvs}
	})
	for _, stops := range sample.Of(t, tours, parts(way, tours)) {
		t.Run(fmt.Sprint(stops), func(t *testing.T) {
			tour := newTour(t, time.Second)
			tour.spec.Interval, tour.spec.Pause, tour.spec.Streams = 500*time.Millisecond, time.Second, 36
			tour.run(stops)
		})
	}
}

// tours is in how many tours all changes are made.
const tours = 5

// parts cuts a way through data planes into ways that follow each other: each change is in one of them.
func parts(way []served, n int) (all [][]served) {
	changes := len(way) - 1
	for i := range n {
		all = append(all, way[changes*i/n:changes*(i+1)/n+1])
	}
	return all
}

func others(all []served, but served) []served {
	return slices.DeleteFunc(slices.Clone(all), func(s served) bool { return s == but })
}

// tour leads through data planes by changes in the middle of which the program is killed.
type tour struct {
	*busyMachine
	l       *traffic.Watch
	random  *rand.Rand
	longest time.Duration // for which a change goes on at most, before the program is killed
	kills   []kill
	carries bool // mode userspace has been in force in this process
	streams int  // that it carries
}

// kill is one of them.
type kill struct {
	what         string
	began, ended time.Duration // after the start of the load
	back         time.Duration // when the next process served
	next         served        // what that served by
	carries      bool          // the process may have carried connections
	streams      int           // so many of those that stay
}

func newTour(t *testing.T, longest time.Duration) *tour {
	return &tour{busyMachine: newBusyMachine(t), random: rand.New(rand.NewPCG(sample.Seed(t), 0)), longest: longest}
}

// run makes the changes of a way.
func (r *tour) run(way []served) {
	r.choose(way[0])
	r.serve()
	r.l = r.load()
	for i, to := range way[1:] {
		r.leg(way[i], to)
		if r.Failed() {
			break
		}
	}
	r.judgeKills(r.l.Stop())
}

// everyChange is a way that makes each change once (Hierholzer's algorithm).
func everyChange(first served, next func(from served) []served) (way []served) {
	left := map[served][]served{}
	for stack := []served{first}; len(stack) > 0; {
		at := stack[len(stack)-1]
		if _, known := left[at]; !known {
			left[at] = next(at)
		}
		if n := len(left[at]); n > 0 {
			stack = append(stack, left[at][n-1])
			left[at] = left[at][:n-1]
			continue
		}
		way = append(way, at)
		stack = stack[:len(stack)-1]
	}
	slices.Reverse(way)
	return way
}

// leg goes from one plane to another one.
func (r *tour) leg(from, to served) {
	next := []served{from, to}[r.random.IntN(2)]
	some := r.random.Float64()
	after := time.Duration(some * some * float64(r.longest))
	r.choose(to)
	if from.mode != to.mode {
		r.p.await("changing the data plane")
	}
	time.Sleep(after) //nolint:forbidigo // no event says when to kill it: any moment may be a bad one
	carries := r.kill(fmt.Sprintf("%s to %s, killed after %s", from, to, after), to)
	if !carries { // what is in the kernel serves
		r.answered()
	}
	r.choose(next)
	r.l.Mark(fmt.Sprintf("%s to %s, started with %s", from, to, next))
	r.serve()
	last := &r.kills[len(r.kills)-1]
	last.back, last.next = r.l.Elapsed(), next
	r.carries = next.mode == "userspace"
	r.answered()
	if next != to {
		r.l.Mark(fmt.Sprintf("%s to %s", from, to))
		r.edit(from, to)
		r.carries = r.carries || to.mode == "userspace"
		r.answered()
	}
	r.open(to)
}

// answered waits until all clients have been answered.
func (r *tour) answered() {
	if err := r.l.Settle(r.Context(), 1); err != nil {
		r.Error(err)
	}
}

// open opens a stream on each path.
func (r *tour) open(by served) {
	n := len(r.spec.Paths)
	if err := r.l.Open(n); err != nil {
		r.Error(err)
	}
	if by.mode == "userspace" {
		r.streams += n
	}
}

// kill ends the program in the middle of a change, and reports whether connections pass it.
func (r *tour) kill(what string, to served) (carries bool) {
	r.l.Mark(what)
	k := kill{what: what, began: r.l.Elapsed(), streams: r.streams}
	_ = r.p.Process.Kill()
	_ = r.p.Wait()
	k.ended = r.l.Elapsed()
	k.carries = r.carries || to.mode == "userspace" && r.taken()
	r.kills = append(r.kills, k)
	r.streams = 0
	return k.carries
}

// taken reports whether the rules of mode userspace lead what begins to the process.
func (r *tour) taken() bool {
	list := r.bed.Command(r.Context(), testbed.Node, "nft", "list", "chain", "ip", "fairlead-userspace", "prerouting")
	out, err := list.Output()
	return err == nil && strings.Contains(string(out), "\t\tgoto dispatch\n") // whatever the packet
}

// judgeKills expects that clients noticed nothing, with two exceptions. Connections that a process carried when it was
// killed were reset then. Processes of the node that waited when ebpf came may notice that.
func (r *tour) judgeKills(report traffic.Report) {
	r.Helper()
	streams := make([][]string, len(r.kills))
	var all strings.Builder
	for _, f := range report.Faults {
		i := slices.IndexFunc(r.kills, func(k kill) bool { return k.carries && (k.ends(f) || k.strands(f)) })
		switch {
		case f.Moved && f.Kind == traffic.Sockets:
		case i < 0:
			fmt.Fprintln(&all, f)
		case f.Kind == traffic.Streams:
			streams[i] = append(streams[i], f.String())
		}
	}
	for i, k := range r.kills {
		r.Logf("%s: %d streams reset, carries: %t", k.what, len(streams[i]), k.carries)
		if len(streams[i]) != k.streams {
			r.Errorf("%s: %d of %d streams were reset that the process carried:\n%s", k.what, len(streams[i]), k.streams,
				strings.Join(streams[i], "\n"))
		}
	}
	if all.Len() > 0 {
		r.Errorf("%s%s", report, &all)
		return
	}
	r.Log(report)
}

// ends reports whether a connection was under way, and has ended with the process.
func (k kill) ends(f traffic.Fault) bool {
	return f.Reset && f.Began <= k.ended && f.At >= k.began &&
		slices.Contains([]traffic.Kind{traffic.Connections, traffic.Streams, traffic.AffinityTCP}, f.Kind)
}

// strands reports whether a client was a process of the node that waited for the next process. Mode ebpf would have
// translated its socket, but had to be there when that was connected.
func (k kill) strands(f traffic.Fault) bool {
	return k.next.mode == "ebpf" && f.Path.From == testbed.Node && f.At >= k.began && f.Began <= k.back &&
		f.Kind != traffic.Streams && f.Kind != traffic.Sockets && !f.Moved
}
