package ipvs

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/internal/ipvs"
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
		lines = append(lines, fmt.Sprintf("virtual server %s %s: %s", listedAs(key), held.scheduler, whose))
	}
	slices.Sort(lines)
	return lines
}

// listedAs is the name in the list of "ipvsadm -Ln".
func listedAs(k ipvs.Key) string {
	switch {
	case k.Mark == 0:
		protocol, address, _ := strings.Cut(k.String(), "/")
		return strings.ToUpper(address) + " " + protocol
	case k.V6:
		return fmt.Sprintf("FWM %d IPv6", k.Mark)
	}
	return fmt.Sprintf("FWM %d", k.Mark)
}
