package config

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

// Ports that kube-proxy listens on.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// setDefaults fills in what kube-proxy fills in where a file says nothing.
func setDefaults(c *kubeproxy.KubeProxyConfiguration) {
	setDefault(&c.BindAddress, "0.0.0.0")
	setListenerDefaults(c)
	setPointer(&c.OOMScoreAdj, -999)
	setPointer(&c.IPTables.MasqueradeBit, 14)
	setPointer(&c.NFTables.MasqueradeBit, 14)
	setPointer(&c.IPTables.LocalhostNodePorts, true)
	setDefault(&c.IPTables.SyncPeriod.Duration, 30*time.Second)
	setDefault(&c.IPVS.SyncPeriod.Duration, 30*time.Second)
	setDefault(&c.NFTables.SyncPeriod.Duration, 30*time.Second)
	setDefault(&c.IPTables.MinSyncPeriod.Duration, time.Second)
	setDefault(&c.NFTables.MinSyncPeriod.Duration, time.Second)
	setDefault(&c.ConfigSyncPeriod.Duration, 15*time.Minute)
	setPointer(&c.Conntrack.MaxPerCore, 32<<10)
	setPointer(&c.Conntrack.Min, 128<<10)
	setPointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	setPointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	setDefault(&c.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	setDefault(&c.ClientConnection.QPS, 5)
	setDefault(&c.ClientConnection.Burst, 10)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// setListenerDefaults chooses addresses of the family that bindAddress has.
func setListenerDefaults(c *kubeproxy.KubeProxyConfiguration) {
	anywhere, here := "[::]", "[::1]"
	if parseAddr(c.BindAddress).Is4() {
		anywhere, here = "0.0.0.0", "127.0.0.1"
	}
	setDefault(&c.HealthzBindAddress, anywhere+":"+strconv.Itoa(healthzPort))
	setDefault(&c.MetricsBindAddress, here+":"+strconv.Itoa(metricsPort))
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metricsPort)
}

// setModeDefaults fills in what depends on where the daemon runs, after flags and file were heard.
func setModeDefaults(c *kubeproxy.KubeProxyConfiguration) {
	setDefault(&c.Mode, ModeIPTables)
	setDefault(&c.DetectLocalMode, LocalClusterCIDR)
	if meansPrimary(c.Mode) && len(c.NodePortAddresses) == 0 {
		c.NodePortAddresses = []string{primaryAddresses}
	}
}

// meansPrimary reports whether NodePorts are open on the primary addresses where nothing is said, as in kube-proxy's
// mode nftables, and not on all.
func meansPrimary(mode kubeproxy.ProxyMode) bool {
	return slices.Contains([]kubeproxy.ProxyMode{ModeNFTables, ModeEBPF, ModeUserspace, ModeAuto}, mode)
}

func defaultFairlead() FairleadConfiguration {
	return FairleadConfiguration{
		TypeMeta:        metav1.TypeMeta{Kind: FairleadKind, APIVersion: FairleadAPIVersion},
		ControlSocket:   defaultControlSocket(),
		AuditInterval:   metav1.Duration{Duration: time.Second / 2},
		MetricsServices: 50,
		Counters:        CountServices,
		Flowtable:       FlowtableOff,
		TakeOver:        TakeOverRemove,
		BackendHealth:   BackendHealthObserve,
		ResetOrphans:    true,
		Ejection: Ejection{
			Failures: 3, FloorPercent: 50, Time: metav1.Duration{Duration: 5 * time.Second},
			MaxTime: metav1.Duration{Duration: 5 * time.Minute}, SlowStart: metav1.Duration{Duration: 10 * time.Second},
		},
		IPVSAddressMode: IPVSAddressesByCIDR,
		EBPF: EBPF{
			BPFRoot: "/sys/fs/bpf", Packets: EBPFPacketsByTC, Acceleration: EBPFAccelerationOff,
			Forwarding: EBPFForwardingSNAT, Sockets: EBPFSocketsOfAll,
		},
		Userspace: Userspace{
			Redirect:    UserspaceByWhatThereIs,
			DialTimeout: metav1.Duration{Duration: 3 * time.Second}, Dials: 6,
			IdleTimeout: metav1.Duration{Duration: 24 * time.Hour}, HalfClosedTimeout: metav1.Duration{Duration: time.Hour},
			UDPTimeout:       metav1.Duration{Duration: 30 * time.Second},
			UDPStreamTimeout: metav1.Duration{Duration: 2 * time.Minute},
		},
	}
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func setPointer[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

// withPort adds a port to an address that has none. Anything else is left for the rules to refuse.
func withPort(address string, port int) string {
	if _, _, err := net.SplitHostPort(address); err == nil || !parseAddr(address).IsValid() {
		return address
	}
	return net.JoinHostPort(address, strconv.Itoa(port))
}

// parseAddrPort is the zero value for what is not an address and a port.
func parseAddrPort(text string) netip.AddrPort {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return netip.AddrPort{}
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if addr := parseAddr(host); err == nil && addr.IsValid() {
		return netip.AddrPortFrom(addr, uint16(number))
	}
	return netip.AddrPort{}
}
