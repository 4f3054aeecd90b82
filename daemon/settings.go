package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// The functions of this file translate the configuration into the settings of the packages that it concerns.

// machineName is asked for once. The kubelet's node keeps its name, too, when the machine gets another one: there is no
// Node of that name.
var machineName = sync.OnceValues(os.Hostname) //nolint:gochecknoglobals // it does not change

// nodeName is the name of this node: the configured one, or else the machine's, in lower case, as
// kube-proxy and kubelet write it.
func nodeName(c *config.Config) (string, error) {
	name := c.KubeProxy.HostnameOverride
	if name == "" {
		var err error
		if name, err = machineName(); err != nil {
			return "", fmt.Errorf("hostnameOverride (--hostname-override) is not set, and the machine has no name: %w", err)
		}
	}
	if name = strings.ToLower(strings.TrimSpace(name)); name == "" {
		return "", errors.New("hostnameOverride (--hostname-override): the name of the node is empty")
	}
	return name, nil
}

// standalone reports whether manifests are served, not the Services of an API server.
func standalone(c *config.Config) bool { return len(c.Fairlead.Manifests) > 0 }

// tableOptions are what the configuration means for the rows.
func tableOptions(c *config.Config) (service.Options, error) {
	name, err := nodeName(c)
	return service.Options{
		NodeName:          name,
		NodeIPs:           c.NodeIPs(),
		NodePortAddresses: c.NodePortAddresses(),
		DetectLocal:       detectLocal(c),
		MasqueradeAll:     c.MasqueradeAll(),
		ExternalIPs:       c.Enabled(config.GateExternalIPs),
		Listeners:         listeners(c),
		Manifests:         standalone(c),
		HNS:               hns(c),
		Health:            health(c),
		Scheduler:         c.KubeProxy.IPVS.Scheduler,
	}, err
}

// health is when backends are ejected.
func health(c *config.Config) service.Health {
	e := &c.Fairlead.Ejection
	return service.Health{
		Mode: service.HealthMode(c.Fairlead.BackendHealth), Failures: int(e.Failures), Floor: int(e.FloorPercent),
		Time: e.Time.Duration, MaxTime: e.MaxTime.Duration, Slow: e.SlowStart.Duration,
	}
}

// hns is what the rows are to respect on Windows; nil elsewhere.
func hns(c *config.Config) *service.HNS {
	if c.Plane != kernelspacePlane {
		return nil
	}
	return &service.HNS{
		HealthVIPs: c.KubeProxy.Winkernel.ForwardHealthCheckVip, Healthz: c.HealthzAddress().Port(),
	}
}

// listeners are where the process itself listens, for load balancers and for operators.
func listeners(c *config.Config) []netip.AddrPort {
	all := []netip.AddrPort{c.HealthzAddress(), c.MetricsAddress()}
	return slices.DeleteFunc(all, func(a netip.AddrPort) bool { return !a.IsValid() })
}

func detectLocal(c *config.Config) service.DetectLocal {
	d := service.DetectLocal{Mode: service.LocalMode(c.KubeProxy.DetectLocalMode)}
	switch d.Mode {
	case service.LocalClusterCIDR:
		if d.ClusterCIDRs = c.ClusterCIDRs(); len(d.ClusterCIDRs) == 0 {
			d.Mode = service.LocalNone
		}
	case service.LocalBridgeInterface:
		d.Interface = c.KubeProxy.DetectLocal.BridgeInterface
	case service.LocalInterfacePrefix:
		d.Interface = c.KubeProxy.DetectLocal.InterfaceNamePrefix
	}
	return d
}

// engineSettings are those of an engine, but for the mode in force.
func engineSettings(c *config.Config) (engine.Settings, error) {
	table, err := tableOptions(c)
	return engine.Settings{
		Table:         table,
		AuditInterval: c.Fairlead.AuditInterval.Duration,
		MaxRest:       c.MinSyncPeriod() / 2, // a change may have to wait for a turn of others as well
		ResetOrphans:  c.Fairlead.ResetOrphans,
		HealthAddress: c.HealthzAddress(),
		HealthFile:    healthFile(c),
		ControlSocket: c.Fairlead.ControlSocket,
	}, err
}

// healthFile is beside the control socket.
func healthFile(c *config.Config) engine.HealthFile {
	age := c.Fairlead.HealthCheckMaxAge.Duration
	if age == 0 {
		return engine.HealthFile{}
	}
	return engine.HealthFile{Path: HealthFileBeside(c.Fairlead.ControlSocket), MaxAge: age}
}

// HealthFileBeside is where a daemon with a control socket writes what the responder answers to health checks.
func HealthFileBeside(socket string) string {
	return filepath.Join(filepath.Dir(socket), "health-checks")
}

// planeIn is the data plane that the configuration says.
func planeIn(c *config.Config) planeSettings { return planeOf(c, c.Plane) }

// feedSettings tell one source of objects from another. They are compared.
type feedSettings struct {
	manifests string // lines
	node      string
	client    kube.ClientOptions // without a Log
	// readinessGate has the pods of the node watched.
	readinessGate bool
	// kubeconfig is a digest of the file: client-go reads tokens and certificates anew that it names, but
	// not the file itself.
	kubeconfig [32]byte
}
