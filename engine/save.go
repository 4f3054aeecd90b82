package engine

import (
	"context"
	"time"
)

// saves say when the plane saves sessions. Audits may have to rest for half a minute, and a process that is killed then
// would take the sessions of that time with it. So sessions have a budget of their own:
//
//	from: a turn that is due anyway saves, too ─► due: there is a turn for it
type saves struct {
	budget
	from, due time.Time
}

// save has the plane save sessions if it is time.
func (e *Engine) save(ctx context.Context) {
	start := time.Now()
	if start.Before(e.saves.from) {
		return
	}
	e.options.Plane.Save(ctx)
	now := time.Now()
	rest := max(e.saves.rest(now.Sub(start)), e.options.AuditInterval/2)
	e.saves.from = now.Add(rest)
	e.saves.due = e.saves.from.Add(e.options.AuditInterval)
}
