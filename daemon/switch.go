package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/source/kube"
)

// SwitchStep is something that a change of the data plane has done, or how it has ended.
type SwitchStep struct {
	Step        string `json:"step"`
	Plane       string `json:"plane,omitempty"` // which it is about
	Message     string `json:"message"`
	Frontends   int    `json:"frontends,omitempty"`
	Clients     int    `json:"clients,omitempty"`
	Connections int    `json:"connections,omitempty"`
}

// The steps beside those of handover.Step. The last one of each change is done, unchanged or failed.
const (
	stepOpening     = "opening"
	stepConnections = "connections" // live on, and need what is left of the old plane
	stepRemoved     = "removed"     // nothing is left of it
	stepRetry       = "retry"       // something is, and should not
	stepNote        = "note"
	StepDone        = "done"
	StepUnchanged   = "unchanged"
	StepFailed      = "failed"
)

// change is one of the data plane.
type change struct {
	daemon   *Daemon
	from, to string
	report   func(SwitchStep)
}

// switchTo changes the data plane. After an error the one before is in force, and nothing is left of the other one.
func (d *Daemon) switchTo(ctx context.Context, to planeSettings, report func(SwitchStep)) error {
	c := &change{daemon: d, from: d.mode(), to: to.name, report: report}
	began := time.Now()
	d.log.Info("changing the data plane", "from", c.from, "to", c.to)
	err := d.plane.Switch(ctx, d.engine, func() (*handover.Plane, error) {
		c.say(SwitchStep{Step: stepOpening, Plane: c.to, Message: "opening " + c.to})
		p, err := d.openExactly(to)
		if err == nil {
			d.node.planeBegins()
		}
		return p, err
	}, c.progress)
	debug.FreeOSMemory() // reading and programming everything takes several times what remains
	// That an operator has changed their mind, or that it is too early, is no failure.
	idle := errors.Is(ctx.Err(), context.Canceled) ||
		errors.Is(err, handover.ErrStarting) || errors.Is(err, engine.ErrStopped)
	d.metrics.Switched(c.from, c.to, outcome(err, idle), time.Since(began))
	if err == nil {
		d.planeSettings = to
		d.log.Info("the data plane has changed", "from", c.from, "to", c.to, "took", time.Since(began))
		d.report.emit(kube.Event{Reason: reasonSwitched,
			Message: fmt.Sprintf("the data plane %s has taken the place of %s", c.to, c.from)})
		return nil
	}
	err = fmt.Errorf("the data plane %s stays, as %s cannot take its place: %w", c.from, c.to, err)
	level := slog.LevelError
	if idle {
		level = slog.LevelInfo
	} else {
		d.report.warn(reasonSwitchFailed, err.Error())
	}
	d.log.Log(ctx, level, "the data plane has not changed", "from", c.from, "to", c.to, "error", err)
	return err
}

// outcome is the result in metrics.
func outcome(err error, idle bool) string {
	switch {
	case err == nil:
		return "success"
	case idle:
		return "cancelled"
	}
	return "failure"
}

func (c *change) say(s SwitchStep) {
	if c.report != nil {
		c.report(s)
	}
}

// progress reports a step of a switch.
func (c *change) progress(p handover.Progress) {
	s := SwitchStep{Step: string(p.Step), Plane: c.to, Frontends: p.Frontends, Clients: p.Clients}
	took := p.Took.Round(time.Millisecond)
	switch p.Step {
	case handover.Programmed:
		s.Message = fmt.Sprintf("programmed %d frontends, %d pools in %v", p.Frontends, p.Pools, took)
		if p.Err != nil {
			s.Message += fmt.Sprintf("; as before, %v", p.Err)
		}
	case handover.Verified:
		s.Message = fmt.Sprintf("verified: the kernel holds all rows (%v)", took)
		if p.Err != nil {
			s.Message = fmt.Sprintf("verified: the kernel holds all other rows (%v)", took)
		}
	case handover.Learned:
		s.Message = fmt.Sprintf("handed over session affinity: %d clients keep their backends", p.Clients)
		if p.Err != nil {
			s.Message += fmt.Sprintf("; others may get other backends: %v", p.Err)
			c.daemon.log.Warn("clients with session affinity may get other backends", "error", p.Err)
		}
	case handover.Activated:
		s.Message = c.to + " is in force"
	case handover.RolledBack:
		s.Plane, s.Connections = c.from, p.Connections
		s.Message = fmt.Sprintf("rolled back: nothing is left of %s", c.to)
		if p.Connections > 0 {
			s.Message = fmt.Sprintf("rolled back; up to %d connections through %s stay open; their kernel objects are "+
				"removed when they end, after %v at the latest", p.Connections, c.to, drainTime)
		}
		if p.Err != nil {
			s.Message = fmt.Sprintf("rolled back, but kernel objects of %s remain, and will be removed: %v", c.to, p.Err)
		}
	case handover.Cleared:
		c.cleared(p)
		return
	}
	c.say(s)
}

// cleared reports what is left of the plane before.
func (c *change) cleared(p handover.Progress) {
	for _, r := range p.Left {
		if r.Removed {
			c.say(SwitchStep{Step: stepRemoved, Plane: r.Plane, Message: "removed the kernel objects of " + r.Plane})
		}
		if r.Connections > 0 {
			c.say(SwitchStep{Step: stepConnections, Plane: r.Plane, Connections: r.Connections, Message: fmt.Sprintf(
				"%d connections through %s stay open; their kernel objects are removed when they end, after %v at the latest",
				r.Connections, r.Plane, drainTime)})
		}
	}
	if p.Err != nil {
		c.say(SwitchStep{Step: stepRetry, Plane: c.from, Message: fmt.Sprintf("%v; trying again", p.Err)})
	}
}
