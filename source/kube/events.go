package kube

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	eventsv1 "k8s.io/api/events/v1"

	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Limits of what Events cost the API server. A storm of them is cut, and what was cut is counted.
const (
	maxQueued    = 1000 // that wait to be written
	maxRemember  = 500  // that are counted when they come again
	eventBurst   = 25   // written at once
	maxNote      = 1024 // bytes; the API allows no more
	flushTime    = 2 * time.Second
	rememberTime = 10 * time.Minute // an Event that comes later is a new one
)

// eventsPerSecond may be written after a burst.
const eventsPerSecond rate.Limit = 0.5

// Event is something that people should find with kubectl.
type Event struct {
	Object  string // what it regards: "Service default/web", "EndpointSlice ns/name", "Node name"; empty: the own Node
	Warning bool   // not Normal
	Reason  string // one word in CamelCase
	Action  string // what was done or failed, a word; empty: Reason
	Message string
	// Everywhere: each node finds the same, so that the first one speaks for all.
	Everywhere bool
}

// Events writes Events to the API server, as events.k8s.io/v1, without ever delaying who emits them.
type Events struct {
	node, component string
	client          rest.Interface
	objects         metadata.Interface
	log             *slog.Logger
	interval        time.Duration // between two counts of a repeated Event

	queue   chan Event
	dropped atomic.Int64
	ctx     context.Context // ends when Close has waited long enough
	cancel  context.CancelFunc
	close   sync.Once
	done    chan struct{}

	// The worker's own:
	limit   *rate.Limiter
	written map[Event]*series
}

// series is an Event that was written, and how often it came since.
type series struct {
	event       *eventsv1.Event
	count, said int32 // how often it came, and what the API server was told
	last        time.Time
}

// Events begins to write Events in the name of a component of a node.
func (c *Client) Events(node, component string) *Events {
	ctx, cancel := context.WithCancel(context.Background())
	e := &Events{
		node: node, component: component,
		client: c.events, objects: c.objects, log: c.log, interval: c.timing.series,
		queue: make(chan Event, maxQueued), ctx: ctx, cancel: cancel, done: make(chan struct{}),
		limit: rate.NewLimiter(eventsPerSecond, eventBurst), written: map[Event]*series{},
	}
	go e.work()
	return e
}

// Emit has an Event written soon. It never waits; if too many are queued already, it is only counted.
// It may be called by several goroutines, but not after Close.
func (e *Events) Emit(event Event) {
	select {
	case e.queue <- event:
	default:
		e.dropped.Add(1)
	}
}

// Close waits a short time until what was emitted is written.
func (e *Events) Close() {
	e.close.Do(func() {
		close(e.queue)
		late := time.AfterFunc(flushTime, e.cancel)
		<-e.done
		late.Stop()
		e.cancel()
	})
}

func (e *Events) work() {
	defer close(e.done)
	tick := time.NewTicker(e.interval)
	defer tick.Stop()
	for {
		select {
		case event, ok := <-e.queue:
			if !ok {
				return
			}
			e.handle(event)
		case <-tick.C:
			e.countAll()
			if n := e.dropped.Swap(0); n > 0 {
				e.log.Warn("too many events at once; some were not written", "dropped", n)
			}
		}
	}
}

// handle writes an Event, or counts one that was written not long ago.
func (e *Events) handle(event Event) {
	if s := e.written[event]; s != nil && time.Since(s.last) < rememberTime {
		s.count, s.last = s.count+1, time.Now()
		return
	}
	if e.limit.Wait(e.ctx) != nil {
		return
	}
	o, err := e.write(event)
	if err != nil {
		if e.ctx.Err() == nil {
			e.log.Warn("an event could not be written", "object", event.Object, "reason", event.Reason,
				"message", event.Message, "error", err)
		}
		return
	}
	if len(e.written) < maxRemember {
		e.written[event] = &series{event: o, count: 1, said: 1, last: time.Now()}
	}
}

// countAll tells the API server how often Events came again, and forgets old ones.
func (e *Events) countAll() {
	for event, s := range e.written {
		switch {
		case s.count != s.said && !event.Everywhere: // the count of all nodes nobody knows
			e.count(s)
		case time.Since(s.last) > rememberTime:
			delete(e.written, event)
		}
	}
}

func (e *Events) count(s *series) {
	if e.limit.Wait(e.ctx) != nil {
		return
	}
	if err := e.patch(s); err != nil {
		e.log.Debug("an event could not be counted", "event", s.event.Name, "error", err)
		return
	}
	s.said = s.count
}
