package engine

import (
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// Status is how programming goes.
type Status struct {
	LastProgrammed       time.Time `json:"lastProgrammed,omitzero"`       // when the kernel held all that it accepts
	WaitingSince         time.Time `json:"waitingSince,omitzero"`         // of the oldest change that is not programmed
	AuditUnfinishedSince time.Time `json:"auditUnfinishedSince,omitzero"` // of the audit that runs, or of several
	Undone               *Undone   `json:"undone,omitempty"`              // nil: repairs hold
	Failures             int       `json:"failures,omitempty"`            // in a row
	Partial              bool      `json:"partial,omitempty"`             // the last failure is of some rows only
	Error                string    `json:"error,omitempty"`               // of the last failure
	Drifts               int       `json:"drifts,omitempty"`              // found and repaired so far
	NodeEligible         bool      `json:"nodeEligible"`                  // for load balancers
	InForceSince         time.Time `json:"inForceSince,omitzero"`         // when this plane first held the whole State
	Rows                 Rows      `json:"rows"`                          // of the State that should be programmed
	// Problems are some of those that objects have, a few of each namespace.
	Problems []service.Problem `json:"problems,omitempty"`
}

// Undone tells of repairs that did not hold, because another program undoes them.
type Undone struct {
	Since   time.Time `json:"since"`            // of the first one
	Repairs int       `json:"repairs"`          // so many
	Rarer   bool      `json:"rarer"`            // the next one waits for longer than the first did
	Next    time.Time `json:"next"`             // when the next one may come
	Author  string    `json:"author,omitempty"` // empty: the kernel does not tell
	Process string    `json:"-"`                // the name of one of them, without its number
}

// MarshalJSON has the keys of the release before, too.
func (u Undone) MarshalJSON() ([]byte, error) {
	type plain Undone
	return json.Marshal(struct {
		plain
		By string `json:"by,omitempty"`
	}{plain(u), u.Author})
}

// Rows are numbers of rows.
type Rows struct {
	Frontends    int `json:"frontends"`
	Pools        int `json:"pools"`
	Guards       int `json:"guards"`
	HealthChecks int `json:"healthChecks"`
}

func count(s *model.State) Rows {
	return Rows{len(s.Frontends), len(s.Pools), len(s.Guards), len(s.Health)}
}

// statusBox is written by the loop, and by the goroutine that pulls the Source; servers read it.
type statusBox struct {
	p  atomic.Pointer[Status]
	mu sync.Mutex // of writers
}

func (b *statusBox) get() Status  { return *b.p.Load() }
func (b *statusBox) set(s Status) { b.p.Store(&s) }

func (b *statusBox) change(f func(*Status)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.get()
	f(&s)
	b.set(s)
}

func (b *statusBox) queued(now time.Time) {
	b.change(func(s *Status) { s.WaitingSince = earlier(s.WaitingSince, now) })
}

// programmed notes success; of a partial one the error remains. If the kernel is known to hold the whole State, it is
// noted when.
func (b *statusBox) programmed(now time.Time, whole, partial bool) {
	b.change(func(s *Status) {
		s.WaitingSince = time.Time{}
		if whole || s.LastProgrammed.IsZero() {
			s.LastProgrammed = now
		}
		if s.InForceSince.IsZero() {
			s.InForceSince = now
		}
		if !partial {
			s.Failures, s.Error, s.Partial = 0, "", false
		}
	})
}

func (b *statusBox) failed(err error, partial bool) {
	b.change(func(s *Status) { s.Failures, s.Error, s.Partial = s.Failures+1, err.Error(), partial })
}

// checking notes that the kernel is being compared; checked, that this has come to an end.
func (b *statusBox) checking(now time.Time) {
	b.change(func(s *Status) { s.AuditUnfinishedSince = earlier(s.AuditUnfinishedSince, now) })
}
func (b *statusBox) checked()         { b.change(func(s *Status) { s.AuditUnfinishedSince = time.Time{} }) }
func (b *statusBox) undone(u *Undone) { b.change(func(s *Status) { s.Undone = u }) }
func (b *statusBox) drifted(n int)    { b.change(func(s *Status) { s.Drifts += n }) }
func (b *statusBox) counted(r Rows)   { b.change(func(s *Status) { s.Rows = r }) }
func (b *statusBox) planeChanged() {
	b.change(func(s *Status) { s.InForceSince, s.Undone = time.Time{}, nil })
}
func (b *statusBox) eligible(is bool)                { b.change(func(s *Status) { s.NodeEligible = is }) }
func (b *statusBox) setProblems(p []service.Problem) { b.change(func(s *Status) { s.Problems = p }) }

// Status is how programming goes at this moment.
func (e *Engine) Status() Status { return e.status.get() }

// Healthy reports whether the data plane follows.
func (e *Engine) Healthy() bool {
	return e.Status().Healthy(time.Now(), e.options.HealthTimeout)
}
