// Package daemon puts the parts of Fairlead together as one process, and takes them apart again when the configuration
// changes.
//
//	manifests  ─┐        ┌─► table ─► engine ─► data plane ─► kernel
//	API server ─┼─ feed ─┘              │
//	interfaces ─┘                       ├─► metrics ◄── server (/metrics, /configz, …)
//	                                    ├─► reporter ─► Events
//	                                    └─► successor: removes kube-proxy's rules once ours are in force
//	configuration files ─► watcher ─► reload ─► engine.Configure | engine.Replace | listeners | host | log
//
// A changed file never ends the process. An invalid configuration is refused as a whole, and the old one stays. Most
// valid changes are set in the running parts. A new source must deliver its first batch before the old one is closed. A
// new data plane adopts the old one's objects in the kernel, or removes them once its own rules are active and have
// been read back. /healthz answers all the time.
package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/drain"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/server"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/version"
)

// Options say what a process is to do.
type Options struct {
	// Load reads the configuration, at the start and whenever a file has changed.
	Load func() (*config.Config, error)
	// Once ends Run when all has been programmed for the first time.
	Once bool
	// InForce is called when rules are in force for the first time; nil: nothing is.
	InForce func()
	// Flags tells the flags of the command line for /flagz.
	Flags func() map[string]string
	Logs  *Logs
}

// Daemon is a running process.
type Daemon struct {
	options    Options
	log        *slog.Logger
	config     atomic.Pointer[config.Config] // in force
	whyRefused atomic.Value                  // string: why the configuration files are not in force; empty: they are
	node       node

	metrics  *metrics.Metrics
	server   *server.Server
	report   *reporter
	engine   *engine.Engine
	drain    *drain.Barrier
	plane    *handover.Handover
	switches switches

	// Only the goroutine that reloads uses the fields from here on.
	planeSettings  planeSettings // that are wanted; see requested
	files          *watcher      // of the configuration
	given          givenUp
	chosen         string // the plane that an order has switched to; empty: that of the configuration
	feeds          feeds
	refused        said.Condition // a configuration
	metricsFailure said.Condition // the metrics server
	inForce        chan struct{}  // closed when the rules are; nil: that is known
	running        sync.WaitGroup
}

// Run serves until ctx ends, and then returns nil and leaves the kernel as it is. An error of the
// configuration is a ConfigError. Where another Fairlead serves the same network namespace, Run opens
// nothing, and its error names that process.
func Run(ctx context.Context, o Options) error {
	c, err := load(o)
	if err != nil {
		return err
	}
	kube.LogTo(o.Logs.Logger())
	d := &Daemon{options: o, log: o.Logs.Logger()}
	here, err := claim(ctx, d.log)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	case here != nil:
		defer here.Close()
	}
	d.switches.orders = make(chan *switchOrder)
	d.feeds.log, d.feeds.onChange = d.log, d.useFeed
	d.drain = drain.New(d.look, d.log)
	d.config.Store(c)
	return d.run(ctx, c)
}

// ConfigError is an error that the user made.
type ConfigError struct{ error }

// Unwrap returns the error.
func (e ConfigError) Unwrap() error { return e.error }

// Misused has command lines exit as for bad usage.
func (ConfigError) Misused() {}

// load reads the configuration for the first time and obeys what it says of logging.
func load(o Options) (*config.Config, error) {
	c, err := o.Load()
	if err != nil {
		return nil, ConfigError{err}
	}
	o.Logs.obey(c, nil)
	return c, nil
}

func (d *Daemon) run(ctx context.Context, c *config.Config) (err error) {
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.open(c); err != nil {
		return err
	}
	d.prepareNode(c)
	if d.options.Once {
		return d.runOnce(ctx)
	}
	return d.serve(ctx)
}

// open makes the parts. The data plane comes first, as it loads the kernel's modules.
func (d *Daemon) open(c *config.Config) (err error) {
	settings, err := d.engineSettings(c)
	if err != nil {
		return ConfigError{err}
	}
	table, err := service.NewTable(settings.Table)
	if err != nil {
		return ConfigError{err}
	}
	d.metrics = metrics.New(metrics.Options{
		Version: version.String(), Mode: d.mode, ShowHiddenFor: c.KubeProxy.ShowHiddenMetricsForVersion,
	})
	d.metrics.ServiceSeries(int(c.Fairlead.MetricsServices))
	if err := d.startPlane(c); err != nil {
		return err
	}
	if err := d.openFeed(c); err != nil {
		return ConfigError{err}
	}
	if err := d.openNode(); err != nil {
		return err
	}
	d.inForce = make(chan struct{})
	d.log.Info("starting", "version", version.String(), "mode", c.KubeProxy.Mode, "plane", d.mode(),
		"node", settings.Table.NodeName)
	d.engine = d.newEngine(settings, table)
	return nil
}

