// Package defect has the deliberate defects by which the tests are tested. A program has them only if it is built with
// the tag defects; then the environment variable FAIRLEAD_DEFECT names the one that it suffers from. Without the tag Is
// is the constant false, and the compiler leaves out what depends on it. A fault (dataplane.Config.Fault) is something
// else: a call of the kernel that a test has fail, which the product must cope with.
//
//	internal/defect: names ──► one "if defect.Is(…)" each in the product, at the place that is to go wrong
//	      │ FAIRLEAD_DEFECT
//	./dev defects: test binaries with the tag ──► each test of the table passes without a defect, and fails with its own
//	      ▲
//	README.md: the table of names, defects and tests
package defect

// Name is what FAIRLEAD_DEFECT says.
type Name string

// The defects. README.md has these sentences, and the test that must notice each.
const (
	// Connections to a Service without endpoints are dropped instead of rejected.
	ServiceVerdict Name = "service-verdict"
	// The first endpoint of each EndpointSlice is left out.
	ServiceEndpoint Name = "service-endpoint"
	// An endpoint that terminates gets new connections while others are ready.
	ServiceTerminating Name = "service-terminating"
	// Topology hints are ignored.
	ServiceHints Name = "service-hints"
	// Source ranges of load balancers are ignored.
	ServiceSourceRanges Name = "service-source-ranges"
	// A frontend gets the endpoints of the other address family.
	ServiceFamily Name = "service-family"

	// The difference between two States lacks pools.
	ModelDiff Name = "model-diff"

	// The engine tells what an audit has found, and does not repair it.
	EngineRepair Name = "engine-repair"
	// The engine does not try again what has failed.
	EngineRetry Name = "engine-retry"
	// The engine's audits do not look at the kernel.
	EngineAudit Name = "engine-audit"
	// While another plane is programmed, a repair removes what that has in the kernel.
	HandoverHold Name = "handover-hold"
	// A plane that was replaced is closed although connections pass through its process.
	HandoverDrain Name = "handover-drain"
	// After an abandoned switch the objects of the new plane are not removed.
	HandoverAbandon Name = "handover-abandon"
	// The health check of a Service counts one endpoint too many.
	HealthCount Name = "health-count"
	// The health check of the node succeeds before anything is programmed.
	HealthEarly Name = "health-early"

	// A change leaves the elements of frontends that it deletes in the sets of nftables.
	NFTablesDelete Name = "nftables-delete"
	// The rules of nftables do not recall the backend of a client.
	NFTablesAffinity Name = "nftables-affinity"
	// Remove leaves the nftables table of IPv6.
	NFTablesRemove Name = "nftables-remove"

	// No rule of iptables marks packets whose source address is to be replaced.
	IPTablesSNAT Name = "iptables-snat"
	// Rules of iptables choose all backends equally often, whatever their weights are.
	IPTablesWeight Name = "iptables-weight"
	// An audit of iptables tells no differences.
	IPTablesAudit Name = "iptables-audit"

	// All real servers of IPVS have weight 1.
	IPVSWeight Name = "ipvs-weight"
	// A real server of IPVS that leaves goes at once, with its connections.
	IPVSDraining Name = "ipvs-draining"

	// The eBPF tables lack the frontends of IPv6.
	EBPFElement Name = "ebpf-element"
	// An audit of the eBPF tables does not compare pools.
	EBPFAudit Name = "ebpf-audit"
	// The sweep of eBPF does not forget a flow that is over.
	EBPFFlow Name = "ebpf-flow"

	// The process of mode userspace does not remember the backend of a client.
	UserspaceAffinity Name = "userspace-affinity"
	// Remove leaves the routes of mode userspace and the rules that lead to them.
	UserspaceRemove Name = "userspace-remove"

	// Connection tracking keeps a UDP flow whose backend has left.
	ConntrackFlow Name = "conntrack-flow"
	// A listener on loopback keeps the backends that it had first.
	LocalhostBackends Name = "localhost-backends"

	// A takeover leaves kube-proxy's chains in iptables-legacy.
	TakeoverChains Name = "takeover-chains"
	// The source of manifests tells an edited object as it was before.
	FileEdit Name = "file-edit"
	// The source of the API server tells a deleted object as if it were still there.
	KubeDelete Name = "kube-delete"
	// A configuration that breaks rules is accepted.
	ConfigRules Name = "config-rules"
	// The metrics do not count failures to program the kernel.
	MetricsFailures Name = "metrics-failures"
)
