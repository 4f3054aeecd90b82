package engine

import (
	"context"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

const (
	// lookInterval is how often the Table learns outcomes. A client's kernel sends its first packet again after a second.
	lookInterval = 200 * time.Millisecond
	// lookSuspect is how often it does while the Table is eager.
	lookSuspect = 50 * time.Millisecond
	// lookAgain is how long it is not tried after an error.
	lookAgain = 30 * time.Second
	// lookStale is for how long it may be put off without what is told then being old.
	lookStale = 5 * time.Second
	// maxOutcomes bounds what the Table learns at once, so that changes do not wait for it.
	maxOutcomes = 1 << 14
	// maxAsks bounds how many connections to ejected backends are under way. The others wait for their turn.
	maxAsks = 64
	// askTimeout is how long such a backend may take to accept one.
	askTimeout = time.Second
)

// looks are the times at which the Table learns outcomes.
type looks struct {
	at      time.Time // the next one
	last    time.Time
	watch   bool // answers are asked for
	failure said.Condition
	asking  int              // how many connections of the agent are under way
	asked   chan service.Ask // with the answers; holds maxAsks
}

// learns reports whether the Table has to be told of outcomes or of the time.
func (e *Engine) learns() bool {
	return e.options.Connect != nil && (e.options.Table.Judges() || e.options.Table.Rises())
}

// learn has the Table decide about backends by what became of clients' connections, and by the time.
func (e *Engine) learn(ctx context.Context) {
	now := time.Now()
	if !e.learns() || now.Before(e.looks.at) {
		return
	}
	e.looks.at = now.Add(lookInterval)
	if !e.options.Table.Judges() {
		e.options.Table.Learn(now, nil)
		return
	}
	var all []model.Outcome
	stale := now.Sub(e.looks.last) > lookStale
	e.looks.last = now
	err := e.options.Plane.Outcomes(ctx, e.looks.watch, func(o model.Outcome) {
		if !stale && len(all) < maxOutcomes {
			all = append(all, o)
		}
	})
	e.askBackends(ctx, now)
	var eager bool
	e.looks.watch, eager = e.options.Table.Learn(now, all)
	switch {
	case err != nil:
		e.looks.at = now.Add(lookAgain)
	case eager:
		e.looks.at = now.Add(lookSuspect)
	}
	if e.looks.failure.Failed(err) {
		e.options.Log.Warn("cannot see which connections to backends fail; trying again", "error", err, "retry", lookAgain)
	}
}

// askBackends connects to backends whose ejection has lasted its time, and lets the Table know.
func (e *Engine) askBackends(ctx context.Context, now time.Time) {
	l := &e.looks
	for len(l.asked) > 0 {
		l.asking--
		e.options.Table.Asked(now, <-l.asked)
	}
	for _, next := range e.options.Table.Asks(maxAsks - l.asking) {
		l.asking++
		go func() {
			limited, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			next.Accepted = e.options.Connect(limited, next.Backend)
			l.asked <- next
		}()
	}
}