// startPlane opens the data plane to begin with. In mode auto the first Sync may choose it.
func (d *Daemon) startPlane(c *config.Config) (err error) {
	d.plane = handover.New(handover.Options{
		Drivers: drivers(), Choose: d.chooser(), DrainTime: drainTime, Log: d.log, Cleared: d.node.planeCleared,
		Bulk: d.node.bulk,
	})
	if d.planeSettings, err = d.atStart(c); err != nil || d.planeSettings.name == autoPlane {
		return err
	}
	p, err := d.openPlane(d.planeSettings)
	if err == nil {
		d.plane.Start(p)
	}
	return err
}

// openPlane opens a data plane, or nftables if the node cannot have that one.
func (d *Daemon) openPlane(s planeSettings) (*handover.Plane, error) {
	return d.plane.Reopen(d.planeConfig(), s, s.open)
}

// openExactly opens a data plane, and no other one instead.
func (d *Daemon) openExactly(s planeSettings) (*handover.Plane, error) {
	return d.plane.Reopen(d.planeConfig(), s, func(c dataplane.Config) (*handover.Plane, error) {
		p, err := s.openItself(c)
		return p, permitted(err)
	})
}

func (d *Daemon) planeConfig() dataplane.Config {
	return dataplane.Config{Log: d.log, Meter: d.metrics}
}

// drainTime is for how long connections may need what another plane, or kube-proxy, has left. It is generous: draining
// costs next to nothing, and what then still talks, a watch above all, is used to connect again.
const drainTime = 24 * time.Hour

// reportSubstitute says that another data plane serves than the mode's own.
func (d *Daemon) reportSubstitute() {
	if why := d.substitute(); why != "" {
		d.report.warn(reasonSubstitute, why)
	}
}

// substitute is why another data plane serves than the mode's own; empty: it does not.
func (d *Daemon) substitute() string {
	if p := d.plane.InForce(); p != nil {
		return p.Instead
	}
	return ""
}

// close closes what open has made, as far as it came.
func (d *Daemon) close() error {
	var errs []error
	if f := d.feeds.used.Load(); f != nil {
		errs = append(errs, f.close())
	}
	errs = append(errs, d.node.close())
	if d.plane != nil {
		errs = append(errs, d.plane.Close())
	}
	return errors.Join(errs...)
}

// openFeed begins to watch the objects.
func (d *Daemon) openFeed(c *config.Config) error {
	settings, err := feedIn(c)
	if err != nil {
		return err
	}
	f, err := settings.open(d.options.Logs)
	if err != nil {
		return err
	}
	d.report = newReporter(f.events)
	d.feeds.use(f)
	return nil
}

// useFeed has all parts but the engine work with a feed.
func (d *Daemon) useFeed(f *feed) {
	d.metrics.Watching(f.watches)
	d.report.use(f.events)
	d.drain.Use(f.settings.node, f.leases)
}

// look has the engine's goroutine read the Table.
func (d *Daemon) look(ctx context.Context, f func(*service.Table)) error {
	return d.engine.Do(ctx, func(_ context.Context, v engine.View) error {
		f(v.Table)
		return nil
	})
}

func (d *Daemon) newEngine(s engine.Settings, t *service.Table) *engine.Engine {
	e := engine.New(engine.Options{
		Source:          d.feeds.used.Load().source,
		Table:           t,
		Plane:           d.plane,
		Log:             d.log,
		Once:            d.options.Once,
		AuditInterval:   s.AuditInterval,
		ExternalChanges: d.node.changes(),
		MaxRest:         s.MaxRest,
		Connect:         d.node.connector(),
		ResetOrphans:    s.ResetOrphans,
		HealthAddress:   s.HealthAddress,
		Health:          map[string]http.Handler{drain.Path: d.metrics.Drained(d.drain)},
		HealthFile:      s.HealthFile,
		HardFail:        d.config.Load().KubeProxy.BindAddressHardFail,
		ControlSocket:   s.ControlSocket,
		About:           d.about,
		Control: map[string]http.Handler{"/switch": &d.switches, "/events": http.HandlerFunc(d.serveEvents),
			"/configz": http.HandlerFunc(d.serveConfig)},
		ControlRefused: func(err error) { d.report.warn(reasonControl, err.Error()) },
		Observer: observers{d.metrics, []interface{ Round(engine.Round) }{
			d.report, &d.options.Logs.Events, &beginning{inForce: d.inForce}, d.drain,
		}},

		ConnectionClosed: d.metrics.ConnectionClosed,
	})
	d.metrics.Follow(e)
	return e
}

