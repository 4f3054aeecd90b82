package ask

import (
	"fmt"
	"net/netip"
	"strings"

	"fairlead.dev/fairlead/model"
)

// ParsePacket reads the arguments of explain.
func ParsePacket(iface, source, destination string) (p model.Packet, err error) {
	where, protocol, named := strings.Cut(destination, "/")
	p.Protocol = model.TCP
	if named {
		if p.Protocol, err = model.ParseProtocol(protocol); err != nil {
			return p, err
		}
	}
	if p.Destination, err = netip.ParseAddrPort(where); err != nil {
		return p, fmt.Errorf("%q is not an address and port like 10.96.0.10:80, 10.96.0.10:53/udp or [fd00::10]:80",
			destination)
	}
	if source == "node" {
		return p, nil
	}
	if p.Source, err = netip.ParseAddr(source); err != nil {
		return p, fmt.Errorf("%q is neither an IP address nor the word node", source)
	}
	p.Interface = iface
	if p.Source.Is4() != p.Destination.Addr().Is4() {
		return p, fmt.Errorf("%s and %s are of different address families", p.Source, p.Destination)
	}
	return p, nil
}
