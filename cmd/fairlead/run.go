package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// plane is a data plane by the name of its mode.
type plane struct {
	new dataplane.New
	// nodePorts is what --nodeport-addresses means if it is not set: what kube-proxy's mode of that
	// name does.
	nodePorts []string
}

// open makes the plane; of its errors the most frequent one says what to do.
func (p plane) open(c dataplane.Config) (dataplane.Dataplane, error) {
	opened, err := p.new(c)
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("root, or CAP_NET_ADMIN, is needed to program the kernel: %w", err)
	}
	return opened, err
}

func planes() map[string]plane {
	return map[string]plane{
		"nftables": {localhost.Wrap(conntrack.Wrap(nftables.New)), []string{"primary"}},
	}
}

func planeNamed(mode string) (plane, error) {
	p, ok := planes()[mode]
	if !ok {
		return p, fmt.Errorf("--proxy-mode: %q is none of: %s", mode,
			strings.Join(slices.Sorted(maps.Keys(planes())), ", "))
	}
	return p, nil
}

const defaultSocket = "/run/fairlead/fairlead.sock"

// daemon is what the flags of run say.
type daemon struct {
	node
	mode    string
	healthz string
	socket  string
	once    bool
	verbose bool
}

func runCommand() *cobra.Command {
	var d daemon
	c := &cobra.Command{
		Use:   "run --manifests PATH...",
		Short: "serve the Services of manifests until it is told to stop; the kernel keeps the last state",
		Example: "  fairlead run --manifests /etc/fairlead\n" +
			"  kubectl get services,endpointslices,nodes -A -o yaml >all.yaml && fairlead run --manifests all.yaml",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return d.run(c.Context()) },
	}
	f := c.Flags()
	f.SortFlags = false
	d.flags(f)
	f.StringVar(&d.mode, "proxy-mode", "nftables", "the data plane: nftables")
	f.StringVar(&d.healthz, "healthz-bind-address", "0.0.0.0:10256",
		"where /healthz and /livez are served; empty: nowhere")
	f.StringVar(&d.socket, "control-socket", defaultSocket, "where dump and explain ask; empty: nowhere")
	f.BoolVar(&d.once, "once", false, "program the kernel, then exit")
	f.BoolVarP(&d.verbose, "verbose", "v", false, "log more")
	return c
}

func (d *daemon) run(ctx context.Context) error {
	level := slog.LevelInfo
	if d.verbose {
		level = slog.LevelDebug
	}
	if os.Getenv("GOGC") == "" {
		// Most memory is taken once, while all is read and programmed for the first time. A fifth
		// more CPU then saves a seventh of the peak, which is what counts on a full node.
		debug.SetGCPercent(50)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	plane, err := planeNamed(d.mode)
	if err != nil {
		return misused(err)
	}
	if len(d.nodePorts) == 0 {
		d.nodePorts = plane.nodePorts
	}
	options, err := d.options()
	if err != nil {
		return misused(err)
	}
	e, err := d.engine(options, log)
	if err != nil {
		return misused(err)
	}
	return failed(d.drive(ctx, e, plane, options.NodeName))
}

// engine makes what is not bound to the kernel; errors are the user's.
func (d *daemon) engine(o service.Options, log *slog.Logger) (engine.Options, error) {
	e := engine.Options{Log: log, Once: d.once, ControlSocket: d.socket}
	var err error
	if d.healthz != "" {
		if e.HealthAddress, err = netip.ParseAddrPort(d.healthz); err != nil {
			return e, fmt.Errorf("--healthz-bind-address: %q is not an address and port like 0.0.0.0:10256", d.healthz)
		}
	}
	e.Table, err = service.NewTable(o)
	return e, err
}

// drive opens the source and the plane and runs the engine on them.
func (d *daemon) drive(ctx context.Context, e engine.Options, p plane, name string) (err error) {
	if len(d.manifests) == 0 {
		return misused(errNoManifests)
	}
	if e.Plane, err = p.open(dataplane.Config{Mark: dataplane.DefaultMark, Log: e.Log}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Plane.Close()) }()
	if e.Source, err = d.source(name, e.Log); err != nil {
		return misused(err)
	}
	defer func() { err = errors.Join(err, e.Source.Close()) }()
	if e.ControlSocket != "" {
		if err := os.MkdirAll(filepath.Dir(e.ControlSocket), 0o755); err != nil {
			return fmt.Errorf("--control-socket: %w", err)
		}
	}
	e.Log.Info("starting", "mode", d.mode, "node", name)
	warnForwarding(e.Log)
	return engine.New(e).Run(ctx)
}

// warnForwarding says what would otherwise be found out by a packet that never arrives.
func warnForwarding(log *slog.Logger) {
	for family, file := range map[string]string{
		"IPv4": "/proc/sys/net/ipv4/ip_forward", "IPv6": "/proc/sys/net/ipv6/conf/all/forwarding",
	} {
		if value, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(value)) == "0" {
			log.Warn("this machine does not forward packets: only its own processes reach backends elsewhere",
				"family", family, "set to 1", file)
		}
	}
}
