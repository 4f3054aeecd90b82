// Package load keeps a virtual cluster busy while something is done to its node, and counts what clients notice of it.
//
//	Serve ─ pods that answer with their names, and echo ◄──────────────────────────┐
//	Start ─ workers: short connections, streams, sockets of UDP, sticky clients ───┘
//	  │        │ each answer, failure, reset, change of the backend
//	  │        ▼
//	  │     a count of each kind ──► Settle: everybody has been answered again
//	  └ Mark: what is done now ────► Report: what failed, when, and how long after which step
//
// A stream carries data both ways all the time, before what was sent has come back, and each byte is compared. Who asks
// a Service with session affinity must be answered by one pod, and so must a socket of UDP that lives on: for those who
// talk by QUIC or DTLS another backend is the end of the connection.
package load

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// Path is who asks whom.
type Path struct {
	From testbed.Place
	To   netip.AddrPort
}

func (p Path) String() string { return fmt.Sprintf("%s to %s", p.From, p.To) }

// Spec describes a Load. All its destinations are to lead to pods of Serve, both by TCP and by UDP.
type Spec struct {
	// Paths are used by short connections, streams and sockets of UDP.
	Paths []Path
	// Sticky are paths to Services with session affinity: short connections and fresh sockets of UDP.
	Sticky []Path
	// Streams is how many there are, spread over Paths; 0: 200.
	Streams int
	// Interval is the time between two short connections of one path; 0: 40 ms.
	Interval time.Duration
	// Pause is the time between two chunks of one stream, and between two requests of one socket; 0: 100 ms.
	Pause time.Duration
	// Timeout is how long a client waits that sends again what was not answered: for a connection, for the next byte of a
	// stream, or for the answer to a datagram; 0: 20 s.
	Timeout time.Duration
}

func (s *Spec) defaults() {
	fill(&s.Streams, 200)
	fill(&s.Interval, 40*time.Millisecond)
	fill(&s.Pause, 100*time.Millisecond)
	fill(&s.Timeout, 20*time.Second)
}

func fill[T comparable](value *T, standard T) {
	if zero := *new(T); *value == zero {
		*value = standard
	}
}

// Load is a load that goes on until Stop.
type Load struct {
	bed     *testbed.Bed
	spec    Spec
	pattern pattern
	ctx     context.Context // Stop ends it
	stop    context.CancelFunc
	group   sync.WaitGroup

	mu      sync.Mutex
	start   time.Time
	step    string
	since   time.Time // when it began
	counts  [kinds]Count
	faults  []Fault
	workers map[*worker]struct{}
	changed chan struct{} // closed and replaced when somebody waits and something has happened
	streams int           // that have begun
}

// Start starts a load. It returns when all streams are open and everybody has been answered, or with an error, and
// then there is none.
func Start(ctx context.Context, bed *testbed.Bed, s Spec) (*Load, error) {
	s.defaults()
	l := &Load{
		bed: bed, spec: s, pattern: newPattern(), start: time.Now(), step: "start", workers: map[*worker]struct{}{},
	}
	l.since = l.start
	l.ctx, l.stop = context.WithCancel(ctx)
	if err := l.Open(s.Streams); err != nil {
		l.Stop()
		return nil, err
	}
	for _, path := range s.Paths {
		l.every(s.Interval, l.worker(Connections, path), l.connect)
		l.every(s.Pause, l.worker(Datagrams, path), l.ask)
		for _, connected := range []bool{true, false} {
			l.converse(l.worker(Sockets, path), connected)
		}
	}
	for _, path := range s.Sticky {
		l.every(s.Pause, l.worker(StickyTCP, path), l.connect)
		l.every(s.Pause, l.worker(StickyUDP, path), l.ask)
	}
	if err := l.Settle(ctx, 1); err != nil {
		l.Stop()
		return nil, err
	}
	return l, nil
}

// Mark says what is done from now on.
func (l *Load) Mark(step string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.step, l.since = step, time.Now()
}

