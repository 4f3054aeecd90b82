package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// LocalMode says how packets of this node's pods are told from all others.
type LocalMode string

// The modes have the names of kube-proxy's detectLocalMode.
const (
	LocalNone            LocalMode = ""
	LocalClusterCIDR     LocalMode = "ClusterCIDR"
	LocalNodeCIDR        LocalMode = "NodeCIDR" // spec.podCIDRs of the Node
	LocalBridgeInterface LocalMode = "BridgeInterface"
	LocalInterfacePrefix LocalMode = "InterfaceNamePrefix"
)

// DetectLocal is a LocalMode and what it needs.
type DetectLocal struct {
	Mode         LocalMode
	ClusterCIDRs []netip.Prefix // LocalClusterCIDR; none of a family: its pods are not recognised
	Interface    string         // LocalBridgeInterface: its name; LocalInterfacePrefix: how it begins
}

// Options configure a Table. All but NodeName may be left empty.
type Options struct {
	NodeName string
	// NodeIPs replace the primary addresses that the Node object has, one of each family.
	NodeIPs []netip.Addr
	// NodePortAddresses say which of the node's addresses accept NodePort connections: CIDRs and the
	// words primary, localhost and all. A family of which they say nothing is open on all addresses,
	// as with kube-proxy. Loopback addresses must be meant explicitly.
	NodePortAddresses []string
	DetectLocal       DetectLocal
	MasqueradeAll     bool // replace the source of every connection to a ClusterIP
	HNS               *HNS // nil: rows are for a packet filter
	ExternalIPs       bool // whether spec.externalIPs of Services count (KEP-5707)
	// Listeners are where this process listens for TCP; an unspecified address means all of the node's.
	Listeners []netip.AddrPort
	// Health says what becomes of backends that do not answer clients.
	Health Health
	// Manifests says that the objects come from files, where no API server has given out their addresses.
	Manifests bool
	// Scheduler is what mode ipvs uses for Services that name none; empty: rr.
	Scheduler string
	// Mode names the data plane in force, which may change; empty, or nil: it is not known. Each Update asks.
	Mode func() string
}

func (o *Options) mode() string {
	if o.Mode == nil {
		return ""
	}
	return o.Mode()
}

// maxInterface is the longest name of an interface (IFNAMSIZ of linux/if.h, less its final zero).
const maxInterface = 15

// validate names the option and the flag that is wrong.
func (o *Options) validate() error {
	var errs []error
	bad := func(option, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", option, fmt.Sprintf(format, args...)))
	}
	for i, a := range o.NodeIPs {
		if !a.IsValid() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || hasFamily(o.NodeIPs[:i], a) {
			bad("node IP (--node-ip)", "%s is not a node's address, or the second one of its family", a)
		}
	}
	for _, text := range o.NodePortAddresses {
		if _, err := netip.ParsePrefix(text); err != nil && !slices.Contains(nodePortWords(), text) {
			bad("nodePortAddresses (--nodeport-addresses)", "%q is neither a CIDR nor one of %s",
				text, strings.Join(nodePortWords(), ", "))
		}
	}
	local := &o.DetectLocal
	switch local.Mode {
	case LocalNone, LocalNodeCIDR:
	case LocalClusterCIDR:
		for _, p := range local.ClusterCIDRs {
			if !p.IsValid() {
				bad("clusterCIDR (--cluster-cidr)", "%s is not a CIDR", p)
			}
		}
	case LocalBridgeInterface, LocalInterfacePrefix:
		if n := len(local.Interface); n == 0 || n > maxInterface || strings.ContainsAny(local.Interface, "*/ \t\n") {
			bad(fmt.Sprintf("detectLocal (--detect-local-mode %s)", local.Mode), "%q is not the name of an interface, "+
				"or its beginning (--pod-bridge-interface, --pod-interface-name-prefix)", local.Interface)
		}
	default:
		bad("detectLocalMode (--detect-local-mode)", "%q is not a mode", local.Mode)
	}
	return errors.Join(errs...)
}

// The words that NodePortAddresses may have beside CIDRs.
const (
	primaryAddresses   = "primary"
	localhostAddresses = "localhost"
	allAddresses       = "all"
)

func nodePortWords() []string {
	return []string{primaryAddresses, localhostAddresses, allAddresses}
}

// View is what Compile knows beside a Service and its Slices: the node, and how the cluster is used.
type View struct {
	Node          string
	Zone          string       // empty: unknown
	IPs           []netip.Addr // primary ones, at most one of each family
	NodePorts     []netip.Addr // that accept NodePort connections; sorted
	Pods          model.Pods   // how packets of pods are recognised
	MasqueradeAll bool
	HNS           *HNS
	ExternalIPs   bool
	Manifests     bool
	Mode          string // of the data plane in force; empty: unknown
	Scheduler     string // of mode ipvs
	Health        Health
	Listeners     []netip.AddrPort
	Own           []netip.Addr   // that no ClusterIP can be; sorted
	PodNetworks   []netip.Prefix // where addresses are those of pods
	ServiceCIDRs  []netip.Prefix // where they are those of Services, as far as that is known
	// ServiceAddress reports whether an address belongs to a Service, so that no endpoint can have it.
	ServiceAddress func(netip.Addr) bool
	// Judge tells what is known of the backends of a Service's pool; nil: nothing is.
	Judge func(*Service, model.PoolID) (portHealth, Health)
	// Arrive takes in the endpoints of a Service's port; nil: none is compared with those before.
	Arrive func(*Service, model.PoolID, []candidate)
}

