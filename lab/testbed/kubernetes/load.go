package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// Load is a steady stream of short connections: from each place to each address, one every interval,
// whether or not those before have ended.
type Load struct {
	bed   *testbed.Bed
	stop  context.CancelFunc
	group sync.WaitGroup

	mu       sync.Mutex
	start    time.Time
	answered map[string]int // by backend
	failures []Failure
	changed  chan struct{} // closed and replaced when an answer came
}

// LoadSpec describes a Load.
type LoadSpec struct {
	From     []testbed.Place
	To       []netip.AddrPort
	Interval time.Duration // between two connections from one place to one address
	Timeout  time.Duration // of one connection; 0: testbed.DefaultTimeout
}

// Failure is a connection that was not answered.
type Failure struct {
	At   time.Duration // after the load's start
	From testbed.Place
	To   netip.AddrPort
	How  string // "refused", "timed out", "unreachable"
}

func (f Failure) String() string {
	return fmt.Sprintf("%6dms %s to %s: %s", f.At.Milliseconds(), f.From, f.To, f.How)
}

// StartLoad starts a load. Stop ends it.
func StartLoad(ctx context.Context, bed *testbed.Bed, s LoadSpec) *Load {
	ctx, stop := context.WithCancel(ctx)
	l := &Load{bed: bed, stop: stop, start: time.Now(), answered: map[string]int{}, changed: make(chan struct{})}
	for _, from := range s.From {
		for _, to := range s.To {
			probe := testbed.Probe{From: from, To: to, Timeout: s.Timeout}
			l.group.Go(func() { l.stream(ctx, probe, s.Interval) })
		}
	}
	return l
}

func (l *Load) stream(ctx context.Context, p testbed.Probe, interval time.Duration) {
	next := time.NewTicker(interval)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
			l.group.Go(func() { l.probe(context.WithoutCancel(ctx), p) })
		}
	}
}

func (l *Load) probe(ctx context.Context, p testbed.Probe) {
	at := time.Since(l.start)
	outcome, err := l.bed.Probe(ctx, p)
	how := outcome.String()
	if err != nil {
		how = err.Error()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || outcome.Result != testbed.Answered {
		l.failures = append(l.failures, Failure{At: at, From: p.From, To: p.To, How: how})
		return
	}
	l.answered[outcome.Backend]++
	close(l.changed)
	l.changed = make(chan struct{})
}

// Start is when the load started.
func (l *Load) Start() time.Time { return l.start }

// AwaitAnswers returns when n more connections have been answered.
func (l *Load) AwaitAnswers(ctx context.Context, n int) error {
	for range n {
		l.mu.Lock()
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Report is what a Load has seen.
type Report struct {
	Answered map[string]int // by backend
	Failures []Failure      // by time
}

// Report is what there was so far, without connections that are under way.
func (l *Load) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	failures := slices.SortedFunc(slices.Values(l.failures), func(a, b Failure) int { return int(a.At - b.At) })
	return Report{Answered: maps.Clone(l.answered), Failures: failures}
}

// Stop ends the load, waits for what is under way and reports.
func (l *Load) Stop() Report {
	l.stop()
	l.group.Wait()
	return l.Report()
}

// Total is the number of connections that were answered.
func (r Report) Total() (n int) {
	for _, count := range r.Answered {
		n += count
	}
	return n
}

func (r Report) String() string {
	const most = 20
	var s strings.Builder
	fmt.Fprintf(&s, "%d answered by %d backends, %d failed\n", r.Total(), len(r.Answered), len(r.Failures))
	for i, f := range r.Failures {
		if i == most {
			fmt.Fprintf(&s, "… and %d more\n", len(r.Failures)-most)
			break
		}
		fmt.Fprintln(&s, f)
	}
	return s.String()
}
