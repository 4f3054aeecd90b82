package daemon

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// reload reads the configuration again and brings what changed into force, all or nothing.
func (d *Daemon) reload(ctx context.Context) {
	c, err := d.options.Load()
	if err == nil {
		err = d.change(ctx, c)
	}
	if ctx.Err() == nil {
		d.judged(err)
	}
}

// judged says that the configuration is refused, and why, or that it is well again.
func (d *Daemon) judged(err error) {
	d.metrics.ConfigurationRefused(err != nil)
	switch {
	case err == nil && d.refused.Over():
		d.log.Info("the configuration is accepted again")
		d.report.emit(kube.Event{Reason: reasonAccepted, Message: "the configuration in force is that of the files again"})
	case err != nil && d.refused.News(err.Error()):
		d.log.Error("the configuration was refused; the old one stays", "error", err)
		d.report.warn(reasonRefused, "the old configuration stays: "+err.Error())
	}
}

// change brings a configuration into force.
func (d *Daemon) change(ctx context.Context, c *config.Config) error {
	changes := config.Compare(d.config.Load(), c)
	n, err := d.prepare(c)
	if err != nil || len(changes) == 0 && !n.changesFeed {
		return errors.Join(err, n.drop())
	}
	if err := d.engine.Configure(ctx, n.settings); err != nil {
		return errors.Join(err, n.drop())
	}
	old := d.config.Swap(c)
	d.options.Logs.obey(c, old.Warnings)
	d.tell(changes, n)
	d.replace(ctx, n)
	if d.unset.Lasts() || !reflect.DeepEqual(hostSettings(old), hostSettings(c)) {
		d.setHost(c) // else an administrator may have set something meanwhile
	}
	_ = d.listen(ctx) // it is tried again
	d.takeOver(ctx)
	return nil
}

// replace lets the engine work with what was prepared, the feed once that has delivered.
func (d *Daemon) replace(ctx context.Context, n prepared) {
	if n.plane != nil {
		d.successor.spared.all()
		d.planeSettings, d.plane = n.planeSettings, n.plane
		d.serving.Store(&n.plane.settings)
		d.tellSubstitute()
		if err := d.engine.Replace(ctx, engine.Parts{Plane: n.plane.Dataplane}); err != nil {
			d.log.Warn("replacing the data plane", "error", err)
		}
	}
	if n.changesFeed {
		d.feeds.abandon()
	}
	if n.feed != nil {
		d.feeds.await(ctx, n.feed)
	}
}

// prepared is what can fail, done before anything is changed.
type prepared struct {
	settings      engine.Settings
	planeSettings planeSettings
	plane         *opened // nil: it stays
	moves         bool    // the rules of the new plane are elsewhere
	feed          *feed   // nil: it stays
	changesFeed   bool    // what was on its way is not wanted any more
}

func (d *Daemon) prepare(c *config.Config) (n prepared, err error) {
	if n.settings, err = engineSettings(c); err != nil {
		return n, err
	}
	wanted, err := feedIn(c, d.options.Master)
	if err != nil {
		return n, err
	}
	n.changesFeed = wanted != d.feeds.wanted()
	if n.changesFeed && wanted != d.feeds.used.Load().settings {
		if n.feed, err = wanted.open(d.options.Logs); err != nil {
			return n, err
		}
	}
	if n.planeSettings = planeIn(c); n.planeSettings != d.planeSettings {
		n.moves = n.planeSettings.movesFrom(d.planeSettings)
		n.plane, err = d.openPlane(n.planeSettings)
	}
	return n, err
}

// drop closes what was prepared.
func (n *prepared) drop() error {
	var errs []error
	if n.feed != nil {
		errs = append(errs, n.feed.close())
	}
	if n.plane != nil {
		errs = append(errs, n.plane.Close())
	}
	return errors.Join(errs...)
}

// tell says of each setting what became of it.
func (d *Daemon) tell(changes config.Changes, n prepared) {
	folded := changes.Has("mode") // then sections of other modes have come and gone
	for _, c := range changes {
		if folded && c.Class == config.NoEffect {
			continue
		}
		d.log.Info("configuration changed", "field", c.Field, "old", c.Old, "new", c.New, "effect", n.effect(c.Class))
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
	case class == config.Rebuild && n.plane != nil && n.moves:
		return "at once, by a new data plane; the rules of the old one go when its own are in force"
	case class == config.Rebuild && n.plane != nil:
		return "at once, by a new data plane that adopts what is in the kernel"
	}
	return "at once"
}

// adopt lets the engine go on with another source.
func (d *Daemon) adopt(ctx context.Context, s source.Source) error {
	o, err := tableOptions(d.config.Load())
	if err != nil {
		return err
	}
	table, err := service.NewTable(o)
	if err != nil {
		return err
	}
	return d.engine.Replace(ctx, engine.Parts{Source: s, Table: table})
}
