package daemon

import (
	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane/handover"
)

const (
	nftablesPlane    = "nftables"
	iptablesPlane    = "iptables"
	ipvsPlane        = "ipvs"
	ebpfPlane        = "ebpf"
	userspacePlane   = "userspace"
	kernelspacePlane = "kernelspace"
	// autoPlane is the name of the plane in mode auto, until one is chosen.
	autoPlane = string(config.ModeAuto)
)

// Planes are the names of the data planes that are built in.
func Planes() (names []string) {
	for _, d := range drivers() {
		names = append(names, d.Name)
	}
	return names
}

// found are the settings of an open plane, with the back end that it has found.
func found(p *handover.Plane) planeSettings { return p.Settings.(planeSettings) }
