package config

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Kind and version of the file that has what kube-proxy has no words for, and its name beside the
// other one.
const (
	FairleadKind       = "FairleadConfiguration"
	FairleadAPIVersion = "fairlead.dev/v1alpha1"
	fairleadFile       = "fairlead.conf"
)

// FairleadConfiguration is what kube-proxy has no words for.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Manifests are files and directories whose Services are served without a cluster; none: those of
	// the API server.
	Manifests []string `json:"manifests,omitempty"`
	// NodeIPs are the primary addresses of this node, at most one of each family; none: those that
	// the Node object or else the interfaces have.
	NodeIPs []string `json:"nodeIPs,omitempty"`
	// ControlSocket is the path of the Unix socket on which dump, explain and others ask; empty: none.
	ControlSocket string `json:"controlSocket"`
	// HealthCheckMaxAge is how long "fairlead answer-health" answers at health check ports for a process that is away;
	// 0: the process itself answers.
	HealthCheckMaxAge metav1.Duration `json:"healthCheckMaxAge,omitempty"`
	// AuditInterval is the time between two comparisons of the kernel with what it should hold.
	AuditInterval metav1.Duration `json:"auditInterval,omitempty"`
	// MetricsServices is how many ports of Services, those with the most connections, have metrics of their own. All
	// others together have one; 0: none has.
	MetricsServices int32 `json:"metricsServices"`
	// Counters is for what the connections are counted in modes nftables and iptables: "off", "services" or "backends".
	// The last one counts packets and bytes, too, also those of sockets in mode ebpf.
	Counters Counters `json:"counters,omitempty"`
	// Flowtable is whether open connections that the node forwards go past the kernel's hooks in mode nftables. "auto"
	// does so while no other program has rules there that see them, "always" in any case. The default is "off".
	Flowtable Flowtable `json:"flowtable,omitempty"`
	// BackendHealth says what becomes of backends that do not answer clients of this node: "off", "observe" or "eject".
	BackendHealth BackendHealth `json:"backendHealth,omitempty"`
	// Ejection says when a backend is ejected, and when it comes back.
	Ejection Ejection `json:"ejection,omitempty"`
	// ResetOrphans has open connections of TCP reset whose backend is gone and does not acknowledge what it was sent. The
	// default is true: such a connection can only hang. One to a backend that answers is never reset.
	ResetOrphans bool `json:"resetOrphans"`
	// ReadinessGate has pods of this node that name the readiness gate fairlead.dev/routed become ready only once the
	// node reaches them. The default is false: nothing is asked about pods.
	ReadinessGate bool `json:"readinessGate,omitempty"`
	// TakeOver says what becomes of rules that kube-proxy has left on the node: "Remove", once
	// Fairlead's own are in force, or "Keep".
	TakeOver TakeOver `json:"takeOver,omitempty"`
	// IPTablesBackend is which packet filter of the kernel holds the rules of mode iptables; empty: the one
	// that the machine's iptables uses.
	IPTablesBackend IPTablesBackend `json:"iptablesBackend,omitempty"`
	// IPVSAddressMode is how the node takes packets to Service addresses for its own in mode ipvs.
	IPVSAddressMode IPVSAddressMode `json:"ipvsAddressMode,omitempty"`
	// IPVSDrainTimeout is how long a backend that is gone keeps its connections in mode ipvs; 0: as long as they last.
	IPVSDrainTimeout metav1.Duration `json:"ipvsDrainTimeout,omitempty"`
	// EBPF is for the data plane ebpf.
	EBPF EBPF `json:"ebpf,omitempty"`
	// Userspace is for the data plane userspace.
	Userspace Userspace `json:"userspace,omitempty"`
}

// Ejection are the settings of backendHealth. They are compared.
type Ejection struct {
	// Failures in a row after which a backend is taken for dead.
	Failures int32 `json:"failures,omitempty"`
	// FloorPercent of a pool's ready backends always stay in use.
	FloorPercent int32 `json:"floorPercent,omitempty"`
	// Time of the first ejection; each further one takes twice as long.
	Time metav1.Duration `json:"time,omitempty"`
	// MaxTime of an ejection.
	MaxTime metav1.Duration `json:"maxTime,omitempty"`
	// SlowStart is how long a backend that answers again takes to get its full share of new connections.
	SlowStart metav1.Duration `json:"slowStart,omitempty"`
}

// Userspace are the settings of the data plane userspace. They are compared.
type Userspace struct {
	// Redirect is how packets come to the process.
	Redirect UserspaceRedirect `json:"redirect,omitempty"`
	// DialTimeout is for how long one backend is waited for.
	DialTimeout metav1.Duration `json:"dialTimeout,omitempty"`
	// Dials is how many backends are tried for one connection.
	Dials int32 `json:"dials,omitempty"`
	// IdleTimeout ends a connection of TCP over which nothing passes.
	IdleTimeout metav1.Duration `json:"idleTimeout,omitempty"`
	// HalfClosedTimeout does so where one side has ended its direction.
	HalfClosedTimeout metav1.Duration `json:"halfClosedTimeout,omitempty"`
	// UDPTimeout ends a flow of UDP that is silent.
	UDPTimeout metav1.Duration `json:"udpTimeout,omitempty"`
	// UDPStreamTimeout does so where it was answered and has gone on.
	UDPStreamTimeout metav1.Duration `json:"udpStreamTimeout,omitempty"`
	// MaxConnections are how many connections of TCP may be open; 0: the plane's default.
	MaxConnections int32 `json:"maxConnections,omitempty"`
	// MaxFlows are how many flows of UDP may be; 0: the plane's default.
	MaxFlows int32 `json:"maxFlows,omitempty"`
}

