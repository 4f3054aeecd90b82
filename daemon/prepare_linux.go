package daemon

import (
	"errors"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/host"
)

// Init does what needs more rights than CAP_NET_ADMIN: it has the kernel load modules, and sets what is
// the machine's. No Service is programmed.
func Init(o Options) error {
	c, err := load(o)
	if err != nil {
		return err
	}
	if c.Plane == autoPlane {
		r := host.Host{}.Apply(hostSettings(c))
		logHost(o.Logs.Logger(), r)
		return errors.Join(r.Err(), loadAll(c, o.Logs))
	}
	p, err := planeIn(c).open(dataplane.Config{Log: o.Logs.Logger()})
	if err != nil {
		return err
	}
	r := host.Host{}.Apply(hostSettings(c))
	logHost(o.Logs.Logger(), r)
	return errors.Join(r.Err(), p.Close(), prepare(c, found(p), o.Logs))
}

// prepare has the plane set what only a privileged process can, if the configuration needs it:
// IPVS in any case, others for NodePorts on 127.0.0.1.
func prepare(c *config.Config, s planeSettings, l *Logs) error {
	p, err := s.plane(nil)
	if err != nil || s.name != ipvsPlane && !slices.ContainsFunc(c.NodePortAddresses(), meansLocalhost) {
		return err
	}
	if p.Prepare == nil {
		return nil
	}
	return p.Prepare(dataplane.Config{Mark: s.mark, Log: l.Logger()})
}

// meansLocalhost reports whether NodePorts are open on 127.0.0.1 by this word or range: 0.0.0.0/0 does not
// mean it.
func meansLocalhost(text string) bool {
	p, err := netip.ParsePrefix(text)
	return text == "localhost" || text != config.NoAddress4 && err == nil && p.Addr().Is4() && p.Addr().IsLoopback()
}
