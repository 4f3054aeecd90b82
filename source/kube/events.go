package kube

import (
	"context"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/said"
)

// Limits of what Events cost the API server. A storm of them is cut, and what was cut is counted.
const (
	maxQueued    = 1000             // that wait to be written
	maxRemember  = 500              // that are counted when they come again; of both a namespace has its share
	eventBurst   = 25               // written at once
	maxNote      = 1024             // bytes; the API allows no more
	rememberTime = 10 * time.Minute // an Event that comes later is a new one
	speakers     = 10               // nodes, on average, that write what every node finds
	maxSpread    = time.Minute      // within which they do
)

// eventsResource is what the link knows Events by.
const eventsResource = "events"

// eventsPerSecond may be written after a burst.
const eventsPerSecond rate.Limit = 0.5

// Event is something that people should find with kubectl.
type Event struct {
	// Object is what it regards: "Service default/web", "Pod ns/name", "EndpointSlice ns/name", "ServiceCIDR name",
	// "Node name"; empty: the own Node.
	Object  string
	Warning bool   // not Normal
	Reason  string // one word in CamelCase
	Action  string // what was done or failed, a word; empty: Reason
	Message string
	// Everywhere: each node finds the same, so that a few speak for all.
	Everywhere bool

	uid     types.UID // with which Source.identity tells Object from an earlier one, when it is the Event's turn
	created int64
}

// Events writes Events to the API server, as events.k8s.io/v1, without ever delaying the caller.
//
// Each node would report what all nodes find. N nodes and M bad objects would make N times M requests at once, of which
// the server takes M. So a node asks at its start how many nodes there are, and then throws a dice for each such Event.
// About ten nodes write it, and the first of them is believed. That is 10 M requests, whatever N is; one Event in
// 22,000 is not written. They are spread over N/10 seconds, at most a minute. A thousand bad objects at once in a
// cluster of 5,000 nodes make 170 requests a second for a minute. No node writes more than a burst of 25 and then one
// in two seconds.
type Events struct {
	node, component string
	client          rest.Interface
	objects         metadata.Interface
	seen            *atomic.Pointer[Source]
	link            *link
	log             *slog.Logger
	timing          timing

	line    *line
	dropped atomic.Int64
	ctx     context.Context // ends when Close has waited long enough
	cancel  context.CancelFunc
	close   sync.Once
	closing chan struct{}
	done    chan struct{} // the worker has ended

	// The worker's own:
	limit   *rate.Limiter
	written map[Event]*series
	kept    said.Room      // for these
	waiting map[Event]bool // for their turn
	wait    said.Room      // for these
	nodes   int            // of the cluster; 0: unknown
	dice    maphash.Seed
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
		client: c.events, objects: c.objects, seen: &c.source, link: c.link, log: c.log, timing: c.timing,
		line: newLine(maxQueued), kept: said.Room{Size: maxRemember}, wait: said.Room{Size: maxQueued},
		ctx: ctx, cancel: cancel, closing: make(chan struct{}), done: make(chan struct{}),
		limit: rate.NewLimiter(eventsPerSecond, eventBurst), written: map[Event]*series{}, waiting: map[Event]bool{},
		dice: maphash.MakeSeed(),
	}
	go e.work()
	return e
}

// Emit has an Event written soon. It never waits; if too many are queued already, it is only counted.
// It may be called by several goroutines. After Close it does nothing.
func (e *Events) Emit(event Event) {
	if !e.line.put(turn{event, false}) {
		e.dropped.Add(1)
	}
}

// Close waits a short time until what was emitted is written.
func (e *Events) Close() {
	e.close.Do(func() {
		close(e.closing)
		late := time.AfterFunc(e.timing.flush, e.cancel)
		<-e.done
		late.Stop()
		e.cancel()
	})
}

// work is the goroutine of Events. It is the only one that asks the API server, so that callers of Emit never wait.
func (e *Events) work() {
	defer close(e.done)
	e.countNodes()
	tick := time.NewTicker(e.timing.series)
	defer tick.Stop()
	for {
		select {
		case <-e.line.some:
			e.next()
		case <-e.closing:
			e.flush()
			return
		case <-tick.C:
			e.countAll()
			if e.nodes == 0 {
				e.countNodes()
			}
			if n := e.dropped.Swap(0); n > 0 {
				e.log.Warn("too many events at once; some were not written", "count", n)
			}
		}
	}
}

// next handles the Event whose turn it is. It returns false if there is none.
func (e *Events) next() bool {
	t, ok := e.line.take()
	switch {
	case !ok:
		return false
	case t.ripe:
		e.say(t.event)
	default:
		t.event.uid, t.event.created = e.identity(t.event.Object)
		e.handle(t.event)
	}
	return true
}

// flush handles what is queued until the time is over.
func (e *Events) flush() {
	for e.ctx.Err() == nil && e.next() {
	}
	for event := range e.waiting {
		e.say(event)
	}
}

// handle writes an Event, or counts one that was written not long ago.
func (e *Events) handle(event Event) {
	s := e.written[event]
	switch {
	case s != nil && time.Since(s.last) < rememberTime:
		s.count, s.last = s.count+1, time.Now()
	case event.Everywhere:
		e.postpone(event)
	default:
		e.say(event)
	}
}

// postpone has what every node finds wait for its turn, or leaves it to other nodes. Where it is not
// known how many there are, there may be many, but also this one alone.
func (e *Events) postpone(event Event) {
	spread := maxSpread
	if e.nodes > 0 {
		if maphash.Comparable(e.dice, event)%uint64(e.nodes) >= speakers {
			return
		}
		spread = min(spread, time.Duration(e.nodes)*e.timing.spread)
	}
	switch {
	case e.waiting[event]:
	case !e.wait.Enter(said.NamespaceOf(event.Object)):
		e.dropped.Add(1)
	default:
		e.waiting[event] = true
		time.AfterFunc(rand.N(spread), func() { e.line.put(turn{event, true}) })
	}
}

// say writes an Event.
func (e *Events) say(event Event) {
	if e.waiting[event] {
		delete(e.waiting, event)
		e.wait.Leave(said.NamespaceOf(event.Object))
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
	if e.written[event] != nil || e.kept.Enter(said.NamespaceOf(event.Object)) {
		e.written[event] = &series{event: o, count: 1, said: 1, last: time.Now()}
	}
}

// failed says that an Event is lost. That its object is gone, or is going, is no trouble.
func (e *Events) failed(event Event, err error) {
	gone := apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	if e.ctx.Err() == nil && !gone {
		e.link.failed(eventsResource, err)
	}
	e.log.Debug("an event could not be written", "object", event.Object, "reason",
		event.Reason+": "+event.Message, "error", err)
}

// countAll tells the API server how often Events came again, and forgets old ones.
func (e *Events) countAll() {
	for event, s := range e.written {
		switch {
		case time.Since(s.last) > rememberTime: // also if its count is refused
			delete(e.written, event)
			e.kept.Leave(said.NamespaceOf(event.Object))
		case s.count != s.said && !event.Everywhere: // the count of all nodes is not known
			e.count(s)
		}
	}
}

func (e *Events) count(s *series) {
	if e.limit.Wait(e.ctx) != nil {
		return
	}
	if err := e.patch(s); err != nil {
		e.log.Debug("an event could not be counted", "object", "Event "+s.event.Name, "error", err)
		return
	}
	s.said = s.count
}
