package config

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// option is a flag: whether it has a place in a file, and in which.
type option struct {
	group group // empty: that of its neighbours
	flag  string
	// field is where a file says the same, several in the order of precedence; empty: nowhere.
	field string
	// always says that the flag counts beside a --config as well, as those of Fairlead's own file do.
	always     bool
	bind       func(set *pflag.FlagSet, name, usage string)
	usage      string
	deprecated string
}

// group is a heading of the help.
type group string

const (
	serving     group = "what it serves"
	files       group = "configuration"
	instead     group = "instead of running"
	plane       group = "data plane"
	backends    group = "backends that do not answer"
	nodePorts   group = "node ports"
	pods        group = "pods"
	listeners   group = "listeners"
	kernel      group = "kernel settings"
	apiServer   group = "API server"
	logging     group = "logging"
	ipvs        group = "for mode ipvs"
	ebpf        group = "for mode ebpf"
	userspace   group = "for mode userspace"
	windowsOnly group = "for Windows"
	obsolete    group = "accepted, without meaning here"
)

func text(to *string) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.StringVar(to, name, *to, usage) }
}

func texts(to *[]string) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.StringSliceVar(to, name, *to, usage) }
}

func yes(to *bool) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.BoolVar(to, name, *to, usage) }
}

func number(to *int32) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.Int32Var(to, name, *to, usage) }
}

func span(to *time.Duration) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.DurationVar(to, name, *to, usage) }
}

func value(to pflag.Value) func(*pflag.FlagSet, string, string) {
	return func(s *pflag.FlagSet, name, usage string) { s.Var(to, name, usage) }
}

func word[T ~string](to *T) func(*pflag.FlagSet, string, string) {
	return value(stringValue[T]{to, reflect.TypeFor[T]().Name(), nil})
}

func ip(to *string) func(*pflag.FlagSet, string, string) {
	return value(stringValue[string]{to, "ip", checkIP})
}

func ipPort(to *string) func(*pflag.FlagSet, string, string) {
	return value(stringValue[string]{to, "ipport", checkIPPort})
}

// all are the options, in the order of the help.
func (f *Flags) all() (all []option) {
	for _, part := range []struct {
		group   group
		options []option
	}{
		{serving, f.serving()}, {files, f.filesAndVerbs()}, {plane, f.dataPlane()}, {backends, f.backends()},
		{nodePorts, f.nodePortsAndPods()}, {listeners, f.listeners()}, {kernel, f.kernel()}, {apiServer, f.apiServer()},
		{logging, f.logging()}, {ipvs, f.ipvs()}, {ebpf, f.ebpf()}, {ebpf, f.ebpfSizes()}, {userspace, f.userspace()},
		{windowsOnly, f.windows()}, {obsolete, f.obsolete()}, {obsolete, f.obsoleteLogging()},
	} {
		for _, o := range part.options {
			o.group, o.always = cmp.Or(o.group, part.group), o.always || isOwn(o.field)
			all = append(all, o)
		}
	}
	return all
}

func (f *Flags) serving() []option {
	own := &f.said.fairlead
	return []option{
		{flag: "manifests", field: "manifests",
			bind: func(s *pflag.FlagSet, name, usage string) {
				s.StringArrayVar(&own.Manifests, name, own.Manifests, usage)
			},
			usage: "`file or directory` with manifests, served instead of the API server's Services (repeatable)"},
		{flag: "hostname-override", field: "hostnameOverride", always: true, bind: text(&f.said.hostname),
			usage: "name of this node's Node object (default: the hostname)"},
		{flag: "node-ip", field: "nodeIPs", bind: texts(&own.NodeIPs),
			usage: "primary address of this node, one for each family (default: --bind-address, else the Node object's, else " +
				"the first of the interfaces)"},
		{flag: "bind-address", field: "bindAddress", bind: ip(&f.said.kubeProxy.BindAddress),
			usage: "primary address of this node, unless it is 0.0.0.0 or ::. Nothing binds to it, in spite of its name"},
		{flag: "once", always: true, bind: yes(&f.Once), usage: "program the kernel, then exit"},
		{flag: "strict", always: true, bind: yes(&f.Strict),
			usage: "serve --manifests only if nothing in them is wrong or probably a mistake; else print it, exit status 1"},
		{flag: "feature-gates", field: "featureGates", bind: value(cliflag.NewMapStringBool(&f.said.kubeProxy.FeatureGates)),
			usage: "Kubernetes' feature gates. Those with a meaning here: " +
				strings.Join(meaningfulGates(), ", ")},
	}
}

