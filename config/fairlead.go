package config

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Kind and version of the file that has what kube-proxy has no words for, and its name beside the
// other one.
const (
	FairleadKind       = "FairleadConfiguration"
	FairleadAPIVersion = "fairlead.dev/v1alpha1"
	fairleadFile       = "fairlead.conf"
)

// FairleadConfiguration is what kube-proxy has no words for. flags.txt says what each field is for.
type FairleadConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	Manifests         []string        `json:"manifests,omitempty"` // none: the objects are those of the API server
	NodeIPs           []string        `json:"nodeIPs,omitempty"`
	ControlSocket     string          `json:"controlSocket"`
	HealthCheckMaxAge metav1.Duration `json:"healthCheckMaxAge,omitempty"`
	AuditInterval     metav1.Duration `json:"auditInterval,omitempty"`
	MetricsServices   int32           `json:"metricsServices"`
	Counters          Counters        `json:"counters,omitempty"`
	Flowtable         Flowtable       `json:"flowtable,omitempty"`
	BackendHealth     BackendHealth   `json:"backendHealth,omitempty"`
	Ejection          Ejection        `json:"ejection,omitempty"`
	ResetOrphans      bool            `json:"resetOrphans"`
	ReadinessGate     bool            `json:"readinessGate,omitempty"`
	TakeOver          TakeOver        `json:"takeOver,omitempty"`
	IPTablesBackend   IPTablesBackend `json:"iptablesBackend,omitempty"`
	IPVSAddressMode   IPVSAddressMode `json:"ipvsAddressMode,omitempty"`
	IPVSDrainTimeout  metav1.Duration `json:"ipvsDrainTimeout,omitempty"`
	EBPF              EBPF            `json:"ebpf,omitempty"`
	Userspace         Userspace       `json:"userspace,omitempty"`
}

// Ejection are the settings of backendHealth. They are compared.
type Ejection struct {
	Failures     int32           `json:"failures,omitempty"`
	FloorPercent int32           `json:"floorPercent,omitempty"`
	Time         metav1.Duration `json:"time,omitempty"`
	MaxTime      metav1.Duration `json:"maxTime,omitempty"`
	SlowStart    metav1.Duration `json:"slowStart,omitempty"`
}

// Userspace are the settings of the data plane userspace. They are compared. A bound of 0 is the plane's default.
type Userspace struct {
	Redirect          UserspaceRedirect `json:"redirect,omitempty"`
	DialTimeout       metav1.Duration   `json:"dialTimeout,omitempty"`
	Dials             int32             `json:"dials,omitempty"`
	IdleTimeout       metav1.Duration   `json:"idleTimeout,omitempty"`
	HalfClosedTimeout metav1.Duration   `json:"halfClosedTimeout,omitempty"`
	UDPTimeout        metav1.Duration   `json:"udpTimeout,omitempty"`
	UDPStreamTimeout  metav1.Duration   `json:"udpStreamTimeout,omitempty"`
	MaxConnections    int32             `json:"maxConnections,omitempty"`
	MaxFlows          int32             `json:"maxFlows,omitempty"`
}

// EBPF are the settings of the data plane ebpf. They are compared.
type EBPF struct {
	CgroupRoot   string           `json:"cgroupRoot,omitempty"`
	BPFRoot      string           `json:"bpfRoot,omitempty"`
	Packets      EBPFPackets      `json:"packets,omitempty"`
	Acceleration EBPFAcceleration `json:"acceleration,omitempty"`
	Forwarding   EBPFForwarding   `json:"forwarding,omitempty"`
	Sockets      EBPFSockets      `json:"sockets,omitempty"`
	AbortTCP     bool             `json:"abortTCP,omitempty"`
	Sizes        EBPFSizes        `json:"sizes,omitempty"`
}

// EBPFSizes are numbers of elements of tables, whose memory is taken at once; 0 is the plane's default.
type EBPFSizes struct {
	Affinities   int32 `json:"affinities,omitempty"`
	Flows        int32 `json:"flows,omitempty"`
	Sockets      int32 `json:"sockets,omitempty"`
	Translations int32 `json:"translations,omitempty"`
	Services     int32 `json:"services,omitempty"`
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
