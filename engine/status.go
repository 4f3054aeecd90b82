package engine

import (
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// Status is how programming goes.
type Status struct {
	LastProgrammed time.Time `json:"lastProgrammed,omitzero"` // when the kernel last held the whole State
	WaitingSince   time.Time `json:"waitingSince,omitzero"`   // of the oldest change that is not programmed
	Failures       int       `json:"failures,omitempty"`      // in a row
	Error          string    `json:"error,omitempty"`         // of the last failure
	Drifts         int       `json:"drifts,omitempty"`        // found and repaired so far
	NodeEligible   bool      `json:"nodeEligible"`            // for load balancers
	InForceSince   time.Time `json:"inForceSince,omitzero"`   // when this data plane first held the whole State
	Rows           Rows      `json:"rows"`                    // of the State that should be programmed
	// Problems are some of those that objects have, a few of each namespace.
	Problems []service.Problem `json:"problems,omitempty"`
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

// Healthy reports whether a complete State is programmed, and no change has waited longer than that.
func (s Status) Healthy(now time.Time, timeout time.Duration) bool {
	if s.LastProgrammed.IsZero() {
		return defect.Is(defect.HealthEarly)
	}
	return s.WaitingSince.IsZero() || now.Sub(s.WaitingSince) <= timeout
}

// statusBox is written by the loop and read by servers.
type statusBox struct{ p atomic.Pointer[Status] }

func (b *statusBox) get() Status  { return *b.p.Load() }
func (b *statusBox) set(s Status) { b.p.Store(&s) }

func (b *statusBox) change(f func(*Status)) {
	s := b.get()
	f(&s)
	b.set(s)
}

func (b *statusBox) queued(now time.Time) {
	b.change(func(s *Status) {
		if s.WaitingSince.IsZero() {
			s.WaitingSince = now
		}
	})
}

// programmed notes success; of a partial one the error remains.
func (b *statusBox) programmed(now time.Time, partial bool) {
	b.change(func(s *Status) {
		s.LastProgrammed, s.WaitingSince = now, time.Time{}
		if s.InForceSince.IsZero() {
			s.InForceSince = now
		}
		if !partial {
			s.Failures, s.Error = 0, ""
		}
	})
}

func (b *statusBox) failed(err error) {
	b.change(func(s *Status) { s.Failures, s.Error = s.Failures+1, err.Error() })
}

func (b *statusBox) drifted(n int)                { b.change(func(s *Status) { s.Drifts += n }) }
func (b *statusBox) counted(r Rows)               { b.change(func(s *Status) { s.Rows = r }) }
func (b *statusBox) planeChanged()                { b.change(func(s *Status) { s.InForceSince = time.Time{} }) }
func (b *statusBox) troubled(p []service.Problem) { b.change(func(s *Status) { s.Problems = p }) }
func (b *statusBox) eligible(is bool)             { b.change(func(s *Status) { s.NodeEligible = is }) }

// Status is how programming goes at this moment.
func (e *Engine) Status() Status { return e.status.get() }

// Healthy reports whether the data plane follows.
func (e *Engine) Healthy() bool {
	return e.Status().Healthy(time.Now(), e.options.HealthTimeout)
}
