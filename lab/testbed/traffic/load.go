package traffic

import (
	"context"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// run does a load. When ctx ends, nothing new begins.
func (l Load) run(ctx context.Context) Result {
	if l.Duration > 0 && l.Protocol != Bulk {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.Duration)
		defer cancel()
	}
	c := &collector{load: l, begin: time.Now(), result: Result{Errors: map[string]int{}}}
	if l.Protocol == Bulk {
		l.streams(ctx, c)
	} else {
		l.clients(ctx, c)
	}
	c.result.Elapsed = time.Since(c.begin)
	return c.result
}

// turn is a request that is to be made.
type turn struct {
	number int
	at     time.Time // when it should begin
}

// turns hands them out to clients: at once, or each when its time has come.
func (l Load) turns(ctx context.Context, c *collector) (next func() (turn, bool)) {
	if l.Rate > 0 {
		due := make(chan turn)
		go func() {
			defer close(due)
			l.pace(ctx, due, c)
		}()
		return func() (turn, bool) {
			t, ok := <-due
			return t, ok
		}
	}
	var last atomic.Int64
	return func() (turn, bool) {
		n := int(last.Add(1) - 1)
		return turn{n, time.Now()}, ctx.Err() == nil && (l.Requests == 0 || n < l.Requests)
	}
}

// pace hands out turns by the clock, on a thread of its own: the runtime's timers are a millisecond late where nothing
// else goes on.
func (l Load) pace(ctx context.Context, due chan<- turn, c *collector) {
	// For good: the thread ends with its goroutine, and takes its slack along.
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // wakes up in time; it always can
	for t := range l.clock(ctx) {
		select {
		case due <- t:
		case <-ctx.Done():
			c.unsent(t.number)
			return
		}
	}
}

// when is the time of a turn.
func (l Load) when(number int) time.Duration {
	return time.Duration(float64(number) / l.Rate * float64(time.Second))
}

// clock are the turns of a load with a rate, each at its time. The calling thread sleeps.
func (l Load) clock(ctx context.Context) func(yield func(turn) bool) {
	return func(yield func(turn) bool) {
		begin := time.Now()
		for n := 0; l.Requests == 0 || n < l.Requests; n++ {
			t := turn{n, begin.Add(l.when(n))}
			sleepUntil(ctx, t.at)
			if ctx.Err() != nil || !yield(t) {
				return
			}
		}
	}
}

// sleepUntil has the calling thread sleep, also without the help of the runtime.
func sleepUntil(ctx context.Context, at time.Time) {
	const glance = 50 * time.Millisecond // at ctx
	for left := time.Until(at); left > 0 && ctx.Err() == nil; left = time.Until(at) {
		part := unix.NsecToTimespec(int64(min(left, glance)))
		_ = unix.Nanosleep(&part, nil) // EINTR: it sleeps again
	}
}

// target is a destination in the forms in which it is needed.
type target struct {
	netip.AddrPort
	name string
}

func (l Load) targets() []target {
	targets := make([]target, len(l.Targets))
	for i, to := range l.Targets {
		targets[i] = target{to, to.String()}
	}
	return targets
}

// clients runs as many as are wanted.
func (l Load) clients(ctx context.Context, c *collector) {
	next, targets := l.turns(ctx, c), l.targets()
	var group sync.WaitGroup
	sources := &sources{ports: l.Sources}
	for number := range l.Concurrency {
		group.Go(func() {
			who := newHTTPClient(l, sources, number)
			defer who.close()
			for t, ok := next(); ok; t, ok = next() {
				s, err := who.ask(targets[t.number%len(targets)])
				s.total = time.Since(t.at)
				c.add(s, err)
			}
		})
	}
	group.Wait()
}

// sources hands out the ports to connect from.
type sources struct {
	ports []uint16
	next  atomic.Int64
}

func (s *sources) take() int {
	n := s.next.Add(1) - 1
	return int(s.ports[int(n)%len(s.ports)])
}

// sample is what is known of a request.
type sample struct {
	connect, processing, waiting time.Duration
	connected                    bool // there is a connect
	total                        time.Duration
	bytes                        int
}

// collector makes a Result.
type collector struct {
	load  Load
	begin time.Time

	mu     sync.Mutex
	result Result
}

// add notes how a request has ended.
func (c *collector) add(s sample, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.result
	r.Bytes += int64(s.bytes)
	if c.load.Each {
		a := Attempt{At: time.Since(c.begin) - s.total, Took: s.total}
		if err != nil {
			a.Error = kind(err)
		}
		r.Each = append(r.Each, a)
	}
	if err != nil {
		r.Errors[kind(err)]++
		return
	}
	r.Done++
	r.Total.Record(s.total)
	if s.connected {
		r.Connect.Record(s.connect)
	}
	r.Processing.Record(s.processing)
	r.Waiting.Record(s.waiting)
}

// unsent notes that no client was free for this turn and those that are due by now.
func (c *collector) unsent(number int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.load
	for now := time.Since(c.begin); l.when(number) < now && (l.Requests == 0 || number < l.Requests); number++ {
		c.result.Unsent++
	}
}

// carried notes bulk data.
func (c *collector) carried(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.result.Bytes += int64(n)
	if c.load.Interval == 0 {
		return
	}
	present := int(time.Since(c.begin) / c.load.Interval)
	for len(c.result.Intervals) <= present {
		c.result.Intervals = append(c.result.Intervals, 0)
	}
	c.result.Intervals[present] += int64(n)
}
