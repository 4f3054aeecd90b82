package ebpf

import (
	"github.com/cilium/ebpf"
)

// withoutFast leaves out the program for drivers.
func withoutFast(spec *ebpf.CollectionSpec) {
	delete(spec.Programs, packetsProgFromOutside)
	delete(spec.Maps, packetsMapOutside)
}
