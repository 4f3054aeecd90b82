// Package config is all that a user can say to the daemon. kube-proxy's flags and configuration file have the same
// meaning here. Fairlead's own settings are in a file of its own kind, so that the first stays valid for kube-proxy.
//
//	flags ──────────────────┐
//	KubeProxyConfiguration ─┼─► Load: decode, schema, defaults, precedence, rules ─► Config ─► daemon
//	FairleadConfiguration ──┘                                        old Config ─► Compare ─► Changes
//
// The package knows words and their rules, and nothing of kernels or API servers.
package config

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/component-base/featuregate"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
	netutils "k8s.io/utils/net"
)

// Config is what the daemon is to do: complete, with all defaults, and valid.
type Config struct {
	// KubeProxy is what kube-proxy would do: defaults are filled in, and the mode that is not set is
	// iptables. Of the sections iptables, ipvs and nftables, what the mode does not use is zero.
	KubeProxy kubeproxy.KubeProxyConfiguration
	Fairlead  FairleadConfiguration
	// Master is the address of the API server instead of that in the kubeconfig; empty: that. No file has it.
	Master string
	// Plane is the data plane that serves the mode, or the word auto.
	Plane string
	// Warnings are about what was said and has no meaning here, one line each.
	Warnings []string
	// Files are those that were read, and those that would be if they existed.
	Files []string

	// ModeUnset says that no file or flag names a mode.
	ModeUnset bool

	gates gates
}

// Enabled reports whether one of Kubernetes' feature gates is on. Gates that kube-proxy does not know
// are off.
func (c *Config) Enabled(gate string) bool {
	_, ok := c.gates.GetAll()[featuregate.Feature(gate)]
	return ok && c.gates.Enabled(featuregate.Feature(gate))
}

// MasqueradeAll reports whether the source of every connection to a ClusterIP is replaced.
func (c *Config) MasqueradeAll() bool {
	switch c.KubeProxy.Mode {
	case ModeNFTables:
		return c.KubeProxy.NFTables.MasqueradeAll
	case ModeKernelspace:
		return !c.KubeProxy.Winkernel.EnableDSR
	}
	return c.KubeProxy.IPTables.MasqueradeAll
}

// MinSyncPeriod is how long changes are gathered at most where programming them takes long; 0: never.
func (c *Config) MinSyncPeriod() time.Duration {
	_, period := modePeriods(&c.KubeProxy)
	return *period
}

// MasqueradeBit is the bit of the packet mark that the mode uses to remember what is to be masqueraded.
func (c *Config) MasqueradeBit() int {
	if c.KubeProxy.Mode == ModeNFTables {
		return int(*c.KubeProxy.NFTables.MasqueradeBit)
	}
	return int(*c.KubeProxy.IPTables.MasqueradeBit)
}

// NodePortAddresses are the CIDRs and keywords that say where NodePorts are open. If none are set they
// are what the mode means by that, and in mode iptables they include IPv4's loopback addresses unless
// iptables.localhostNodePorts is false, as with kube-proxy.
func (c *Config) NodePortAddresses() []string {
	said := c.KubeProxy.NodePortAddresses
	switch c.KubeProxy.Mode {
	case ModeIPTables:
		return c.iptablesNodePorts()
	case ModeIPVS, ModeKernelspace:
		if len(said) == 0 {
			return []string{allAddresses}
		}
	}
	addresses := make([]string, len(said))
	for i, text := range said {
		addresses[i] = canonicalCIDR(text)
	}
	return addresses
}

// The words that nodePortAddresses may have beside CIDRs.
const (
	primaryAddresses   = "primary"
	localhostAddresses = "localhost"
	allAddresses       = "all"
	loopback4          = "127.0.0.0/8"
	loopback6          = "::1/128"
	// NoAddress4 is a range that no node has an address in.
	NoAddress4 = "127.0.0.0/32"
)

func nodePortWords() []string { return []string{primaryAddresses, localhostAddresses, allAddresses} }

// iptablesNodePorts adds what kube-proxy's mode iptables does without being told: IPv4's loopback
// addresses are open if any range covers them.
func (c *Config) iptablesNodePorts() (addresses []string) {
	said := c.KubeProxy.NodePortAddresses
	if len(said) == 0 {
		said = []string{allAddresses}
	}
	localhost := false
	for _, text := range said {
		prefix, err := netip.ParsePrefix(canonicalCIDR(text))
		covers := err == nil && prefix.Overlaps(netip.MustParsePrefix(loopback4))
		localhost = localhost || covers || text == localhostAddresses || text == allAddresses
		switch {
		case text == localhostAddresses:
			addresses = append(addresses, loopback6)
		case covers && prefix.Addr().IsLoopback():
		default:
			addresses = append(addresses, canonicalCIDR(text))
		}
	}
	if localhost && *c.KubeProxy.IPTables.LocalhostNodePorts {
		return append(addresses, loopback4)
	}
	if localhost {
		return append(addresses, NoAddress4) // or else IPv4 would be open everywhere if there is nothing else
	}
	return addresses
}

// ClusterCIDRs are the ranges of the pods' addresses, at most one of each family.
func (c *Config) ClusterCIDRs() []netip.Prefix {
	return prefixes(strings.Split(c.KubeProxy.ClusterCIDR, ","))
}

// ExcludedCIDRs are addresses whose virtual servers of IPVS stay as they are.
func (c *Config) ExcludedCIDRs() []netip.Prefix { return prefixes(c.KubeProxy.IPVS.ExcludeCIDRs) }

// prefixes are those of the texts that are CIDRs.
func prefixes(texts []string) (all []netip.Prefix) {
	for _, text := range texts {
		if prefix, err := netip.ParsePrefix(canonicalCIDR(text)); err == nil {
			all = append(all, prefix)
		}
	}
	return all
}

// NodeIPs are the primary addresses of this node as far as they are configured, at most one of each
// family: nodeIPs, and for a family that has none there, bindAddress.
func (c *Config) NodeIPs() (ips []netip.Addr) {
	for _, text := range slices.Concat(c.Fairlead.NodeIPs, []string{c.KubeProxy.BindAddress}) {
		ip := parseAddr(text)
		known := slices.ContainsFunc(ips, func(o netip.Addr) bool { return o.Is4() == ip.Is4() })
		if ip.IsValid() && !ip.IsUnspecified() && !known {
			ips = append(ips, ip)
		}
	}
	return ips
}

// SourceVIP is the source of translated packets on an overlay network of Windows; the zero value: none is configured.
func (c *Config) SourceVIP() netip.Addr { return parseAddr(c.KubeProxy.Winkernel.SourceVip) }

// HealthzAddress is where /healthz and /livez are served; the zero value: nowhere.
func (c *Config) HealthzAddress() netip.AddrPort {
	return parseAddrPort(c.KubeProxy.HealthzBindAddress)
}

// MetricsAddress is where /metrics and all that is for operators is served; the zero value: nowhere.
func (c *Config) MetricsAddress() netip.AddrPort {
	return parseAddrPort(c.KubeProxy.MetricsBindAddress)
}

// parseAddr reads addresses as kube-proxy does, which allows leading zeros in IPv4; the zero value if
// it is none.
func parseAddr(text string) netip.Addr {
	addr, _ := netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	return addr.Unmap()
}

// canonicalCIDR is the usual form of a CIDR, and anything else as it is.
func canonicalCIDR(text string) string {
	if _, network, err := netutils.ParseCIDRSloppy(text); err == nil {
		return network.String()
	}
	return text
}