// Elapsed is how long it has been going on.
func (l *Load) Elapsed() time.Duration { return time.Since(l.start) }

// Settle returns when each worker has had n more outcomes, answers or others, of what it began meanwhile.
func (l *Load) Settle(ctx context.Context, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	targets := map[*worker]int{}
	for w := range l.workers {
		targets[w] = w.outcomes + w.pending + n
	}
	for {
		reached := true
		for w, target := range targets {
			if _, alive := l.workers[w]; alive && w.outcomes < target {
				reached = false
				break
			}
		}
		if reached {
			return nil
		}
		if err := l.await(ctx); err != nil {
			return err
		}
	}
}

// await waits with the lock given back until something has happened.
func (l *Load) await(ctx context.Context) error {
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	changed := l.changed
	l.mu.Unlock()
	defer l.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stop ends the load in order: what is under way is awaited, and streams end when all that was sent has come back.
func (l *Load) Stop() Report {
	l.Mark("stop")
	l.stop()
	l.group.Wait()
	return l.Report()
}

// worker is a client.
type worker struct {
	kind Kind
	Path
	pending  int       // begun, without an outcome
	outcomes int       // answers and failures
	backend  string    // who answered first, for those that should stay with it
	opened   time.Time // of a stream; zero: of nothing that stays
}

func (l *Load) worker(kind Kind, p Path) *worker {
	w := &worker{kind: kind, Path: p}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.workers[w] = struct{}{}
	return w
}

// ahead is how much a client begins before what it began earlier has ended: short connections, datagrams, or chunks of
// a stream. Without a limit a machine that falls behind for a moment would be buried under what is asked of it.
const ahead = 4

// every has a worker do something at a steady rate, whether or not what it did before has ended, within that limit.
func (l *Load) every(interval time.Duration, w *worker, do func(*worker)) {
	l.group.Go(func() {
		defer l.retire(w)
		next := time.NewTicker(interval)
		defer next.Stop()
		for {
			select {
			case <-l.ctx.Done():
				return
			case <-next.C:
				if l.begin(w) {
					l.group.Go(func() { do(w) })
				}
			}
		}
	})
}

// begin counts one more attempt, unless there are too many.
func (l *Load) begin(w *worker) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.pending >= ahead {
		return false
	}
	w.pending++
	l.counts[w.kind].Attempts++
	return true
}

// retire is the end of a worker.
func (l *Load) retire(w *worker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.workers, w)
	l.happened()
}

// answered notes who answered, and how long it took since it was asked or since the answer before.
func (l *Load) answered(w *worker, backend string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.counts[w.kind]
	c.Answered++
	c.Longest = max(c.Longest, took)
	if w.kind.stays() && w.backend != "" && w.backend != backend {
		c.Moved++
		l.fault(w, Fault{What: fmt.Sprintf("moved from %s to %s", w.backend, backend), Moved: true, Took: took})
	}
	w.backend = backend
	l.outcome(w)
}

// failed notes that somebody was not answered.
func (l *Load) failed(w *worker, err error, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.counts[w.kind]
	if isReset(err) {
		c.Reset++
	} else {
		c.Failed++
	}
	l.fault(w, Fault{What: err.Error(), Took: took, Reset: isReset(err)})
	l.outcome(w)
}

// resent notes that a datagram, or its answer, was lost.
func (l *Load) resent(w *worker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[w.kind].Resent++
}

func (l *Load) outcome(w *worker) {
	w.outcomes++
	w.pending = max(0, w.pending-1)
	l.happened()
}

func (l *Load) happened() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// fault notes what went wrong with whom, and when.
func (l *Load) fault(w *worker, f Fault) {
	now := time.Now()
	f.Kind, f.Path = w.kind, w.Path
	f.Step, f.Since, f.At = l.step, now.Sub(l.since), now.Sub(l.start)
	f.Began = f.At - f.Took
	if !w.opened.IsZero() {
		f.Began = w.opened.Sub(l.start)
	}
	l.faults = append(l.faults, f)
}
