package config

import (
	"strings"
	"time"

	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

// fold sets to zero what the mode does not use of how often and whether all is masqueraded. kube-proxy
// does the same, as it keeps them once for all modes.
func fold(c *kubeproxy.KubeProxyConfiguration) {
	sync, minSync := modePeriods(c)
	kept := periods{*sync, *minSync}
	for _, d := range []*time.Duration{
		&c.IPTables.SyncPeriod.Duration, &c.IPTables.MinSyncPeriod.Duration,
		&c.IPVS.SyncPeriod.Duration, &c.IPVS.MinSyncPeriod.Duration,
		&c.NFTables.SyncPeriod.Duration, &c.NFTables.MinSyncPeriod.Duration,
	} {
		*d = 0
	}
	*sync, *minSync = kept.sync, kept.minSync
	if c.Mode == ModeNFTables {
		c.IPTables.MasqueradeAll = false
	} else {
		c.NFTables.MasqueradeAll = false
	}
	c.PortRange = ""
}

// judged reports whether kube-proxy looks at a field at all in a mode. A field that kube-proxy ignores must not keep a
// node from starting.
func judged(mode kubeproxy.ProxyMode, path string) bool {
	return used(mode, path) || path == "iptables.masqueradeBit"
}

// used reports whether a mode uses a field.
func used(mode kubeproxy.ProxyMode, path string) bool {
	section, name, _ := strings.Cut(path, ".")
	switch section {
	case "ipvs":
		return mode == ModeIPVS || mode == ModeAuto
	case "nftables":
		return mode == ModeNFTables
	case "iptables":
		if name == "masqueradeBit" || name == "masqueradeAll" {
			return mode != ModeNFTables
		}
		return mode == ModeIPTables || mode == ""
	}
	return true
}
