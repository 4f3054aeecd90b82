package engine

import (
	"cmp"
	"context"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// Settings are what may change while an Engine runs. Those that Options have too mean the same there.
type Settings struct {
	Table         service.Options // the node's name excepted, which is the Table's for good
	AuditInterval time.Duration
	MaxRest       time.Duration
	ResetOrphans  bool
	HealthAddress netip.AddrPort
	HealthFile    HealthFile
	ControlSocket string
}

// Configure gives the Engine other Settings, all or, after an error, none. The Table's are in force,
// as far as the kernel obeys, once the loop has gone round again, which it does at once. A server
// that moves listens at its new address before it leaves the old one. If the new address of /healthz
// cannot be opened, the old one goes on answering, and the new one is tried again.
func (e *Engine) Configure(ctx context.Context, s Settings) error {
	return e.ConfigureWith(ctx, s, func() error { return nil })
}

// ConfigureWith is Configure with something else that belongs to it, and is done when the Settings cannot be refused
// any more; the loop goes on meanwhile. If that fails, nothing changes, and its error is returned.
func (e *Engine) ConfigureWith(ctx context.Context, s Settings, other func() error) error {
	var control *controlServer
	used := false
	err := e.order(ctx, func(context.Context, View) (err error) {
		control, err = e.prepare(s)
		return err
	})
	if err == nil {
		err = other()
	}
	if err == nil {
		err = e.order(ctx, func(ctx context.Context, _ View) error {
			used = true
			return e.configure(ctx, s, control)
		})
	}
	if control != nil && !used {
		control.close()
	}
	return err
}

// prepare does what Settings may be refused for. It opens their control socket; nil: that in use stays.
func (e *Engine) prepare(s Settings) (*controlServer, error) {
	if _, err := service.NewTable(s.Table); err != nil || s.ControlSocket == e.control.path {
		return nil, err
	}
	return e.serveControl(s.ControlSocket)
}

func (e *Engine) configure(ctx context.Context, s Settings, control *controlServer) error {
	if control != nil {
		e.control.close()
		e.control = control
	}
	e.setTimes(s.AuditInterval, s.MaxRest)
	e.options.ResetOrphans = s.ResetOrphans
	e.rests.end()
	e.checks.file.use(s.HealthFile)
	e.checks.move(s.HealthAddress, e.options.Log)
	e.again = true
	err := e.options.Table.Configure(s.Table) // which has been found valid
	if !e.options.Table.Judges() {
		_ = e.options.Plane.Outcomes(ctx, false, nil) // to close what is open does not fail
	}
	return err
}

// setTimes sets what both New and Configure may. A rest must not look like a plane that fails.
func (e *Engine) setTimes(audit, rest time.Duration) {
	e.options.AuditInterval = cmp.Or(audit, auditInterval)
	e.audits.within(e.options.AuditInterval)
	e.rests.limit(min(rest, e.options.HealthTimeout/2))
}

// Parts are what an Engine connects. A new Source belongs to a new Table, as its first Batch is complete.
type Parts struct {
	Source source.Source
	Table  *service.Table
}

// Replace lets the Engine go on with other Parts. The kernel keeps what it holds until the new Source has delivered its
// first Batch: what differs then is programmed. The Source before is the caller's to close.
func (e *Engine) Replace(ctx context.Context, p Parts) error {
	return e.order(ctx, func(context.Context, View) error {
		e.replace(p)
		return nil
	})
}

func (e *Engine) replace(p Parts) {
	e.dirty, e.partial, e.backoff, e.retryAt, e.again = true, false, 0, time.Time{}, true
	e.rests.end()
	e.inbox.close()
	e.options.Source, e.options.Table, e.state = p.Source, p.Table, nil
	e.inbox, e.queue, e.problems = e.pull(p.Source), e.newQueue(), newProblems()
	e.inForce = inForce{}
	e.usedUp = nil // the next audit tells of it again
	e.status.setProblems(nil)
	e.status.eligible(true)
}