func (f *Flags) filesAndVerbs() []option {
	return []option{
		{flag: "config", always: true, bind: text(&f.Config),
			usage: "`file` with a KubeProxyConfiguration. It overrides flags that have a field in it, except " +
				"--hostname-override and logging flags"},
		{flag: "fairlead-config", always: true, bind: text(&f.FairleadConfig),
			usage: "`file` with a " + FairleadKind + "; flags override it (default: " + fairleadFile +
				" beside --config, if it is there)"},
		{flag: "write-config-to", always: true, bind: text(&f.WriteConfigTo),
			usage: "write the effective KubeProxyConfiguration to this `file`, and exit"},
		{group: instead, flag: "cleanup", always: true, bind: yes(&f.Cleanup),
			usage: "remove every rule of kube-proxy and of Fairlead, and exit"},
		{group: instead, flag: "init-only", always: true, bind: yes(&f.InitOnly),
			usage: "do what needs root, and exit; CAP_NET_ADMIN is enough from then on"},
		{group: instead, flag: "version", always: true, bind: value(&f.Version),
			usage: "print the version, and exit; =raw prints all details, =vX.Y.Z sets the version to report"},
	}
}

func (f *Flags) dataPlane() []option {
	c, own := &f.said.kubeProxy, &f.said.fairlead
	const gathered = "after a change that was slow to program, the next ones of its namespace wait for 8 times as " +
		"long, together at most this; 0: never (in a file: the default)"
	return []option{
		{flag: "proxy-mode", field: "mode", bind: word(&c.Mode),
			usage: "data plane: iptables (also if empty), ipvs, nftables, ebpf, userspace, or auto, which chooses one of " +
				"them; on Windows kernelspace"},
		{flag: "masquerade-all", field: "iptables.masqueradeAll nftables.masqueradeAll", bind: yes(&f.said.masqueradeAll),
			usage: "replace the source address of every connection to a ClusterIP"},
		{flag: "iptables-masquerade-bit", field: "iptables.masqueradeBit", bind: number(c.IPTables.MasqueradeBit),
			usage: "bit of the packet mark that requests source NAT, 0 to 31; in every mode but nftables"},
		{flag: "iptables-min-sync-period", field: "iptables.minSyncPeriod nftables.minSyncPeriod",
			bind: span(&f.said.iptables.minSync), usage: gathered},
		{flag: "ipvs-min-sync-period", field: "ipvs.minSyncPeriod", bind: span(&f.said.ipvs.minSync),
			usage: gathered + "; in mode ipvs"},
		{flag: "audit-interval", field: "auditInterval", bind: span(&own.AuditInterval.Duration),
			usage: "time between two audits of the kernel's rules"},
		{flag: "counters", field: "counters", bind: word(&own.Counters),
			usage: "connections that modes nftables and iptables count, beside refusals: off, services (per port) or backends " +
				"(packets and bytes, too; the first programming takes twice as long, a connection 4 % longer, in mode ebpf 9 %, " +
				"and a request there 5 %)"},
		{flag: "flowtable", field: "flowtable", bind: word(&own.Flowtable),
			usage: "open connections that the node forwards go past the kernel's hooks, in mode nftables: off, auto (while no " +
				"other program's rules see them there) or always; annotation fairlead.dev/flowtable: \"off\" has off for one " +
				"Service"},
		{flag: "take-over", field: "takeOver", bind: word(&own.TakeOver),
			usage: "rules that kube-proxy left: Remove deletes them once Fairlead's are active, Keep leaves them"},
		{flag: "iptables-backend", field: "iptablesBackend", bind: word(&own.IPTablesBackend),
			usage: "kernel interface of mode iptables: legacy or nf_tables (default: that of the kubelet, else that of the " +
				"machine's iptables)"},
	}
}

