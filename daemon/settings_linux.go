package daemon

import (
	"strings"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/host"
)

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
	if all || name == nftablesPlane || name == iptablesPlane {
		s.counters = details[c.Fairlead.Counters]
	}
	if all || name == nftablesPlane {
		s.flowtable = flowtables[c.Fairlead.Flowtable]
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

var details = map[config.Counters]dataplane.Detail{
	config.CountServices: dataplane.PerPool, config.CountBackends: dataplane.PerBackend,
}

var flowtables = map[config.Flowtable]dataplane.Flowtable{
	config.FlowtableAuto: dataplane.FlowtableUnlessFiltered, config.FlowtableAlways: dataplane.FlowtableAlways,
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
	return "" // the first way that the kernel supports
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
	return host.Settings{
		MaxPerCore:     int(*t.MaxPerCore),
		Min:            int(*t.Min),
		TCPEstablished: t.TCPEstablishedTimeout.Duration,
		TCPCloseWait:   t.TCPCloseWaitTimeout.Duration,
		TCPBeLiberal:   t.TCPBeLiberal,
		UDP:            t.UDPTimeout.Duration,
		UDPStream:      t.UDPStreamTimeout.Duration,
		Accounting:     c.Fairlead.Counters == config.CountBackends,
		OOMScoreAdj:    new(int(*c.KubeProxy.OOMScoreAdj)),
	}
}
