package kube

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// eventsResource is what the link knows Events by.
const eventsResource = "events"

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
	link            *link
	log             *slog.Logger
	interval        time.Duration // between two counts of a repeated Event

	queue   chan Event
	dropped atomic.Int64
	ctx     context.Context // ends when Close has waited long enough
	cancel  context.CancelFunc
	close   sync.Once
	closing chan struct{}
	done    chan struct{} // the worker has ended

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
		client: c.events, objects: c.objects, link: c.link, log: c.log, interval: c.timing.series,
		queue: make(chan Event, maxQueued), ctx: ctx, cancel: cancel, closing: make(chan struct{}), done: make(chan struct{}),
		limit: rate.NewLimiter(eventsPerSecond, eventBurst), written: map[Event]*series{},
	}
	go e.work()
	return e
}

// Emit has an Event written soon. It never waits; if too many are queued already, it is only counted.
// It may be called by several goroutines. After Close it does nothing.
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
		close(e.closing)
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
		case event := <-e.queue:
			e.handle(event)
		case <-e.closing:
			e.flush()
			return
		case <-tick.C:
			e.countAll()
			if n := e.dropped.Swap(0); n > 0 {
				e.log.Warn("too many events at once; some were not written", "dropped", n)
			}
		}
	}
}

// flush handles what is queued until the time is over.
func (e *Events) flush() {
	for e.ctx.Err() == nil {
		select {
		case event := <-e.queue:
			e.handle(event)
		default:
			return
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
		e.failed(event, err)
		return
	}
	e.link.works(eventsResource)
	if len(e.written) < maxRemember {
		e.written[event] = &series{event: o, count: 1, said: 1, last: time.Now()}
	}
}

// failed says that an Event is lost. That its object is gone, or is going, is no trouble.
func (e *Events) failed(event Event, err error) {
	gone := apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	if e.ctx.Err() == nil && !gone {
		e.link.failed(eventsResource, err)
	}
	e.log.Debug("an event could not be written", "object", event.Object, "reason", event.Reason,
		"message", event.Message, "error", err)
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