func (f *Flags) backends() []option {
	own := &f.said.fairlead
	e := &own.Ejection
	return []option{
		{flag: "backend-health", field: "backendHealth", bind: word(&own.BackendHealth),
			usage: "backends that do not answer clients of this node, while others do: off, observe (say so), or eject (no " +
				"new connections for a time); annotation fairlead.dev/backend-health has it for one Service"},
		{flag: "ejection-failures", field: "ejection.failures", bind: number(&e.Failures),
			usage: "number of connections that fail in a row, after which a backend is ejected"},
		{flag: "ejection-floor-percent", field: "ejection.floorPercent", bind: number(&e.FloorPercent),
			usage: "share of ready endpoints that stay in use. Where more do not answer, none is ejected"},
		{flag: "ejection-time", field: "ejection.time", bind: span(&e.Time.Duration),
			usage: "time until some connections try an ejected backend again; each further ejection takes twice as long"},
		{flag: "ejection-max-time", field: "ejection.maxTime", bind: span(&e.MaxTime.Duration),
			usage: "longest time of an ejection"},
		{flag: "ejection-slow-start", field: "ejection.slowStart", bind: span(&e.SlowStart.Duration),
			usage: "time from the first answer until a backend has its full share again; annotation fairlead.dev/slow-start, " +
				"which holds for new endpoints, too"},
		{flag: "reset-orphans", field: "resetOrphans", bind: yes(&own.ResetOrphans),
			usage: "reset open TCP connections whose backend is gone and does not acknowledge what it was sent, so that " +
				"clients connect anew"},
	}
}

func (f *Flags) nodePortsAndPods() []option {
	c := &f.said.kubeProxy
	return []option{
		{flag: "nodeport-addresses", field: "nodePortAddresses", bind: texts(&c.NodePortAddresses),
			usage: "addresses on which NodePorts are open: CIDRs, primary, localhost, all (default: all in modes iptables and " +
				"ipvs, else primary)"},
		{flag: "iptables-localhost-nodeports", field: "iptables.localhostNodePorts", bind: yes(c.IPTables.LocalhostNodePorts),
			usage: "open NodePorts on 127.0.0.1 too, in mode iptables"},
		{group: pods, flag: "detect-local-mode", field: "detectLocalMode", bind: word(&c.DetectLocalMode),
			usage: "how Fairlead recognises packets of pods: ClusterCIDR (also if empty), NodeCIDR, BridgeInterface or " +
				"InterfaceNamePrefix"},
		{group: pods, flag: "cluster-cidr", field: "clusterCIDR", bind: text(&c.ClusterCIDR),
			usage: "range of the pods' addresses, one for each family, separated by a comma; for ClusterCIDR"},
		{group: pods, flag: "pod-bridge-interface", field: "detectLocal.bridgeInterface",
			bind: text(&c.DetectLocal.BridgeInterface), usage: "bridge of the pods; for BridgeInterface"},
		{group: pods, flag: "pod-interface-name-prefix", field: "detectLocal.interfaceNamePrefix",
			bind:  text(&c.DetectLocal.InterfaceNamePrefix),
			usage: "prefix of the names of the pods' interfaces; for InterfaceNamePrefix"},
		{group: pods, flag: "readiness-gate", field: "readinessGate", bind: yes(&f.said.fairlead.ReadinessGate),
			usage: "pods of this node with the readiness gate fairlead.dev/routed become ready only once the node reaches them"},
	}
}

