package takeover

import (
	"context"
	"errors"
	"time"
)

// Progress tells how far the draining of IPVS has come.
type Progress struct {
	Servers     int // virtual servers that are left
	Connections int // through them, and from addresses on kube-ipvs0
	Deadline    time.Time
}

// How often to look: soon at first, when short connections end.
const (
	firstLook = time.Second
	lastLook  = 30 * time.Second
)

// Drain waits until the connections through IPVS have ended, or the deadline has passed, and removes what Remove left
// for them. It returns at once if there is nothing to wait for. The deadline is in the kernel, as the alias of
// kube-ipvs0, so that a process that takes over later keeps it. Progress is logged, and report is called with it, last
// with zeros; report may be nil.
//
// When ctx ends, IPVS goes on, and the error is that of ctx. It is an error, too, when kube-proxy is back. After
// others, which are logged, the step is repeated.
func (t *Takeover) Drain(ctx context.Context, report func(Progress)) error {
	var last Progress
	for wait := firstLook; ; wait = min(2*wait, lastLook) {
		p, left, err := t.look(ctx)
		if errors.Is(err, errReturned) {
			return err
		}
		if err != nil {
			t.config.Log.Warn("drain IPVS; trying again", "error", err)
		}
		if err == nil && p != last {
			if report != nil {
				report(p)
			}
			last, wait = p, firstLook
		}
		if err == nil && !left {
			return nil
		}
		if err := pause(ctx, wait, p.Deadline); err != nil {
			return err
		}
	}
}

// look does one step, and tells whether there is more to do.
func (t *Takeover) look(ctx context.Context) (p Progress, left bool, err error) {
	servers := t.servers()
	err = t.here.Do(func() error {
		var err error
		if p, err = servers.step(ctx); err != nil {
			return err
		}
		s, err := servers.read()
		left = s.draining()
		return err
	})
	return p, left, err
}

// say logs how far draining has come, when that has changed.
func (v *virtualServers) say(p Progress) {
	switch last := *v.said; {
	case p == last:
		return
	case p == (Progress{}):
		v.Log.Info("IPVS serves no connection any more; kube-proxy's virtual servers are removed")
	default:
		v.Log.Info("connections through IPVS stay open", "servers", p.Servers, "connections", p.Connections,
			"until", p.Deadline)
	}
	*v.said = p
}

// pause waits, but not beyond the deadline.
func pause(ctx context.Context, wait time.Duration, deadline time.Time) error {
	if !deadline.IsZero() {
		wait = max(min(wait, time.Until(deadline)), 10*time.Millisecond)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return nil
	}
}
