package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// switchPatience is for how long the configuration may try to change the data plane.
const switchPatience = 5 * time.Minute

var (
	errTooLong   = fmt.Errorf("the change of the data plane did not end within %v", switchPatience)
	errCancelled = errors.New("the change of the data plane was cancelled; edit the configuration to try again")
	errOutdated  = errors.New("the configuration has been edited again")
)

// givenUp is a configuration that is not tried again, because an order has ended the attempt.
type givenUp struct {
	config *config.Config
	why    error
}

// up returns why, if it is this one; another one is tried.
func (g *givenUp) up(c *config.Config) error {
	if g.config == nil || len(config.Compare(g.config, c)) > 0 {
		*g = givenUp{}
		return nil
	}
	return g.why
}

// reload reads the configuration again and brings what changed into force, all or nothing.
func (d *Daemon) reload(ctx context.Context) {
	c, err := d.options.Load()
	if err == nil {
		err = d.change(ctx, c)
	}
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, errOutdated): // what it is now comes next
		d.log.Info(err.Error())
	default:
		d.judged(err)
	}
}

// judged says that the configuration is refused, and why, or that it is well again.
func (d *Daemon) judged(err error) {
	d.metrics.ConfigurationRefused(err != nil)
	d.whyRefused.Store("")
	if err != nil {
		d.whyRefused.Store(err.Error())
	}
	switch {
	case err == nil && d.refused.Cleared():
		d.log.Info("the configuration is accepted again")
		d.report.emit(kube.Event{Reason: reasonAccepted, Message: "the configuration files are valid again, and in force"})
	case err != nil && d.refused.Changed(err.Error()):
		d.log.Error("the configuration was refused; the old one stays", "error", err)
		d.report.warn(reasonRefused, "the old configuration stays: "+err.Error())
	}
}

// change brings a configuration into force.
func (d *Daemon) change(ctx context.Context, c *config.Config) error {
	changes := config.Compare(d.config.Load(), c)
	if err := d.given.up(c); err != nil {
		return err
	}
	n, err := d.prepare(c)
	if err != nil || len(changes) == 0 && !n.changesFeed {
		return errors.Join(err, d.drop(n))
	}
	if err := d.engine.ConfigureWith(ctx, n.settings, func() error { return d.changePlane(ctx, c, n) }); err != nil {
		return errors.Join(err, d.drop(n))
	}
	old := d.config.Swap(c)
	d.chosen = n.chosen
	d.options.Logs.obey(c, old.Warnings)
	d.metrics.ServiceSeries(int(c.Fairlead.MetricsServices))
	d.logSettings(changes, n)
	d.replace(ctx, n)
	d.changeNode(old, c)
	_ = d.listen(ctx) // it is tried again
	d.takeOver(ctx)
	return nil
}

// replace lets the engine work with what was prepared, the feed once that has delivered.
func (d *Daemon) replace(ctx context.Context, n prepared) {
	if n.plane != nil {
		d.use(ctx, n.planeSettings, n.plane)
	}
	if n.changesFeed {
		d.feeds.abandon()
	}
	if n.feed != nil {
		d.feeds.await(ctx, n.feed)
	}
}

// changePlane has another data plane take the place of the active one, if that is wanted. If it fails, nothing changes.
//
// No client waits for it as for an order, and it may take for ever, as when another program holds a lock. So three
// things end it: files that say something else, an order, and a time limit.
func (d *Daemon) changePlane(ctx context.Context, c *config.Config, n prepared) error {
	if !n.switches {
		return nil
	}
	limited, end := context.WithTimeoutCause(ctx, switchPatience, errTooLong)
	defer end()
	limited, cancel := context.WithCancelCause(limited)
	defer cancel(nil)
	defer d.switches.begin(n.planeSettings.name, func() { cancel(errCancelled) })()
	stop := d.files.whenOther(limited, d.options.Load, c, func() { cancel(errOutdated) })
	err := d.switchTo(limited, n.planeSettings, nil)
	stop()
	if why := context.Cause(limited); err != nil && why != nil {
		err = fmt.Errorf("%w: %w", why, err)
	}
	if errors.Is(err, errCancelled) {
		d.given = givenUp{c, err}
	}
	if !errors.Is(err, handover.ErrStarting) {
		return err
	}
	p, err := d.openExactly(n.planeSettings)
	if err == nil {
		d.use(ctx, n.planeSettings, p)
	}
	return err
}

