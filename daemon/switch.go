package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
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

// The steps beside those of engine.SwitchStep. The last one of each change is done, unchanged or failed.
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
	daemon *Daemon
	from   *opened
	to     planeSettings
	tell   func(SwitchStep)
	began  time.Time
}

// switchTo changes the data plane. After an error the one before is in force, and nothing is left of the other one.
func (d *Daemon) switchTo(ctx context.Context, to planeSettings, tell func(SwitchStep)) error {
	c := &change{daemon: d, from: d.plane, to: to, tell: tell, began: time.Now()}
	d.log.Info("changing the data plane", "from", d.mode(), "to", to.name)
	err := c.perform(ctx)
	// That somebody has changed his mind, or that it is too early, is no failure.
	idle := errors.Is(ctx.Err(), context.Canceled) ||
		errors.Is(err, engine.ErrStarting) || errors.Is(err, engine.ErrStopped)
	d.metrics.Switched(c.from.settings.name, to.name, outcome(err, idle), time.Since(c.began))
	if err == nil {
		d.log.Info("the data plane has changed", "from", c.from.settings.name, "to", to.name, "took", time.Since(c.began))
		d.report.emit(kube.Event{Reason: reasonSwitched,
			Message: fmt.Sprintf("the data plane %s has taken the place of %s", to.name, c.from.settings.name)})
		return nil
	}
	err = fmt.Errorf("the data plane %s stays, as %s cannot take its place: %w", c.from.settings.name, to.name, err)
	level := slog.LevelError
	if idle {
		level = slog.LevelInfo
	} else {
		d.report.warn(reasonSwitchFailed, err.Error())
	}
	d.log.Log(ctx, level, "the data plane has not changed", "from", c.from.settings.name, "to", to.name, "error", err)
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

func (c *change) perform(ctx context.Context) error {
	d := c.daemon
	if d.decided() != nil {
		return engine.ErrStarting
	}
	c.say(SwitchStep{Step: stepOpening, Plane: c.to.name, Message: "opening " + c.to.name})
	c.from.heir.wait() // first: what is taken back nobody else knows for a carrier any more
	o, err := d.openPlane(c.to, opening{exact: true, second: true})
	if err == nil {
		_, err = o.SetStage(ctx, nil, dataplane.Standby)
	}
	if err != nil {
		c.from.heir.doubt()
		return err
	}
	d.successor.spared.all()
	err = d.engine.Switch(ctx, engine.Switch{
		To:       o.Dataplane,
		Together: o.sharesWith(c.from),
		Lacks:    func() bool { return c.from.heir.lacks },
		InForce:  func(ctx context.Context, s *model.State) error { return c.succeed(ctx, o, s) },
		Undo:     c.from.heir.doubt,
		Progress: c.progress,
	})
	if err != nil {
		c.from.heir.doubt() // also if it has not come to an Undo
		return err
	}
	d.planeSettings, d.plane = c.to, o
	return nil
}

func (c *change) say(s SwitchStep) {
	if c.tell != nil {
		c.tell(s)
	}
}

// progress says what the engine has done.
func (c *change) progress(p engine.Progress) {
	s := SwitchStep{Step: string(p.Step), Plane: c.to.name}
	took := p.Took.Round(time.Millisecond)
	switch p.Step {
	case engine.StepProgrammed:
		s.Frontends = p.Rows.Frontends
		s.Message = fmt.Sprintf("programmed %d frontends, %d pools in %v", p.Rows.Frontends, p.Rows.Pools, took)
		if p.Err != nil {
			s.Message += fmt.Sprintf("; with this data plane too, %v", p.Err)
		}
	case engine.StepVerified:
		s.Frontends = p.Rows.Frontends
		s.Message = fmt.Sprintf("verified, the kernel holds all of it (%v)", took)
		if p.Err != nil {
			s.Message = fmt.Sprintf("verified, the kernel holds all else (%v)", took)
		}
	case engine.StepCarried:
		s.Clients = p.Clients
		s.Message = fmt.Sprintf("carried over which backends %d clients keep", p.Clients)
		if p.Err != nil {
			s.Message += fmt.Sprintf("; not all: %v", p.Err)
			c.daemon.log.Warn("clients with session affinity may get other backends", "error", p.Err)
		}
	case engine.StepInForce:
		c.daemon.serving.Store(&c.to)
		s.Message = c.to.name + " is in force"
	case engine.StepRolledBack:
		s.Plane = c.from.settings.name
		s.Message = fmt.Sprintf("rolled back: nothing is left of %s", c.to.name)
		if s.Connections = c.from.heir.connections(c.to.name); s.Connections > 0 {
			s.Message = fmt.Sprintf("rolled back; up to %d connections through %s live on, and what they need is removed "+
				"when they have ended, after %v at the latest", s.Connections, c.to.name, drainTime)
		}
		if p.Err != nil {
			s.Message = fmt.Sprintf("rolled back, but something is left of %s, and will be removed: %v", c.to.name, p.Err)
		}
	}
	c.say(s)
}

// succeed removes what is left of the plane before, and says what stays.
func (c *change) succeed(ctx context.Context, o *opened, s *model.State) error {
	c.daemon.serving.Store(&o.settings) // with what it has found out
	left, err := o.heir.succeed(ctx, s)
	for _, r := range left {
		if r.removed {
			c.say(SwitchStep{Step: stepRemoved, Plane: r.plane, Message: "removed what " + r.plane + " had in the kernel"})
		}
		if r.connections > 0 {
			c.say(SwitchStep{Step: stepConnections, Plane: r.plane, Connections: r.connections, Message: fmt.Sprintf(
				"%d connections through %s live on; what they need is removed when they have ended, after %v at the latest",
				r.connections, r.plane, drainTime)})
		}
	}
	if err != nil {
		c.say(SwitchStep{Step: stepRetry, Plane: c.from.settings.name, Message: fmt.Sprintf("%v; trying again", err)})
	}
	return err
}

// sharesWith reports whether two planes have something in the kernel in common.
func (o *opened) sharesWith(other *opened) bool {
	return o.settings.name == other.settings.name || o.isOver(other) || other.isOver(o)
}

// isOver reports whether the other plane's rules are a part of this one's.
func (o *opened) isOver(other *opened) bool {
	p, err := planeNamed(o.settings.name)
	name := other.settings.name
	return err == nil && p.behind == name || o.over() == name
}

// opening is how a data plane is opened.
type opening struct {
	exact  bool // no other one will do
	second bool // another one of this process is in force
}
