package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source/kube"
)

// chooser chooses a plane and opens it. Only the first Sync knows all of the node's rows, so it is the engine's
// goroutine that calls its methods.
type chooser struct {
	daemon *Daemon
	choice *choice
}

// chooser has the first Sync choose.
func (d *Daemon) chooser() func(context.Context, *model.State) (*handover.Plane, error) {
	return (&chooser{daemon: d}).open
}

// open opens the most suitable of the planes that can be opened. A further attempt uses the same choice.
func (c *chooser) open(ctx context.Context, s *model.State) (*handover.Plane, error) {
	if c.choice == nil {
		c.choice = c.choose(ctx, s)
	}
	if err := ctx.Err(); err != nil {
		c.choice = nil
		return nil, err
	}
	errs := []error{errors.New("mode auto: " + c.choice.Why)}
	for _, name := range c.order() {
		p, err := c.daemon.openExactly(planeOf(c.daemon.config.Load(), name))
		if err != nil {
			c.daemon.log.Warn("the data plane that was chosen cannot be opened; the next one is tried",
				"plane", name, "error", err)
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		c.daemon.choose(name, c.why(name, errs[1:]))
		return p, nil
	}
	return nil, errors.Join(errs...)
}

// choose has the planes measured, or makes the choice for which nothing needs to be.
func (c *chooser) choose(ctx context.Context, s *model.State) *choice {
	d := c.daemon
	d.log.Info("choosing a data plane", "limit", calibration)
	found, err := d.measure(ctx, s)
	if err == nil {
		return found
	}
	if ctx.Err() == nil {
		d.log.Warn("nothing was measured; the first data plane that can be opened is taken", "error", err,
			"plane", strings.Join(Planes(), ", "))
	}
	return unmeasured(err)
}

// order are the planes to try. Those of which there was no hope come last: the machine may have changed.
func (c *chooser) order() []string {
	names := append([]string{c.choice.Plane}, c.choice.Next...)
	for _, name := range Planes() {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == "" })
}

// why is the paragraph about what was opened in the end.
func (c *chooser) why(name string, failed []error) string {
	if len(failed) == 0 {
		return c.choice.Why
	}
	var texts []string
	for _, err := range failed {
		texts = append(texts, err.Error())
	}
	return fmt.Sprintf("%s, as a better data plane cannot be opened: %s. Otherwise: %s",
		name, strings.Join(texts, "; "), c.choice.Why)
}

// choose says everywhere which plane serves in mode auto, and why.
func (d *Daemon) choose(name, why string) {
	d.node.why.Store(&reason{name, why})
	d.log.Info("chose a data plane", "plane", name, "reason", why)
	d.report.emit(kube.Event{Reason: reasonChosen, Message: why})
}

// reason is why a data plane serves.
type reason struct{ plane, text string }

// whyServes is the reason for a plane, in mode auto.
func (d *Daemon) whyServes(plane string) string {
	r := d.node.why.Load()
	switch {
	case d.config.Load().KubeProxy.Mode != config.ModeAuto || plane == autoPlane:
		return ""
	case r != nil && r.plane == plane:
		return r.text
	}
	return kept(plane, "it was chosen before mode auto was set, or by fairlead switch")
}

// kept says why a plane stays.
func kept(plane, as string) string {
	return fmt.Sprintf("%s, as %s. Mode auto changes nothing by itself; fairlead recommend says what it would choose.",
		plane, as)
}

// atStart are the settings of the first plane. In mode auto it is the plane that an earlier process has left in the
// kernel, so that a restart never changes the plane. If there is none, the choice waits for the rows.
func (d *Daemon) atStart(c *config.Config) (planeSettings, error) {
	if c.Plane != autoPlane {
		return planeIn(c), nil
	}
	name, err := Present()
	switch {
	case errors.Is(err, unix.EPERM):
		return planeSettings{}, permitted(err)
	case name == "":
		if err != nil {
			d.log.Warn("cannot see whether an earlier process has left the rules of a data plane; one is chosen anew",
				"error", err)
		}
		return planeIn(c), nil
	}
	why := kept(name, "its rules were in the kernel when this process started")
	d.node.why.Store(&reason{name, why})
	d.log.Info("kept a data plane", "plane", name, "reason", why)
	return planeOf(c, name), nil
}

// wanted are the settings of the plane for another configuration. In mode auto the plane stays.
func (d *Daemon) wanted(c *config.Config) planeSettings {
	if c.Plane != autoPlane {
		return planeIn(c)
	}
	return planeOf(c, d.requested().name)
}

// requested are the settings with which the plane in force was opened, without what it has found out. Of mode auto it
// is all that the configuration says, until a plane is chosen.
func (d *Daemon) requested() planeSettings {
	if d.planeSettings.name != autoPlane {
		return d.planeSettings
	}
	p := d.plane.InForce()
	if p == nil {
		return planeOf(d.config.Load(), autoPlane)
	}
	d.planeSettings = planeOf(d.config.Load(), p.Name)
	return d.planeSettings
}

// loadAll has the kernel load the modules of all planes that it has, and prepares them: which one will be chosen is
// not known.
func loadAll(c *config.Config, l *Logs) error {
	if name, _ := Present(); name != "" {
		return planeOf(c, name).load(c, l)
	}
	var errs []error
	for _, name := range Planes() {
		s := planeOf(c, name)
		if err := s.load(c, l); err != nil && !s.lacks(err) {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// load does so for one.
func (s planeSettings) load(c *config.Config, l *Logs) error {
	p, err := s.openItself(dataplane.Config{Log: l.Logger()})
	if err != nil {
		return permitted(err)
	}
	return errors.Join(p.Close(), prepare(c, found(p), l))
}