// use has a data plane go on where another one has stopped, with what that has left in the kernel.
func (d *Daemon) use(ctx context.Context, s planeSettings, p *handover.Plane) {
	d.node.planeBegins()
	d.planeSettings = s
	if err := d.plane.Replace(ctx, d.engine, p); err != nil {
		d.log.Warn("cannot close the data plane that was replaced", "error", err)
	}
	d.reportSubstitute()
}

// prepared is what can fail, done before anything is changed.
type prepared struct {
	settings      engine.Settings
	planeSettings planeSettings
	chosen        string          // see Daemon
	switches      bool            // to another plane
	plane         *handover.Plane // of the same name; nil: it stays
	moves         bool            // the rules of the new plane are elsewhere
	feed          *feed           // nil: it stays
	changesFeed   bool            // a feed that has not delivered yet is abandoned
}

func (d *Daemon) prepare(c *config.Config) (n prepared, err error) {
	if n.settings, err = d.engineSettings(c); err != nil {
		return n, err
	}
	wanted, err := feedIn(c)
	if err != nil {
		return n, err
	}
	n.changesFeed = wanted != d.feeds.wanted()
	if n.changesFeed && wanted != d.feeds.used.Load().settings {
		if n.feed, err = wanted.open(d.options.Logs); err != nil {
			return n, err
		}
	}
	n.planeSettings = d.wanted(c)
	if c.KubeProxy.Mode == d.config.Load().KubeProxy.Mode && d.chosen != "" { // no file has asked for another one since
		n.chosen = d.chosen
		n.planeSettings = planeOf(c, d.chosen)
	}
	requested := d.requested()
	n.moves = n.planeSettings.movesFrom(requested)
	n.switches = n.planeSettings.name != requested.name
	if !n.switches && n.planeSettings != requested && requested.name != autoPlane {
		open := d.openExactly // a working plane stays, rather than nftables take its place
		if d.substitute() != "" {
			open = d.openPlane
		}
		n.plane, err = open(n.planeSettings)
	}
	return n, err
}

// drop closes what was prepared.
func (d *Daemon) drop(n prepared) error {
	var errs []error
	if n.feed != nil {
		errs = append(errs, n.feed.close())
	}
	if n.plane != nil {
		errs = append(errs, d.plane.Discard(n.plane))
	}
	return errors.Join(errs...)
}

// logSettings says of each setting what became of it.
func (d *Daemon) logSettings(changes config.Changes, n prepared) {
	folded := changes.Has("mode") // then sections of other modes have come and gone
	for _, c := range changes {
		if folded && c.Class == config.NoEffect {
			continue
		}
		d.log.Info("configuration changed", "field", c.Field, "from", c.Old, "to", c.New, "effect", n.effect(c.Class))
	}
	if len(changes) == 0 {
		d.log.Info("configuration changed", "field", "clientConnection.kubeconfig: what is in the file",
			"effect", n.effect(config.Rebuild))
	}
	d.report.emit(kube.Event{Reason: reasonApplied, Message: fmt.Sprintf("settings changed: %d", max(1, len(changes)))})
}

// effect is when and how a change comes into force.
func (n *prepared) effect(class config.Class) string {
	switch {
	case class == config.NoEffect:
		return "none, it has no meaning here"
	case class == config.AtStart:
		return "when the process starts the next time"
	case class == config.OnTable:
		return "at once, rows are computed anew"
	case class == config.Rebuild && n.feed != nil:
		return "when all objects have been read anew; until then the old ones are served"
	case class == config.Rebuild && (n.plane != nil || n.switches) && n.moves:
		return "at once, by a new data plane; the rules of the old one go when its own are in force"
	case class == config.Rebuild && n.plane != nil:
		return "at once, by a new data plane that adopts what is in the kernel"
	}
	return "at once"
}

// adopt lets the engine go on with another source.
func (d *Daemon) adopt(ctx context.Context, s source.Source) error {
	settings, err := d.engineSettings(d.config.Load())
	if err != nil {
		return err
	}
	table, err := service.NewTable(settings.Table)
	if err != nil {
		return err
	}
	return d.engine.Replace(ctx, engine.Parts{Source: s, Table: table})
}
