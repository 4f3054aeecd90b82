package ipvs

import (
	"fmt"
	"slices"
	"strings"
)

// Describe implements dataplane.Observed: the virtual servers as "ipvsadm -Ln" names them, with their pools.
func (p *Plane) Describe() (lines []string) {
	if p.held == nil {
		return nil
	}
	for key, held := range p.held.servers.held {
		whose := "nobody any more, its connections end"
		if id, ok := p.held.wanted[key]; ok {
			whose = id.String()
		}
		lines = append(lines, fmt.Sprintf("virtual server %s %s: %s", key.listed(), held.scheduler, whose))
	}
	slices.Sort(lines)
	return lines
}

// listed is the name in the list of "ipvsadm -Ln".
func (k serverKey) listed() string {
	switch {
	case k.mark == 0:
		protocol, address, _ := strings.Cut(k.String(), "/")
		return strings.ToUpper(address) + " " + protocol
	case k.v6:
		return fmt.Sprintf("FWM %d IPv6", k.mark)
	}
	return fmt.Sprintf("FWM %d", k.mark)
}
