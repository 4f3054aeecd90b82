package engine

import (
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// An Observer is told what an Engine does: metrics and events are made of it. Its methods may be
// called from several goroutines and must be quick, as programming waits for them.
type Observer interface {
	// Round reports that the loop went round, which it does for every batch, audit and request. All
	// that the Round refers to is lent until Round returns.
	Round(Round)
	// Arrived reports changes from the Source, also while the loop is busy.
	Arrived(Changes)
	// Answered reports that a health check on /healthz or /livez was answered.
	Answered(path string, status int)
}

// Verb is what a Round did to the data plane.
type Verb string

// The verbs.
const (
	Rested  Verb = ""      // nothing, or an audit only
	Synced  Verb = "sync"  // everything was programmed
	Applied Verb = "apply" // a change was
)

// Round is one turn of the loop: a batch is taken in, and the kernel follows.
type Round struct {
	Batch    service.Batch     // that was taken in
	Problems []service.Problem // that the batch brought up
	Pending  Changes           // that are not in force, with those that wait for the loop
	State    *model.State
	InForce  InForce
	Verb     Verb
	Change   *model.Change                // if it was applied; nil: all was programmed, or nothing
	Before   map[model.PoolID]*model.Pool // what the pools in it were; nil: they are new
	Took     time.Duration                // of the verb
	Err      error                        // of programming; see dataplane.ErrPartial
	// Happened are the endpoint changes that the kernel now follows and of which it is known when they
	// happened; those from before this process are left out.
	Happened []Happening
	// Arrived are the times when the changes came that the kernel now follows; those that came together have one.
	Arrived         []time.Time
	Audited         time.Duration              // how long the audit took; 0: there was none
	Orphans         int                        // connections that were reset as their backends are gone
	Rebalanced      int                        // idle connections that were closed as their backends were crowded
	Drifts          []dataplane.Drift          // that it found; they are repaired
	ExternalChanges []dataplane.ExternalChange // before it, as the kernel reports them
	Refused         []Refusal                  // servers that cannot be opened, each said once
	Status          Status                     // after it
}

// Refusal is a server of health checks that cannot be opened. It is tried again.
type Refusal struct {
	Address netip.AddrPort
	Service string // whose healthCheckNodePort it is; empty: /healthz
	Err     error
}

// Happening is a change of an EndpointSlice.
type Happening struct {
	At time.Time // as the endpoint controller wrote it down, by its own clock
	V6 bool      // the address family of its endpoints
}

// InForce is what the kernel is known to have.
type InForce struct {
	Version uint64 // all changes of EndpointSlices up to this resourceVersion; 0: unknown
	service.Barrier
}

// inForce finds it: slices of different namespaces overtake each other in the queue.
type inForce struct {
	InForce
	stamps []stamp // of what came and may wait
}

// stamp is the version of a delivery.
type stamp struct {
	at      time.Time
	version uint64
}

func (f *inForce) came(d delivery) {
	if d.batch.Version == 0 {
		return
	}
	if n := len(f.stamps); n == maxDeliveries {
		f.stamps = f.stamps[:n-1] // the new one stands for both
	}
	f.stamps = append(f.stamps, stamp{d.at, d.batch.Version})
}

// follow notes that the kernel has what the Table has. Since oldest something waits; zero: nothing does.
func (f *inForce) follow(oldest time.Time, b service.Barrier) {
	n := 0
	for ; n < len(f.stamps) && (oldest.IsZero() || f.stamps[n].at.Before(oldest)); n++ {
		f.Version = f.stamps[n].version
	}
	f.stamps, f.Barrier = slices.Delete(f.stamps, 0, n), b
}

// Unobserved ignores all. Observers of some things only embed it.
type Unobserved struct{}

// Round implements Observer.
func (Unobserved) Round(Round) {}

// Arrived implements Observer.
func (Unobserved) Arrived(Changes) {}

// Answered implements Observer.
func (Unobserved) Answered(string, int) {}

// Changes are numbers of changed objects.
type Changes struct{ Services, Slices int }

func (c *Changes) add(b *service.Batch) {
	c.Services += len(b.Services)
	c.Slices += len(b.Slices)
}

// pending are changes that the Table has, and the kernel perhaps not.
type pending struct {
	Changes
	came     []time.Time
	happened []Happening
}

func (p *pending) remember(t *taken) {
	if len(p.came)+len(p.happened) < maxNoted {
		p.came = append(p.came, t.came...)
		p.happened = append(p.happened, t.happened...)
	}
}

// observe closes the account of a round.
func (e *Engine) observe(err error) {
	r, p := &e.round, &e.pending
	r.State, r.Err, r.Status = e.state, err, e.Status()
	r.Refused = e.checks.takeNews()
	if !e.dirty {
		r.Happened, r.Arrived = p.happened, p.came
		*p = pending{came: p.came[:0], happened: p.happened[:0]}
		e.inForce.follow(e.queue.oldest(), e.options.Table.Barrier())
	}
	r.InForce = e.inForce.InForce
	e.inbox.count(func(n Changes) {
		r.Pending = Changes{n.Services + p.Services + e.queue.Services, n.Slices + p.Slices + e.queue.Slices}
		e.options.Observer.Round(*r)
	})
	e.round = Round{}
}
