package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/external"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/host"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/said"
)

// node is what there is on a Linux node beside the data plane in force: the kernel's settings, what kube-proxy has
// left, and the news of changes by other programs.
type node struct {
	host      host.Host
	unset     said.Condition // settings
	successor *successor
	succeeded func() // ends the successor; nil: it has not begun
	external  *external.Watch
	why       atomic.Pointer[reason] // the plane was chosen; nil: mode auto has not chosen any
	network   namespace.Namespace    // in which the process serves
	measured  sync.WaitGroup         // the removal of namespaces and processes after measuring
}

// openNode has the kernel report external changes. Where it does not, the next audit finds them.
func (d *Daemon) openNode() (err error) {
	if d.node.external, err = external.Open(); err != nil {
		d.log.Debug("the kernel does not report all changes by other programs; audits find them", "error", err)
	}
	d.node.successor, err = newSuccessor(successorConfig{
		log: d.log, report: d.report, returned: d.metrics.KubeProxyReturned,
		accepted: func() bool { return acceptsForward(d.config.Load(), d.mode()) }, closed: d.metrics.ForwardingBlocked,
		exclude: func() []netip.Prefix { return d.config.Load().ExcludedCIDRs() },
	})
	d.node.planeBegins()
	if err == nil {
		d.node.network, err = namespace.Here()
	}
	return err
}

func (n *node) close() (err error) {
	n.measured.Wait()
	if n.successor != nil {
		err = n.successor.takeover.Close()
	}
	if n.external != nil {
		n.external.Close()
	}
	return errors.Join(err, n.network.Close())
}

func (n *node) changes() <-chan dataplane.ExternalChange { return n.external.Changes() }

// bulk is called before very many rows are programmed.
func (n *node) bulk() (end func()) { return n.external.Pause() }

// connector is for the engine. The sockets belong to the node's network namespace.
func (n *node) connector() func(context.Context, netip.AddrPort) bool {
	return func(ctx context.Context, backend netip.AddrPort) bool {
		return nil == n.network.Do(func() error {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", backend.String())
			if err == nil {
				err = conn.Close()
			}
			return err
		})
	}
}

// planeBegins is called when it is not known what planes have in the kernel, and planeCleared when only one has.
func (n *node) planeBegins()                     { n.successor.excluded.all() }
func (n *node) planeCleared(one *handover.Plane) { n.successor.excluded.set(chains(one)) }

// rulesInForce is called once, when they are.
func (d *Daemon) rulesInForce(ctx context.Context) {
	d.takeOver(ctx)
	d.running.Go(func() { d.node.successor.watchForward(ctx) })
}

// takeOver removes what kube-proxy has left, if it should and our rules are in force.
func (d *Daemon) takeOver(ctx context.Context) {
	wanted := d.config.Load().Fairlead.TakeOver == config.TakeOverRemove && !d.unprivileged()
	switch {
	case !wanted && d.node.succeeded != nil:
		d.node.succeeded()
		d.node.succeeded = nil
	case wanted && d.node.succeeded == nil && d.inForce == nil:
		ctx, d.node.succeeded = context.WithCancel(ctx)
		d.running.Go(func() { d.node.successor.succeed(ctx) })
	}
}

// takeOverOnce waits until that is done.
func (d *Daemon) takeOverOnce(ctx context.Context) error {
	if d.config.Load().Fairlead.TakeOver != config.TakeOverRemove {
		return nil
	}
	return d.node.successor.succeedOnce(ctx)
}

// prepareNode sets what the configuration says of the machine, and looks at what it says nothing of.
func (d *Daemon) prepareNode(c *config.Config) {
	d.setHost(c)
	if !d.unprivileged() {
		warnForwarding(d.log)
	}
}

// changeNode sets anew what has changed; else an administrator may have set something meanwhile.
func (d *Daemon) changeNode(old, c *config.Config) {
	if d.node.unset.Lasts() || !reflect.DeepEqual(hostSettings(old), hostSettings(c)) {
		d.setHost(c)
	}
}

// unprivileged reports whether the process serves without rights.
func (d *Daemon) unprivileged() bool {
	p := d.plane.InForce()
	return p != nil && p.Unprivileged
}

// setHost sets what is not ours alone. A machine without the wanted settings is better than one
// without Services, so what fails is said, once, and no more. A process without rights does not try.
func (d *Daemon) setHost(c *config.Config) {
	if d.unprivileged() {
		return
	}
	r := d.node.host.Apply(hostSettings(c))
	logHost(d.log, r)
	switch err := r.Err(); {
	case err == nil:
		d.node.unset.Cleared()
	case d.node.unset.Changed(err.Error()):
		level := slog.LevelError
		if r.OnlyNamespace() {
			level = slog.LevelWarn
		}
		d.log.Log(context.Background(), level, "some kernel settings are not as configured", "error", err)
		d.report.warn(reasonHost, err.Error())
	}
}

func logHost(log *slog.Logger, r host.Report) {
	for _, c := range r.Changed {
		log.Info("changed a kernel setting", "setting", c.Name, "from", c.From, "to", c.To)
	}
	for _, f := range r.Failed {
		if f.Optional {
			log.Debug("cannot change an optional kernel setting", "setting", f.Name, "error", f.Err)
		}
	}
}

// warnForwarding says what would otherwise be found out by a packet that never arrives.
func warnForwarding(log *slog.Logger) {
	for family, file := range map[string]string{
		"IPv4": "/proc/sys/net/ipv4/ip_forward", "IPv6": "/proc/sys/net/ipv6/conf/all/forwarding",
	} {
		if value, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(value)) == "0" {
			log.Warn("this machine does not forward packets: only its own processes reach backends elsewhere",
				"family", family, "setting", file)
		}
	}
}
