package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source/kube"
)

// autoPlane is the name of the plane in mode auto, until one is chosen.
const autoPlane = string(config.ModeAuto)

// undecided is the data plane of mode auto as long as none of ours has rules in the kernel. Only its first Sync
// knows all of the node's rows: it measures, chooses, opens what it has chosen, and has that serve from then on. The
// daemon then puts the chosen one in its place (settle).
type undecided struct {
	dataplane.Dataplane // the chosen one, or nothing
	chosen              bool
	open                func(context.Context, *model.State) (*opened, error)
	told                chan *opened // has what was chosen, one time
	passed              atomic.Bool  // the daemon closes the chosen one
}

// nothing is what serves until a data plane is chosen.
type nothing struct{ dataplane.Base }

func (nothing) Sync(context.Context, *model.State) error                     { return nil }
func (nothing) Apply(context.Context, *model.State, model.Change) error      { return nil }
func (nothing) Repair(context.Context, *model.State, dataplane.Report) error { return nil }
func (nothing) Remove(context.Context) error                                 { return nil }
func (nothing) Close() error                                                 { return nil }
func (nothing) Audit(context.Context, *model.State, dataplane.Depth) (r dataplane.Report, err error) {
	return r, nil
}

// undecided makes one.
func (d *Daemon) undecided(s planeSettings) *opened {
	c := chooser{daemon: d, settings: s}
	u := &undecided{Dataplane: nothing{}, open: c.open, told: make(chan *opened, 1)}
	return &opened{Dataplane: u, inner: u, settings: s}
}

// Sync implements dataplane.Dataplane.
func (u *undecided) Sync(ctx context.Context, s *model.State) error {
	if !u.chosen {
		o, err := u.open(ctx, s)
		if err != nil {
			return err
		}
		u.Dataplane, u.chosen = o, true
		u.told <- o
	}
	return u.Dataplane.Sync(ctx, s)
}

// Close implements dataplane.Dataplane.
func (u *undecided) Close() error {
	if u.passed.Load() {
		return nil
	}
	return u.Dataplane.Close()
}

// decided has the plane that was chosen, one time; nil: there is nothing to choose.
func (d *Daemon) decided() <-chan *opened {
	if u, ok := d.plane.Dataplane.(*undecided); ok {
		return u.told
	}
	return nil
}

// settle puts it in the place of the undecided one.
func (d *Daemon) settle(ctx context.Context, o *opened) {
	if u, ok := d.plane.Dataplane.(*undecided); ok {
		u.passed.Store(true)
	}
	d.plane, d.planeSettings = o, planeOf(d.config.Load(), o.settings.name)
	if err := d.engine.Replace(ctx, engine.Parts{Plane: o.Dataplane}); err != nil && ctx.Err() == nil {
		d.log.Warn("replacing the data plane", "error", err)
	}
}

// chooser chooses a plane and opens it. Its methods are called by the engine's goroutine.
type chooser struct {
	daemon   *Daemon
	settings planeSettings // of mode auto
	choice   *choice
}

// open opens the plane that suits best, of those that can be opened. What was found is not found out again when
// it is tried again.
func (c *chooser) open(ctx context.Context, s *model.State) (*opened, error) {
	if c.choice == nil {
		c.choice = c.choose(ctx, s)
	}
	if err := ctx.Err(); err != nil {
		c.choice = nil
		return nil, err
	}
	errs := []error{errors.New("mode auto: " + c.choice.Why)}
	for _, name := range c.order() {
		o, err := c.daemon.openPlane(c.settings.as(name), opening{exact: true})
		if err != nil {
			c.daemon.log.Warn("the data plane that was chosen cannot be opened; the next one is tried",
				"plane", name, "error", err)
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		c.daemon.choose(o, c.why(name, errs[1:]))
		return o, nil
	}
	return nil, errors.Join(errs...)
}

// choose has the planes measured, or makes the choice for which nothing needs to be.
func (c *chooser) choose(ctx context.Context, s *model.State) *choice {
	d := c.daemon
	d.log.Info("choosing a data plane", "for", calibration)
	found, err := d.measure(ctx, s)
	if err == nil {
		return found
	}
	if ctx.Err() == nil {
		d.log.Warn("nothing was measured; the first data plane that can be opened is taken", "error", err,
			"order", strings.Join(Planes(), ", "))
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
	return fmt.Sprintf("%s, as what would be better cannot be opened: %s. Otherwise: %s",
		name, strings.Join(texts, "; "), c.choice.Why)
}

// choose says everywhere which plane serves in mode auto, and why.
func (d *Daemon) choose(o *opened, why string) {
	d.serving.Store(&o.settings)
	d.why.Store(&reason{o.settings.name, why})
	d.log.Info("chose a data plane", "plane", o.settings.name, "why", why)
	d.report.emit(kube.Event{Reason: reasonChosen, Message: why})
}

// reason is why a data plane serves.
type reason struct{ plane, text string }

// whyServes is the reason for a plane, in mode auto.
func (d *Daemon) whyServes(plane string) string {
	r := d.why.Load()
	switch {
	case d.config.Load().KubeProxy.Mode != config.ModeAuto || plane == autoPlane:
		return ""
	case r != nil && r.plane == plane:
		return r.text
	}
	return kept(plane, "it was wanted before the mode was auto, or by fairlead switch")
}

// kept says why a plane stays.
func kept(plane, as string) string {
	return fmt.Sprintf("%s, as %s. Mode auto changes nothing by itself; fairlead recommend says what it would choose.",
		plane, as)
}

// atStart are the settings of the plane to begin with. In mode auto it is the one that an earlier process has left
// in the kernel, so that it never changes by itself; where there is none it is chosen when the rows are known.
func (d *Daemon) atStart(c *config.Config) (planeSettings, error) {
	if c.Plane != autoPlane {
		return planeIn(c), nil
	}
	name, err := Present()
	switch {
	case errors.Is(err, unix.EPERM):
		return planeSettings{}, permitted(err)
	case name == "":
		return planeIn(c), nil
	}
	why := kept(name, "its rules were in the kernel when this process started")
	d.why.Store(&reason{name, why})
	d.log.Info("kept a data plane", "plane", name, "why", why)
	return planeOf(c, name), nil
}

// wanted are the settings of the plane for another configuration. In mode auto the plane stays.
func (d *Daemon) wanted(c *config.Config) planeSettings {
	if c.Plane != autoPlane {
		return planeIn(c)
	}
	return planeOf(c, d.planeSettings.name)
}

// as are the settings of one plane, of those of mode auto.
func (s planeSettings) as(name string) planeSettings {
	one := planeSettings{name: name, mark: s.mark}
	switch name {
	case iptablesPlane:
		one.iptables = s.iptables
	case ipvsPlane:
		one.ipvs = s.ipvs
	case ebpfPlane:
		one.ebpf = s.ebpf
	case userspacePlane:
		one.userspace = s.userspace
	}
	return one
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
	o, err := s.openItself(dataplane.Config{Log: l.Logger()})
	if err != nil {
		return permitted(err)
	}
	return errors.Join(o.Close(), prepare(c, o.settings, l))
}