// equal compares all but the functions.
func (v *View) equal(o *View) bool {
	return v.Node == o.Node && v.Zone == o.Zone && slices.Equal(v.IPs, o.IPs) &&
		slices.Equal(v.NodePorts, o.NodePorts) && v.Pods.Equal(o.Pods) &&
		v.MasqueradeAll == o.MasqueradeAll && v.HNS.equal(o.HNS) &&
		v.ExternalIPs == o.ExternalIPs && v.Manifests == o.Manifests && v.Mode == o.Mode && v.Scheduler == o.Scheduler &&
		v.Health == o.Health &&
		slices.Equal(v.Listeners, o.Listeners) && slices.Equal(v.Own, o.Own) &&
		slices.Equal(v.PodNetworks, o.PodNetworks) && slices.Equal(v.ServiceCIDRs, o.ServiceCIDRs)
}

// detects reports whether pods of an address's family are told from other clients.
func (v *View) detects(family netip.Addr) bool {
	return len(v.Pods.Interfaces) > 0 || slices.ContainsFunc(v.Pods.Prefixes, func(p netip.Prefix) bool {
		return p.Addr().Is4() == family.Is4()
	})
}

// view derives the View from what is known of the node.
func (o *Options) view(n Node, addrs []netip.Addr, serviceCIDRs []netip.Prefix) View {
	addrs = own(addrs, serviceCIDRs)
	v := View{
		Node: o.NodeName, Zone: n.Zone, MasqueradeAll: o.MasqueradeAll, HNS: o.HNS, ExternalIPs: o.ExternalIPs,
		Manifests: o.Manifests, Mode: o.mode(), Scheduler: o.Scheduler, Health: o.Health, Listeners: o.Listeners,
		Own: o.ownAddrs(n, addrs), PodNetworks: o.podNetworks(n), ServiceCIDRs: serviceCIDRs,
	}
	v.IPs = o.primary(n, addrs)
	if len(addrs) == 0 {
		addrs = v.IPs
	}
	v.NodePorts = o.nodePorts(v.IPs, addrs)
	switch o.DetectLocal.Mode {
	case LocalClusterCIDR:
		v.Pods.Prefixes = model.Disjoint(o.DetectLocal.ClusterCIDRs)
	case LocalNodeCIDR:
		v.Pods.Prefixes = model.Disjoint(n.PodCIDRs)
	case LocalBridgeInterface:
		v.Pods.Interfaces = []string{o.DetectLocal.Interface}
	case LocalInterfacePrefix:
		v.Pods.Interfaces = []string{o.DetectLocal.Interface + "*"}
	}
	return v
}

// own leaves out addresses inside of Service CIDRs, which another proxy may have put on an interface,
// and zones, which rows do not have.
func own(addrs []netip.Addr, serviceCIDRs []netip.Prefix) (all []netip.Addr) {
	for _, a := range addrs {
		a = a.WithZone("").Unmap()
		if a.IsValid() && !contains(serviceCIDRs, a) {
			all = append(all, a)
		}
	}
	return all
}

// primary takes, for each family, the first address of: the options, the Node object, and only
// without a Node object those of the interfaces.
func (o *Options) primary(n Node, addrs []netip.Addr) (ips []netip.Addr) {
	lists := [][]netip.Addr{o.NodeIPs, n.IPs}
	if n.Name == "" {
		lists = append(lists, addrs)
	}
	for _, a := range slices.Concat(lists...) {
		if !hasFamily(ips, a) && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			ips = append(ips, a)
		}
	}
	return ips
}

// nodePorts picks the addresses that NodePortAddresses mean.
func (o *Options) nodePorts(primary, addrs []netip.Addr) []netip.Addr {
	var means []netip.Prefix
	for _, text := range o.NodePortAddresses {
		switch text {
		case primaryAddresses:
			for _, a := range primary {
				means = append(means, hostPrefix(a))
			}
		case localhostAddresses:
			means = append(means, netip.MustParsePrefix("127.0.0.0/8"), hostPrefix(netip.IPv6Loopback()))
		case allAddresses:
			means = append(means, everyone()...)
		default:
			if p, err := netip.ParsePrefix(text); err == nil {
				means = append(means, p.Masked())
			}
		}
	}
	means = withOpenFamilies(means)
	addrs = append(slices.Clone(addrs), netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback())
	addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool {
		return !slices.ContainsFunc(means, func(p netip.Prefix) bool { return covers(p, a) })
	})
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// covers is Contains, but loopback and IPv6 link-local addresses must be meant: 0.0.0.0/0 does not.
func covers(p netip.Prefix, a netip.Addr) bool {
	special := a.IsLoopback() || a.Is6() && a.IsLinkLocalUnicast()
	return p.Contains(a) && (!special || p.Addr().IsLoopback() || p.Addr().IsLinkLocalUnicast())
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
