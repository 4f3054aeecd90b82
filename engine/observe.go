package engine

import (
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
	Batch    service.Batch
	Problems []service.Problem // that the batch brought up
	State    *model.State
	Verb     Verb
	Took     time.Duration // of the verb
	Err      error         // of programming; see dataplane.ErrPartial
	// Happened are the times of the endpoint changes that the kernel now follows, as the endpoint
	// controller wrote them down; those from before this process are left out.
	Happened []time.Time
	Drifts   []dataplane.Drift // that an audit found; they are repaired
	Status   Status            // after it
}

type nobody struct{}

func (nobody) Round(Round)          {}
func (nobody) Answered(string, int) {}

// maxWaiting bounds what is remembered while nothing can be programmed.
const maxWaiting = 100_000

// begin starts the account of a round.
func (e *Engine) begin(b service.Batch, problems []service.Problem) {
	e.round = Round{Batch: b, Problems: problems}
	for _, s := range b.Slices {
		if s != nil && s.Changed.After(e.started) && len(e.waiting) < maxWaiting {
			e.waiting = append(e.waiting, s.Changed)
		}
	}
}

// observe closes it.
func (e *Engine) observe(err error) {
	r := &e.round
	r.State, r.Err, r.Status = e.state, err, e.Status()
	if !e.dirty {
		r.Happened, e.waiting = e.waiting, nil
	}
	e.options.Observer.Round(*r)
	e.round = Round{}
}
