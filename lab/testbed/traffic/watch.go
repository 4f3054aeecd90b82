package traffic

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Path is a client and its destination.
type Path struct {
	From     testbed.Place
	To       netip.AddrPort
	Protocol model.Protocol // of a visit; 0: TCP
}

// Paths are those from each place to each address.
func Paths(from []testbed.Place, to []netip.AddrPort) (all []Path) {
	for _, place := range from {
		for _, addr := range to {
			all = append(all, Path{From: place, To: addr})
		}
	}
	return all
}

func (p Path) String() string { return fmt.Sprintf("%s to %s", p.From, p.To) }

// WatchSpec describes a Watch. All its destinations lead to servers of a testbed: those of Paths and Affinity both by
// TCP and by UDP.
type WatchSpec struct {
	// Visits are used by short connections alone, or single datagrams, as their protocol is.
	Visits []Path
	// Paths are used by short connections, streams and sockets of UDP.
	Paths []Path
	// Affinity are paths to Services with session affinity: short connections and fresh sockets of UDP.
	Affinity []Path
	// Streams is how many there are, spread over Paths; 0: 200.
	Streams int
	// Interval is the time between two short connections of one path; 0: 40 ms.
	Interval time.Duration
	// Ahead is how much a client begins before what it began earlier has ended: short connections, datagrams, or chunks
	// of a stream; 0: 4. Without a limit a machine that falls behind for a moment would be buried under what is asked.
	Ahead int
	// Pause is the time between two chunks of one stream, and between two requests of one socket; 0: 100 ms.
	Pause time.Duration
	// Timeout is how long a client waits in all, and sends again meanwhile. It waits for a connection, for the next
	// byte of a stream, or for the answer to a datagram. 0: 20 s.
	Timeout time.Duration
}

func (s *WatchSpec) defaults() {
	s.Streams, s.Ahead = cmp.Or(s.Streams, 200), cmp.Or(s.Ahead, 4)
	s.Interval, s.Pause = cmp.Or(s.Interval, 40*time.Millisecond), cmp.Or(s.Pause, 100*time.Millisecond)
	s.Timeout = cmp.Or(s.Timeout, 20*time.Second)
}

// Watch keeps clients in many places of a testbed busy while its node changes. It notes each failure, its time, and how
// long it was after which step. It goes on until Stop. Its clients are goroutines of this process.
//
// A stream carries data both ways all the time, before the sent data have come back, and each byte is compared. A
// client of a Service with session affinity must be answered by one pod, and so must a socket of UDP that lives on. For
// QUIC and DTLS another backend is the end of the connection.
type Watch struct {
	bed     *testbed.Bed
	spec    WatchSpec
	pattern pattern
	ctx     context.Context // Stop ends it
	stop    context.CancelFunc
	group   sync.WaitGroup

	mu       sync.Mutex
	start    time.Time
	step     string
	since    time.Time // when it began
	counts   [kinds]Count
	backends map[string]int // answers of each backend
	faults   []Fault
	clients  map[*client]struct{}
	changed  chan struct{} // closed and replaced when a reader waits and something has happened
	streams  int           // that have begun
	ended    int           // outcomes of all clients
}

// StartWatch starts one. It returns when all streams are open, or with an error, and then there is none.
func StartWatch(ctx context.Context, bed *testbed.Bed, s WatchSpec) (*Watch, error) {
	s.defaults()
	l := &Watch{
		bed: bed, spec: s, pattern: newPattern(), start: time.Now(), step: "start", clients: map[*client]struct{}{},
		backends: map[string]int{},
	}
	l.since = l.start
	l.ctx, l.stop = context.WithCancel(ctx)
	if err := l.Open(s.Streams); err != nil {
		l.Stop()
		return nil, err
	}
	for _, path := range slices.Concat(s.Visits, s.Paths) {
		l.every(s.Interval, l.client(Connections, path), l.connect)
	}
	for _, path := range s.Paths {
		l.every(s.Pause, l.client(Datagrams, path), l.ask)
		for _, connected := range []bool{true, false} {
			l.converse(l.client(Sockets, path), connected)
		}
	}
	for _, path := range s.Affinity {
		l.every(s.Pause, l.client(AffinityTCP, path), l.connect)
		l.every(s.Pause, l.client(AffinityUDP, path), l.ask)
	}
	return l, nil
}

// Mark says what is done from now on.
func (l *Watch) Mark(step string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.step, l.since = step, time.Now()
}

// Elapsed is how long it has been going on.
func (l *Watch) Elapsed() time.Duration { return time.Since(l.start) }

// More returns when clients have had n more outcomes, answers or others, in all.
func (l *Watch) More(ctx context.Context, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for goal := l.ended + n; l.ended < goal; {
		if err := l.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Settle returns when each client has had n more outcomes, answers or others, of what it began meanwhile.
func (l *Watch) Settle(ctx context.Context, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	targets := map[*client]int{}
	for w := range l.clients {
		targets[w] = w.outcomes + w.pending + n
	}
	for {
		reached := true
		for w, target := range targets {
			if _, alive := l.clients[w]; alive && w.outcomes < target {
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
func (l *Watch) await(ctx context.Context) error {
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

// Stop ends it in order: what is under way is awaited, and streams end when all that was sent has come back.
func (l *Watch) Stop() Report {
	l.Mark("stop")
	l.stop()
	l.group.Wait()
	return l.Report()
}

// client is a client.
type client struct {
	kind Kind
	Path
	pending  int       // begun, without an outcome
	outcomes int       // answers and failures
	backend  string    // the first that answered, for those that should stay with it
	opened   time.Time // of a stream; zero: of nothing that stays
}

func (l *Watch) client(kind Kind, p Path) *client {
	w := &client{kind: kind, Path: p}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clients[w] = struct{}{}
	return w
}

// every has a client do something at a steady rate, whether or not what it did before has ended, within that limit.
func (l *Watch) every(interval time.Duration, w *client, do func(*client)) {
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
func (l *Watch) begin(w *client) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.pending >= l.spec.Ahead {
		return false
	}
	w.pending++
	l.counts[w.kind].Attempts++
	return true
}

// retire is the end of a client.
func (l *Watch) retire(w *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.clients, w)
	l.happened()
}

// answered notes the pod that answered, and how long it took since it was asked or since the answer before.
func (l *Watch) answered(w *client, backend string, took time.Duration) {
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
	if backend != "" {
		l.backends[backend]++
	}
	l.outcome(w)
}

// failed notes that a client was not answered, and returns the number of the fault.
func (l *Watch) failed(w *client, err error, took time.Duration) (fault int) {
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
	return len(l.faults) - 1
}

// resent notes that a datagram, or its answer, was lost.
func (l *Watch) resent(w *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[w.kind].Resent++
}

func (l *Watch) outcome(w *client) {
	w.outcomes++
	l.ended++
	w.pending = max(0, w.pending-1)
	l.happened()
}

func (l *Watch) happened() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// fault notes what went wrong with whom, and when.
func (l *Watch) fault(w *client, f Fault) {
	now := time.Now()
	f.Kind, f.Path = w.kind, w.Path
	f.Step, f.Since, f.At = l.step, now.Sub(l.since), now.Sub(l.start)
	f.Began = f.At - f.Took
	if !w.opened.IsZero() {
		f.Began = w.opened.Sub(l.start)
	}
	l.faults = append(l.faults, f)
}
