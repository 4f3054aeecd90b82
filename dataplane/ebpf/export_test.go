package ebpf

import "fairlead.dev/fairlead/dataplane"

// FreePlaces is what Audit does when it is time.
func FreePlaces(p dataplane.Dataplane) error { return p.(*Plane).freePlaces() }