func (f *Flags) listeners() []option {
	c := &f.said.kubeProxy
	return []option{
		{flag: "healthz-bind-address", field: "healthzBindAddress", bind: ipPort(&c.HealthzBindAddress),
			usage: "address of /healthz, /livez and /readyz; the port is optional"},
		{flag: "metrics-bind-address", field: "metricsBindAddress", bind: ipPort(&c.MetricsBindAddress),
			usage: "address of /metrics and other pages for operators; the port is optional"},
		{flag: "control-socket", field: "controlSocket", bind: text(&f.said.fairlead.ControlSocket),
			usage: "unix socket for dump, explain and other commands, or on Windows a file with address and token; empty: none"},
		{flag: "health-check-max-age", field: "healthCheckMaxAge", bind: span(&f.said.fairlead.HealthCheckMaxAge.Duration),
			usage: "time for which fairlead answer-health answers at health check ports while this process is away, 5s to 1h; " +
				"0: this process answers"},
		{flag: "bind-address-hard-fail", field: "bindAddressHardFail", bind: yes(&c.BindAddressHardFail),
			usage: "exit if a listener cannot be opened"},
		{flag: "metrics-services", field: "metricsServices", bind: number(&f.said.fairlead.MetricsServices),
			usage: "number of ports of Services, those with the most connections, that have metrics of their own; 0: none"},
		{flag: "profiling", field: "enableProfiling", bind: yes(&c.EnableProfiling),
			usage: "serve /debug/pprof with the metrics"},
		{flag: "show-hidden-metrics-for-version", field: "showHiddenMetricsForVersion",
			bind:  text(&c.ShowHiddenMetricsForVersion),
			usage: "serve metrics that this `version` of Kubernetes deprecated, such as 1.36; only the previous version counts"},
		{flag: "healthz-port", bind: number(&f.said.healthzPort),
			usage: "port of /healthz; 0: none", deprecated: "use --healthz-bind-address"},
		{flag: "metrics-port", bind: number(&f.said.metricsPort),
			usage: "port of /metrics; 0: none", deprecated: "use --metrics-bind-address"},
	}
}

func (f *Flags) kernel() []option {
	t, oom := &f.said.kubeProxy.Conntrack, f.said.kubeProxy.OOMScoreAdj
	return []option{
		{flag: "conntrack-max-per-core", field: "conntrack.maxPerCore", bind: number(t.MaxPerCore),
			usage: "limit of tracked connections for each CPU, if the machine has no higher one; 0 keeps the machine's limit, " +
				"whatever conntrack-min is"},
		{flag: "conntrack-min", field: "conntrack.min", bind: number(t.Min),
			usage: "lower bound of the limit of tracked connections, whatever the number of CPUs"},
		{flag: "conntrack-tcp-timeout-established", field: "conntrack.tcpEstablishedTimeout",
			bind: span(&t.TCPEstablishedTimeout.Duration), usage: "timeout of an idle TCP connection; 0: unchanged"},
		{flag: "conntrack-tcp-timeout-close-wait", field: "conntrack.tcpCloseWaitTimeout",
			bind:  span(&t.TCPCloseWaitTimeout.Duration),
			usage: "timeout of a TCP connection that only one side has closed; 0: unchanged"},
		{flag: "conntrack-tcp-be-liberal", field: "conntrack.tcpBeLiberal", bind: yes(&t.TCPBeLiberal),
			usage: "accept packets outside a connection's window (nf_conntrack_tcp_be_liberal)"},
		{flag: "conntrack-udp-timeout", field: "conntrack.udpTimeout", bind: span(&t.UDPTimeout.Duration),
			usage: "timeout of a UDP flow without answers; 0: unchanged"},
		{flag: "conntrack-udp-timeout-stream", field: "conntrack.udpStreamTimeout", bind: span(&t.UDPStreamTimeout.Duration),
			usage: "timeout of a UDP flow with answers; 0: unchanged"},
		{flag: "oom-score-adj", field: "oomScoreAdj", bind: number(oom),
			usage: "bias of the kernel's OOM killer for this process, -1000 to 1000; lower values protect it"},
	}
}

func (f *Flags) apiServer() []option {
	c := &f.said.kubeProxy.ClientConnection
	return []option{
		{flag: "kubeconfig", field: "clientConnection.kubeconfig", bind: text(&c.Kubeconfig),
			usage: "`file` with the API server's address and credentials (default: those of the pod)"},
		{flag: "master", always: true, bind: text(&f.Master),
			usage: "`address` of the API server, instead of the one in the kubeconfig"},
		{flag: "kube-api-content-type", field: "clientConnection.contentType", bind: text(&c.ContentType),
			usage: "content type of requests to the API server"},
		{flag: "kube-api-qps", field: "clientConnection.qps",
			bind:  func(s *pflag.FlagSet, name, usage string) { s.Float32Var(&c.QPS, name, c.QPS, usage) },
			usage: "requests to the API server per second"},
		{flag: "kube-api-burst", field: "clientConnection.burst", bind: number(&c.Burst),
			usage: "requests to the API server that may exceed the rate at once"},
	}
}

