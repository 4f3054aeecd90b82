package ebpf

import (
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// FreePlaces is what Audit does when it is time.
func FreePlaces(p dataplane.Dataplane) error { return p.(*Plane).freeSocketSlots() }

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
