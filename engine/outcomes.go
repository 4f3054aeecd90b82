package engine

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

// Outcomes tells what became of connections that the kernel translates, as package dataplane/outcomes does.
type Outcomes interface {
	// Take calls f with each connection that has failed since the last call and, if answers are asked for, with those
	// that were answered.
	Take(answers bool, f func(model.Outcome)) error
	// Connect reports whether a backend accepts a connection of TCP from this node.
	Connect(ctx context.Context, backend netip.AddrPort) bool
}

const (
	// lookInterval is how often the Table learns outcomes. A client's kernel sends its first packet again after a second.
	lookInterval = 200 * time.Millisecond
	// lookSuspect is how often it does while a backend may be ejected: each refused client counts.
	lookSuspect = 50 * time.Millisecond
	// lookAgain is how long it is not tried after an error.
	lookAgain = 30 * time.Second
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
	failure said.Condition
	asks    []service.Ask // not under way yet
	asking  int           // how many are
	asked   chan asked    // holds maxAsks
}

// asked is what became of a connection to an ejected backend.
type asked struct {
	service.Ask
	accepted bool
}

// learns reports whether the Table has to be told of outcomes or of the time.
func (e *Engine) learns() bool {
	return e.options.Outcomes != nil && (e.options.Table.Judges() || e.options.Table.Rises())
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
	answers := e.options.Table.Watches()
	var all []model.Outcome
	add := func(o model.Outcome) {
		if len(all) < maxOutcomes {
			all = append(all, o)
		}
	}
	err := errors.Join(e.options.Outcomes.Take(answers, add), e.options.Plane.Outcomes(ctx, answers, add))
	e.askBackends(ctx, now)
	e.options.Table.Learn(now, all)
	switch {
	case err != nil:
		e.looks.at = now.Add(lookAgain)
		if e.looks.failure.Changed(err.Error()) {
			e.options.Log.Warn("cannot see which connections to backends fail; trying again", "error", err, "retry", lookAgain)
		}
		return
	case e.options.Table.Ejects():
		e.looks.at = now.Add(lookSuspect)
	}
	e.looks.failure.Cleared()
}

// askBackends connects to backends whose ejection has lasted its time, and lets the Table know.
func (e *Engine) askBackends(ctx context.Context, now time.Time) {
	l := &e.looks
	if l.asked == nil {
		l.asked = make(chan asked, maxAsks)
	}
	for len(l.asked) > 0 {
		a := <-l.asked
		l.asking--
		e.options.Table.Asked(now, a.Ask, a.accepted)
	}
	l.asks = append(l.asks, e.options.Table.Asks()...)
	for ; len(l.asks) > 0 && l.asking < maxAsks; l.asks = l.asks[1:] {
		next := l.asks[0]
		l.asking++
		go func() {
			limited, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			l.asked <- asked{next, e.options.Outcomes.Connect(limited, next.Backend)}
		}()
	}
}