func (f *Flags) logging() []option {
	c := &f.said.kubeProxy.Logging
	short := func(s *pflag.FlagSet, name, usage string) {
		s.VarP(logsapi.VerbosityLevelPflag(&c.Verbosity), name, "v", usage)
	}
	return []option{
		{flag: "v", field: "logging.verbosity", always: true, bind: short,
			usage: "how much is logged: 0 what an operator must know, 2 what happens, 4 why"},
		{flag: "logging-format", field: "logging.format", always: true, bind: text(&c.Format), usage: "text or json"},
		{flag: "log-file", always: true, bind: text(&f.LogFile),
			usage: "append the log to this `file` instead of writing it to the standard error output"},
	}
}

func (f *Flags) ipvs() []option {
	c, own := &f.said.kubeProxy.IPVS, &f.said.fairlead
	return []option{
		{flag: "ipvs-address-mode", field: "ipvsAddressMode", bind: word(&own.IPVSAddressMode),
			usage: "how Service addresses become local, which IPVS needs: cidr (a local route for each Service CIDR, and for " +
				"each address outside), route (a local route for each address) or dummy (each address on kube-ipvs0, as with " +
				"kube-proxy)"},
		{flag: "ipvs-drain-timeout", field: "ipvsDrainTimeout", bind: span(&own.IPVSDrainTimeout.Duration),
			usage: "how long a backend that is gone keeps its TCP and SCTP connections; 0: as long as they last"},
		{flag: "ipvs-scheduler", field: "ipvs.scheduler", bind: text(&c.Scheduler),
			usage: "scheduler of Services without an annotation: rr (also if empty), wrr, lc, wlc, lblc, lblcr, sh, dh, sed, " +
				"nq, mh, fo, ovf or twos"},
		{flag: "ipvs-exclude-cidrs", field: "ipvs.excludeCIDRs", bind: texts(&c.ExcludeCIDRs),
			usage: "addresses whose virtual servers of kube-proxy are kept"},
		{flag: "ipvs-strict-arp", field: "ipvs.strictARP", bind: yes(&c.StrictARP),
			usage: "answer ARP only for addresses of the interface that receives the request (arp_ignore 1, arp_announce 2)"},
		{flag: "ipvs-tcp-timeout", field: "ipvs.tcpTimeout", bind: span(&c.TCPTimeout.Duration),
			usage: "timeout of an idle TCP connection; 0: unchanged"},
		{flag: "ipvs-tcpfin-timeout", field: "ipvs.tcpFinTimeout", bind: span(&c.TCPFinTimeout.Duration),
			usage: "timeout of a TCP connection that one side has closed; 0: unchanged"},
		{flag: "ipvs-udp-timeout", field: "ipvs.udpTimeout", bind: span(&c.UDPTimeout.Duration),
			usage: "timeout of a UDP flow; 0: unchanged"},
	}
}

