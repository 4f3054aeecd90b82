package daemon

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
)

// prepare has the plane set what only a privileged process can, if the configuration needs it.
func prepare(c *config.Config, l *Logs) error {
	i := slices.Index(Planes(), c.Plane)
	if i < 0 || !slices.ContainsFunc(c.NodePortAddresses(), meansLocalhost) {
		return nil
	}
	return planes()[i].prepare(dataplane.Config{Mark: planeIn(c).mark, Log: l.Logger()})
}

// meansLocalhost reports whether NodePorts are open on 127.0.0.1 by this word or range: 0.0.0.0/0 does not
// mean it.
func meansLocalhost(text string) bool {
	p, err := netip.ParsePrefix(text)
	return text == "localhost" || err == nil && p.Addr().Is4() && p.Addr().IsLoopback()
}
