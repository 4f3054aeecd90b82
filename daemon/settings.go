package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/host"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// The functions of this file translate the configuration into the settings of the packages that it concerns.

// nodeName is the name of this node: the configured one, or else the machine's, in lower case, as
// kube-proxy and kubelet write it.
func nodeName(c *config.Config) (string, error) {
	name := c.KubeProxy.HostnameOverride
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
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

// acceptsForward reports whether kube-proxy would accept in FORWARD what it translates, and the data
// plane, as in mode nftables, does not.
func acceptsForward(c *config.Config, plane string) bool {
	like := []kubeproxy.ProxyMode{config.ModeNFTables, config.ModeEBPF, config.ModeUserspace, config.ModeAuto}
	return !slices.Contains(like, c.KubeProxy.Mode) && plane != iptablesPlane && !standalone(c)
}

// gateExternalIPs is on unless it is turned off (KEP-5707).
const gateExternalIPs = "AllowServiceExternalIPs"

// tableOptions are what the configuration means for the rows.
func tableOptions(c *config.Config) (service.Options, error) {
	name, err := nodeName(c)
	return service.Options{
		NodeName:          name,
		NodeIPs:           c.NodeIPs(),
		NodePortAddresses: c.NodePortAddresses(),
		DetectLocal:       detectLocal(c),
		MasqueradeAll:     c.MasqueradeAll(),
		ExternalIPs:       c.Enabled(gateExternalIPs),
		Listeners:         listeners(c),
		Manifests:         standalone(c),
	}, err
}

// listeners are where the process itself listens, for load balancers and for operators.
func listeners(c *config.Config) (all []netip.AddrPort) {
	for _, a := range []netip.AddrPort{c.HealthzAddress(), c.MetricsAddress()} {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
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

// engineSettings are what an engine can change while it runs.
func engineSettings(c *config.Config) (engine.Settings, error) {
	table, err := tableOptions(c)
	return engine.Settings{
		Table:         table,
		AuditInterval: c.Fairlead.AuditInterval.Duration,
		MaxRest:       c.MinSyncPeriod() / 2, // a change may have to wait for a turn of others as well
		HealthAddress: c.HealthzAddress(),
		ControlSocket: c.Fairlead.ControlSocket,
	}, err
}

// planeIn is the data plane that the configuration says.
func planeIn(c *config.Config) planeSettings { return planeOf(c, c.Plane) }

// planeOf is one of the data planes, with what the configuration says of it, whichever it has chosen; of autoPlane
// it is what it says of all of them.
func planeOf(c *config.Config, name string) planeSettings {
	s := planeSettings{name: name, mark: 1 << c.MasqueradeBit()}
	all := name == autoPlane
	if all || name == iptablesPlane {
		s.iptables = iptables.Options{
			Backend: iptables.Backend(c.Fairlead.IPTablesBackend), KeepInvalid: c.KubeProxy.Conntrack.TCPBeLiberal,
		}
	}
	if all || name == ipvsPlane {
		o := c.KubeProxy.IPVS
		s.ipvs = ipvs.Options{
			Scheduler:    o.Scheduler,
			AddressMode:  ipvs.AddressMode(c.Fairlead.IPVSAddressMode),
			Exclude:      excluded(c),
			DrainTimeout: c.Fairlead.IPVSDrainTimeout.Duration,
			StrictARP:    o.StrictARP,
			Timeouts: ipvs.Timeouts{
				TCP: o.TCPTimeout.Duration, TCPFin: o.TCPFinTimeout.Duration, UDP: o.UDPTimeout.Duration,
			},
		}
	}
	if all || name == ebpfPlane {
		s.ebpf = c.Fairlead.EBPF
	}
	if all || name == userspacePlane {
		u := c.Fairlead.Userspace
		s.userspace = userspace.Options{
			Redirect:    redirect(u.Redirect),
			DialTimeout: u.DialTimeout.Duration, Dials: int(u.Dials),
			IdleTimeout: u.IdleTimeout.Duration, HalfClosedTimeout: u.HalfClosedTimeout.Duration,
			FlowTimeout: u.UDPTimeout.Duration, StreamTimeout: u.UDPStreamTimeout.Duration,
			MaxConnections: int(u.MaxConnections), MaxFlows: int(u.MaxFlows),
		}
	}
	return s
}

// redirect is a way for packets to the process in the words of the plane.
func redirect(way config.UserspaceRedirect) userspace.Redirect {
	switch way {
	case config.UserspaceByTPROXY:
		return userspace.ByTPROXY
	case config.UserspaceByNAT:
		return userspace.ByNAT
	case config.UserspaceByIPTables:
		return userspace.ByPlane
	case config.UserspaceByListening:
		return userspace.ByListening
	}
	return "" // what there is
}

// excluded are ipvs.excludeCIDRs where the plane looks at them: as settings that can be compared.
func excluded(c *config.Config) string {
	var texts []string
	if c.Fairlead.IPVSAddressMode == config.IPVSAddressesOnDummy {
		for _, p := range c.ExcludedCIDRs() {
			texts = append(texts, p.String())
		}
	}
	return strings.Join(texts, ",")
}

func hostSettings(c *config.Config) host.Settings {
	t := &c.KubeProxy.Conntrack
	s := host.Settings{
		MaxPerCore:     int(*t.MaxPerCore),
		Min:            int(*t.Min),
		TCPEstablished: t.TCPEstablishedTimeout.Duration,
		TCPCloseWait:   t.TCPCloseWaitTimeout.Duration,
		TCPBeLiberal:   t.TCPBeLiberal,
		UDP:            t.UDPTimeout.Duration,
		UDPStream:      t.UDPStreamTimeout.Duration,
	}
	score := int(*c.KubeProxy.OOMScoreAdj)
	s.OOMScoreAdj = &score
	return s
}

// feedSettings tell one source of objects from another. They are compared.
type feedSettings struct {
	manifests string // lines
	node      string
	client    kube.ClientOptions // without a Log
	// kubeconfig is a digest of the file: client-go reads tokens and certificates anew that it names, but
	// not the file itself.
	kubeconfig [32]byte
}