func (f *Flags) ebpf() []option {
	own := &f.said.fairlead.EBPF
	return []option{
		{flag: "cgroup-root", field: "ebpf.cgroupRoot", bind: text(&own.CgroupRoot),
			usage: "`directory` of the machine's version 2 cgroups, whose processes are served (default: where they are " +
				"mounted)"},
		{flag: "bpf-root", field: "ebpf.bpfRoot", bind: text(&own.BPFRoot),
			usage: "`directory` of a bpf file system, which keeps the programs when the process ends; mounted if it is missing"},
		{flag: "ebpf-packets", field: "ebpf.packets", bind: word(&own.Packets),
			usage: "how packets without a socket on the node are served: tc (programs at the node's devices, if the kernel " +
				"supports them) or nftables (that data plane, with connection tracking)"},
		{flag: "ebpf-acceleration", field: "ebpf.acceleration", bind: word(&own.Acceleration),
			usage: "forward packets of known flows between devices in their drivers (XDP): off, best-effort (where the driver " +
				"supports it) or native (an error where it does not)"},
		{flag: "ebpf-forwarding", field: "ebpf.forwarding", bind: word(&own.Forwarding),
			usage: "how clients outside reach backends on other nodes: snat (source NAT; answers pass this node) or dsr " +
				"(backends see the client, and their nodes answer; needs dsr on all nodes, and a network that passes IP options)"},
		{flag: "ebpf-sockets", field: "ebpf.sockets", bind: word(&own.Sockets),
			usage: "whose connections are translated in connect(): all, or node. With node, packets of pods keep the " +
				"Service's address for a sidecar (Istio) or, with packets nftables, a cache on the node (NodeLocal DNSCache)"},
		{flag: "ebpf-abort-tcp", field: "ebpf.abortTCP", bind: yes(&own.AbortTCP),
			usage: "abort TCP connections that were translated in connect() when their backend leaves its Service, as those " +
				"of UDP sockets always are. A backend that terminates and still serves has not left (default: no)"},
	}
}

func (f *Flags) ebpfSizes() []option {
	own := &f.said.fairlead.EBPF.Sizes
	return []option{
		{flag: "ebpf-size-affinities", field: "ebpf.sizes.affinities", bind: number(&own.Affinities),
			usage: "number of sessions, 112 bytes each, shared among namespaces; 0: 65536"},
		{flag: "ebpf-size-flows", field: "ebpf.sizes.flows", bind: number(&own.Flows),
			usage: "number of peers of unconnected UDP sockets that use several Services, two elements of 128 bytes each. The " +
				"least recently used is dropped; its answers then come from the backend. 0: 65536"},
		{flag: "ebpf-size-sockets", field: "ebpf.sizes.sockets", bind: number(&own.Sockets),
			usage: "number of sockets with a place in memory, 72 bytes each, rounded up to a power of two: connected ones, " +
				"and those that use one Service by UDP. Further sockets need more time in connect(). 0: 65536"},
		{flag: "ebpf-size-translations", field: "ebpf.sizes.translations", bind: number(&own.Translations),
			usage: "number of translations of packets, 192 bytes each: two for a connection, four with source NAT. A quarter " +
				"is for flows that the client has not confirmed, namespaces share the rest. 0: a 128th of the machine's memory, " +
				"262144 to 2097152"},
		{flag: "ebpf-size-services", field: "ebpf.sizes.services", bind: number(&own.Services),
			usage: "number of Services, with one port and one backend each, for which tables have room from the start, some " +
				"350 bytes each; 0: half as many again as there are. Full tables are replaced by larger ones"},
	}
}

func (f *Flags) userspace() []option {
	own := &f.said.fairlead.Userspace
	const bound = "; 0: %s of the files that the process may open, %s at most"
	return []option{
		{flag: "userspace-redirect", field: "userspace.redirect", bind: word(&own.Redirect),
			usage: "how packets reach the process: auto (the first of these that the kernel supports), tproxy, nat (clients " +
				"are refused while no process runs), iptables (endpoints see the process as client) or listen (the same, without " +
				"rules and rights, on addresses of the machine only)"},
		{flag: "userspace-dial-timeout", field: "userspace.dialTimeout", bind: span(&own.DialTimeout.Duration),
			usage: "time to connect to the last backend. The first of several has an eighth of it, each further one twice as " +
				"much as the one before"},
		{flag: "userspace-dials", field: "userspace.dials", bind: number(&own.Dials),
			usage: "number of backends that are tried for one connection"},
		{flag: "userspace-idle-timeout", field: "userspace.idleTimeout", bind: span(&own.IdleTimeout.Duration),
			usage: "timeout of an idle TCP connection"},
		{flag: "userspace-half-closed-timeout", field: "userspace.halfClosedTimeout",
			bind: span(&own.HalfClosedTimeout.Duration), usage: "timeout of an idle TCP connection that one side has closed"},
		{flag: "userspace-udp-timeout", field: "userspace.udpTimeout", bind: span(&own.UDPTimeout.Duration),
			usage: "timeout of a UDP flow without answers"},
		{flag: "userspace-udp-stream-timeout", field: "userspace.udpStreamTimeout",
			bind: span(&own.UDPStreamTimeout.Duration), usage: "timeout of a UDP flow with answers"},
		{flag: "userspace-max-connections", field: "userspace.maxConnections", bind: number(&own.MaxConnections),
			usage: "number of open TCP connections, two files each, as far as there are files; those beyond their client's " +
				"share are reset" +
				fmt.Sprintf(bound, "two fifths", "65536")},
		{flag: "userspace-max-flows", field: "userspace.maxFlows", bind: number(&own.MaxFlows),
			usage: "number of UDP flows, as far as there are files; those beyond their client's " +
				"share end older ones" +
				fmt.Sprintf(bound, "a tenth", "32768")},
	}
}

