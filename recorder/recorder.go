// Package recorder remembers what the agent did in the last ten minutes, and tells it while it happens.
//
//	log ─── Handler ──┐                   ┌─► Recent: fairlead report
//	engine ── Round ──┴─► Event ─► Record ┴─► Follow: fairlead monitor
//
// Every line of the log is an Event. The engine's rounds add what the log leaves out: backends that join or leave, and
// repairs of the same drift. Memory is bounded. When it is full, namespaces with most events lose their oldest ones. So
// one tenant does not push the events of others out.
package recorder

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/said"
)

const (
	// Span is for how long events are remembered.
	Span = 10 * time.Minute
	// MaxBytes bounds the events in memory. While some are forgotten, they take less than twice as much.
	MaxBytes = 1 << 20
	// overhead is about what an event takes beside its text.
	overhead = 128
	// pending is how many events wait for a follower. Further ones are left out, and counted.
	pending = 1024
)

// Recorder remembers. The zero value is ready.
type Recorder struct {
	mu        sync.Mutex
	events    []entry   // in the order in which they came
	bytes     int       // of all
	forgotten time.Time // of the last event that memory had no room for
	followers map[*Follower]bool
}

// entry is an event as it is told, one line of JSON.
type entry struct {
	at        time.Time
	namespace string
	line      []byte
}

func (e *entry) size() int { return len(e.line) + len(e.namespace) + overhead }

// Record takes an event in. Without a Time it happens now.
func (r *Recorder) Record(e Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	line, err := json.Marshal(e)
	if err != nil { // a year beyond 9999
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for f := range r.followers {
		f.put(e)
	}
	r.events = append(r.events, entry{e.Time, strings.Clone(e.Namespace()), line})
	if r.bytes += r.events[len(r.events)-1].size(); r.bytes > MaxBytes {
		r.trim()
	}
}

// trim makes room for an eighth of all. First it forgets what is old. Then, of the namespaces with most events, the
// oldest ones go: those that have most younger ones of the same namespace beside them.
func (r *Recorder) trim() {
	old, younger := time.Now().Add(-Span), map[string]int{}
	rank := make([]int, len(r.events))
	order := make([]int, len(r.events))
	for i := len(r.events) - 1; i >= 0; i-- {
		e := &r.events[i]
		rank[i], order[i] = younger[e.namespace], i
		if younger[e.namespace]++; e.at.Before(old) {
			rank[i] = len(r.events)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(rank[b]-rank[a], a-b) })
	for _, i := range order {
		e := &r.events[i]
		if r.bytes <= MaxBytes*7/8 && rank[i] < len(r.events) {
			break
		}
		if r.bytes -= e.size(); rank[i] < len(r.events) && e.at.After(r.forgotten) {
			r.forgotten = e.at
		}
		e.line = nil
	}
	r.events = slices.DeleteFunc(r.events, func(e entry) bool { return e.line == nil })
}

// Recent are the events of the last Span, as lines of JSON. Memory had no room for some events until forgotten; zero:
// for all.
func (r *Recorder) Recent() (lines [][]byte, forgotten time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := time.Now().Add(-Span)
	for _, e := range r.events {
		if !e.at.Before(old) {
			lines = append(lines, e.line)
		}
	}
	if r.forgotten.After(old) {
		forgotten = r.forgotten
	}
	return lines, forgotten
}

// Follower gets the events that happen.
type Follower struct {
	Events <-chan Event

	recorder *Recorder
	events   chan Event
	leftOut  int // of the Recorder's mu
}

// Follow gets them until Close.
func (r *Recorder) Follow() *Follower {
	f := &Follower{recorder: r, events: make(chan Event, pending)}
	f.Events = f.events
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.followers == nil {
		r.followers = map[*Follower]bool{}
	}
	r.followers[f] = true
	return f
}

// put does not wait for the follower.
func (f *Follower) put(e Event) {
	select {
	case f.events <- e:
	default:
		f.leftOut++
	}
}

// LeftOut is how many events the follower did not take in time, since the last call.
func (f *Follower) LeftOut() (n int) {
	f.recorder.mu.Lock()
	defer f.recorder.mu.Unlock()
	n, f.leftOut = f.leftOut, 0
	return n
}

// Close ends it.
func (f *Follower) Close() {
	f.recorder.mu.Lock()
	defer f.recorder.mu.Unlock()
	delete(f.recorder.followers, f)
}

// Namespace is whose event it is; empty: the node's.
func (e *Event) Namespace() string {
	if e.Service != "" {
		namespace, _, _ := strings.Cut(e.Service, "/")
		return namespace
	}
	if object := e.Details["object"]; object != "" {
		return said.NamespaceOf(object)
	}
	return ""
}
