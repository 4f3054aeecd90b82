package ebpf

import (
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// FreePlaces is what Audit does when it is time.
func FreePlaces(p dataplane.Dataplane) error { return p.(*Plane).freeSocketSlots() }

// LooksAnywhere reports whether a change to s has sockets listed in all namespaces.
func LooksAnywhere(p dataplane.Dataplane, s *model.State) (bool, error) {
	of := p.(*Plane)
	return of.findFlow(&bereft{
		protocols: of.releases(),
		of: func(protocol model.Protocol, service, backend netip.AddrPort) bool {
			return !serves(s, protocol, service, backend)
		},
	})
}

// Outside are the devices, by number, that programs for drivers send to.
func Outside(p dataplane.Dataplane) (devices []uint32, err error) {
	var device uint32
	var outlet packetsOutlet
	all := p.(*Plane).packets.Maps[packetsMapOutside].Iterate()
	for all.Next(&device, &outlet) {
		devices = append(devices, device)
	}
	slices.Sort(devices)
	return devices, all.Err()
}

// LookAtLoads is what Audit and a pass through the flows do when it is time.
func LookAtLoads(p dataplane.Dataplane, s *model.State) error {
	of := p.(*Plane)
	of.loads.next = time.Time{}
	if err := of.auditLoads(s); err != nil {
		return err
	}
	of.sweep.mu.Lock()
	defer of.sweep.mu.Unlock()
	of.sweep.swept = false
	for more := true; more; more = of.sweep.passing {
		if _, err := of.sweep.step(); err != nil {
			return err
		}
	}
	return nil
}