// EBPF are the settings of the data plane ebpf. They are compared.
type EBPF struct {
	// CgroupRoot is the root of the machine's cgroups of version 2; empty: where they are mounted.
	CgroupRoot string `json:"cgroupRoot,omitempty"`
	// BPFRoot is where a file system of type bpf is mounted, or will be.
	BPFRoot string `json:"bpfRoot,omitempty"`
	// Packets says what serves packets without a socket on the node.
	Packets EBPFPackets `json:"packets,omitempty"`
	// Acceleration is whether drivers of devices serve known flows from outside to outside.
	Acceleration EBPFAcceleration `json:"acceleration,omitempty"`
	// Forwarding is whether clients from outside are hidden from backends on other nodes.
	Forwarding EBPFForwarding `json:"forwarding,omitempty"`
	// Sockets is whose connect() is translated.
	Sockets EBPFSockets `json:"sockets,omitempty"`
	// AbortTCP has TCP connections end with their backend's place in its Service, as those of UDP sockets do.
	AbortTCP bool `json:"abortTCP,omitempty"`
	// Sizes say how much is remembered; 0 is the plane's default.
	Sizes EBPFSizes `json:"sizes,omitempty"`
}

// EBPFSizes are numbers of elements of tables, whose memory is taken at once.
type EBPFSizes struct {
	// Affinities are clients of Services with session affinity.
	Affinities int32 `json:"affinities,omitempty"`
	// Flows are two for each peer of a UDP socket that is not connected.
	Flows int32 `json:"flows,omitempty"`
	// Sockets are connected ones.
	Sockets int32 `json:"sockets,omitempty"`
	// Translations are two for each connection of packets, four if its client is hidden.
	Translations int32 `json:"translations,omitempty"`
	// Services, of one port and one backend each, that tables have room for from the start.
	Services int32 `json:"services,omitempty"`
}

// Counters is what connections are counted for.
type Counters string

// The values of Counters.
const (
	CountNothing  Counters = "off"
	CountServices Counters = "services"
	CountBackends Counters = "backends"
)

// Flowtable is whether a flowtable forwards open connections.
type Flowtable string

// The values of Flowtable.
const (
	FlowtableOff    Flowtable = "off"
	FlowtableAuto   Flowtable = "auto"
	FlowtableAlways Flowtable = "always"
)

// BackendHealth says what becomes of backends that do not answer.
type BackendHealth string

// The values of BackendHealth.
const (
	BackendHealthOff     BackendHealth = "off"
	BackendHealthObserve BackendHealth = "observe"
	BackendHealthEject   BackendHealth = "eject"
)

// TakeOver says what becomes of the rules that kube-proxy has left.
type TakeOver string

// The values of TakeOver.
const (
	TakeOverRemove TakeOver = "Remove"
	TakeOverKeep   TakeOver = "Keep"
)

// IPTablesBackend is one of the kernel's packet filters, named as iptables --version does.
type IPTablesBackend string

// The values of IPTablesBackend.
const (
	IPTablesAsSystem IPTablesBackend = ""
	IPTablesLegacy   IPTablesBackend = "legacy"
	IPTablesNFTables IPTablesBackend = "nf_tables"
)

// IPVSAddressMode is a way to make addresses of Services local.
type IPVSAddressMode string

// The values of IPVSAddressMode.
const (
	IPVSAddressesByCIDR  IPVSAddressMode = "cidr"
	IPVSAddressesByRoute IPVSAddressMode = "route"
	IPVSAddressesOnDummy IPVSAddressMode = "dummy"
)

// EBPFPackets is a way to serve packets that come from no socket of the node.
type EBPFPackets string

// The values of EBPFPackets.
const (
	EBPFPacketsByTC       EBPFPackets = "tc"
	EBPFPacketsByNFTables EBPFPackets = "nftables"
)

// EBPFAcceleration is a way to use drivers of network devices.
type EBPFAcceleration string

// The values of EBPFAcceleration.
const (
	EBPFAccelerationOff        EBPFAcceleration = "off"
	EBPFAccelerationBestEffort EBPFAcceleration = "best-effort"
	EBPFAccelerationNative     EBPFAcceleration = "native"
)

// UserspaceRedirect is a way for packets to the process of mode userspace.
type UserspaceRedirect string

// The values of UserspaceRedirect.
const (
	UserspaceByWhatThereIs UserspaceRedirect = "auto"
	UserspaceByTPROXY      UserspaceRedirect = "tproxy"
	UserspaceByNAT         UserspaceRedirect = "nat"
	UserspaceByIPTables    UserspaceRedirect = "iptables"
	UserspaceByListening   UserspaceRedirect = "listen"
)

// EBPFForwarding is a way for answers to clients from outside.
type EBPFForwarding string

// The values of EBPFForwarding.
const (
	EBPFForwardingSNAT EBPFForwarding = "snat"
	EBPFForwardingDSR  EBPFForwarding = "dsr"
)

// EBPFSockets says whose sockets are served as such, and not by their packets.
type EBPFSockets string

// The values of EBPFSockets.
const (
	EBPFSocketsOfAll  EBPFSockets = "all"
	EBPFSocketsOfNode EBPFSockets = "node"
)