func (f *Flags) windows() []option {
	c, win := &f.said.kubeProxy, &f.said.kubeProxy.Winkernel
	return []option{
		{flag: "windows-service", field: "windowsRunAsService", bind: yes(&c.WindowsRunAsService),
			usage: "run as a service of Windows, and log to the event log"},
		{flag: "network-name", field: "winkernel.networkName", bind: text(&win.NetworkName),
			usage: "HNS network of the pods (default: the environment's KUBE_NETWORK)"},
		{flag: "source-vip", field: "winkernel.sourceVip", bind: text(&win.SourceVip),
			usage: "source address of translated packets on an overlay network"},
		{flag: "enable-dsr", field: "winkernel.enableDSR", bind: yes(&win.EnableDSR),
			usage: "let endpoints answer clients directly, if Windows supports that"},
		{flag: "forward-healthcheck-vip", field: "winkernel.forwardHealthCheckVip", bind: yes(&win.ForwardHealthCheckVip),
			usage: "answer health checks of load balancers at the load balancers' own addresses"},
		{flag: "root-hnsendpoint-name", field: "winkernel.rootHnsEndpointName", bind: text(&win.RootHnsEndpointName),
			usage: "HNS endpoint of the node that answers them (default: cbr0)"},
	}
}

// obsolete are flags that are accepted, so that kube-proxy's command line is, and do nothing.
func (f *Flags) obsolete() []option {
	c := &f.said.kubeProxy
	const audited = "audits do that, see auditInterval"
	return []option{
		{flag: "iptables-sync-period", field: "iptables.syncPeriod nftables.syncPeriod", bind: span(&f.said.iptables.sync),
			usage: audited},
		{flag: "ipvs-sync-period", field: "ipvs.syncPeriod", bind: span(&f.said.ipvs.sync), usage: audited},
		{flag: "config-sync-period", field: "configSyncPeriod", bind: span(&c.ConfigSyncPeriod.Duration),
			usage: "objects are watched"},
	}
}

func (f *Flags) obsoleteLogging() []option {
	c := &f.said.kubeProxy.Logging
	const unbuffered = "logs are one stream without a buffer"
	return []option{
		{flag: "vmodule", field: "logging.vmodule", always: true, bind: value(logsapi.VModuleConfigurationPflag(&c.VModule)),
			usage: "nothing is logged by file"},
		{flag: "log-flush-frequency", field: "logging.flushFrequency", always: true,
			bind: span(&c.FlushFrequency.Duration.Duration), usage: unbuffered},
		{flag: "log-text-split-stream", field: "logging.options.text.splitStream", always: true,
			bind: yes(&c.Options.Text.SplitStream), usage: unbuffered},
		{flag: "log-text-info-buffer-size", field: "logging.options.text.infoBufferSize", always: true,
			bind: value(&c.Options.Text.InfoBufferSize), usage: unbuffered},
		{flag: "log-json-split-stream", field: "logging.options.json.splitStream", always: true,
			bind: yes(&c.Options.JSON.SplitStream), usage: unbuffered},
		{flag: "log-json-info-buffer-size", field: "logging.options.json.infoBufferSize", always: true,
			bind: value(&c.Options.JSON.InfoBufferSize), usage: unbuffered},
	}
}