// runOnce programs the kernel, and takes over from kube-proxy.
func (d *Daemon) runOnce(ctx context.Context) error {
	if err := d.engine.Run(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	return d.takeOverOnce(ctx)
}

// serve runs the engine and follows the configuration.
func (d *Daemon) serve(ctx context.Context) error {
	d.report.emit(kube.Event{Reason: reasonStarting})
	d.reportSubstitute()
	if c := d.config.Load(); c.ModeUnset && !standalone(c) {
		d.report.warn(reasonDefaultMode, fmt.Sprintf("no mode is configured; this means %s, which the data plane %s "+
			"serves. Set mode (--proxy-mode): the default of a later kube-proxy will be nftables", c.KubeProxy.Mode, d.mode()))
	}
	d.server = server.New(server.Options{
		Metrics:   d.metrics.Handler(),
		Mode:      d.mode,
		Config:    d.configz,
		Flags:     d.options.Flags,
		Version:   version.String(),
		Profiling: func() bool { return d.config.Load().KubeProxy.EnableProfiling },
		Flagz:     func() bool { return d.config.Load().Enabled(config.GateFlagz) },
		Statusz:   func() bool { return d.config.Load().Enabled(config.GateStatusz) },
		Verbosity: d.options.Logs.setVerbosity,
		Log:       d.log,

		ConnectionClosed: d.metrics.ConnectionClosed,
	})
	defer d.server.Close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := d.engine.Run(ctx)
		if errors.Is(err, engine.ErrNotListening) {
			d.report.warn(reasonHealthz, err.Error())
		}
		return err
	})
	g.Go(func() error { return d.manage(ctx) })
	g.Go(func() error { d.drain.Run(ctx); return nil })
	err := g.Wait()
	if err == nil {
		d.sayEnd()
	}
	return err
}

// sayEnd tells what becomes of connections when the process ends as it was asked to.
func (d *Daemon) sayEnd() {
	if p := d.plane.InForce(); p != nil && p.Process != nil {
		d.log.Info("Fairlead ends: its connections end with it, and no Service is served until it starts again")
		return
	}
	d.log.Info("Fairlead ends: its rules stay in the kernel and serve Services, but no change is followed")
}

// listenRetry is kube-proxy's.
const listenRetry = 5 * time.Second

// manage does what comes up beside the engine's work.
func (d *Daemon) manage(ctx context.Context) error {
	defer d.running.Wait()
	if err := d.listen(ctx); err != nil && d.config.Load().KubeProxy.BindAddressHardFail {
		d.report.warn(reasonMetrics, err.Error())
		return err
	}
	d.files = newWatcher(lookInterval)
	defer d.files.close()
	defer d.feeds.abandon()
	retry := time.NewTicker(listenRetry)
	defer retry.Stop()
	for {
		d.files.follow(d.read())
		select {
		case <-ctx.Done():
			return nil
		case <-d.files.changed:
			d.reload(ctx)
		case o := <-d.switches.orders:
			d.obey(ctx, o)
		case result := <-d.feeds.arrives():
			d.feeds.settle(result, func(s source.Source) error { return d.adopt(ctx, s) })
		case <-d.inForce:
			d.inForce = nil
			if d.options.InForce != nil {
				d.options.InForce()
			}
			d.rulesInForce(ctx)
		case <-retry.C:
			_ = d.listen(ctx) // it says so itself
		}
	}
}

// read are the files that the configuration is in.
func (d *Daemon) read() []string {
	c := d.config.Load()
	return append(slices.Clone(c.Files), c.KubeProxy.ClientConnection.Kubeconfig)
}

// listen has the metrics server listen where the configuration says. It logs a failure once.
func (d *Daemon) listen(ctx context.Context) error {
	address := ""
	if a := d.config.Load().MetricsAddress(); a.IsValid() {
		address = a.String()
	}
	err := d.server.Listen(ctx, address)
	switch {
	case err == nil:
		d.metricsFailure.Cleared()
	case d.metricsFailure.Changed(err.Error()):
		d.log.Error("cannot serve metrics; trying again", "error", err, "retry", listenRetry)
	}
	return err
}

// mode is what /proxyMode tells: the data plane in force.
func (d *Daemon) mode() string { return cmp.Or(d.chosenMode(), autoPlane) }

// chosenMode is the mode of the data plane in force; empty: none is.
func (d *Daemon) chosenMode() string {
	if d.plane == nil || d.plane.InForce() == nil {
		return ""
	}
	return d.plane.InForce().Name
}

// engineSettings are what an engine can change while it runs.
func (d *Daemon) engineSettings(c *config.Config) (engine.Settings, error) {
	s, err := engineSettings(c)
	s.Table.Mode = d.chosenMode
	return s, err
}

// about is for "fairlead status".
func (d *Daemon) about() engine.About {
	c, f, plane := d.config.Load(), d.feeds.used.Load(), d.mode()
	a := engine.About{
		Version: version.String(), Mode: string(c.KubeProxy.Mode), Plane: plane,
		Node: f.settings.node, Why: d.whyServes(plane), Draining: d.plane.Kept(),
	}
	a.ConfigurationRefused, _ = d.whyRefused.Load().(string)
	if p := d.plane.InForce(); p != nil {
		a.Backend = found(p).variant()
	}
	a.Why = cmp.Or(d.substitute(), a.Why)
	if f.watches == nil {
		return a
	}
	for _, w := range f.watches() {
		if w.Lists > 0 {
			a.Watches = append(a.Watches, w)
		}
	}
	return a
}

// serveConfig answers GET /configz on the control socket, as port 10249 does.
func (d *Daemon) serveConfig(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(d.configz()) // fails if the client has hung up
}

func (d *Daemon) configz() map[string]any {
	c := d.config.Load()
	return map[string]any{"kubeproxy.config.k8s.io": c.KubeProxy, "fairlead.dev": c.Fairlead}
}
