package config

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

// option is a flag: whether it has a place in a file, and in which.
type option struct {
	group group
	flag  string
	// field is where a file says the same, several in the order of precedence; empty: nowhere.
	field string
	// always says that the flag counts beside a --config as well.
	always     bool
	bind       func(set *pflag.FlagSet, name, usage string)
	usage      string
	deprecated string
}

// group is a heading of the help.
type group string

const (
	serving   group = "what it serves"
	files     group = "configuration"
	instead   group = "instead of running"
	plane     group = "data plane"
	nodePorts group = "node ports"
	pods      group = "pods"
	listeners group = "listeners"
	kernel    group = "kernel settings"
	apiServer group = "API server"
	logging   group = "logging"
	ipvs      group = "for mode ipvs"
	ebpf      group = "for mode ebpf"
	userspace group = "for mode userspace"
	obsolete  group = "accepted, without meaning here"
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

func ip(to *string) func(*pflag.FlagSet, string, string) {
	return value(stringValue[string]{to, "ip", checkIP})
}

func ipPort(to *string) func(*pflag.FlagSet, string, string) {
	return value(stringValue[string]{to, "ipport", checkIPPort})
}

// all are the options, in the order of the help.
func (f *Flags) all() (all []option) {
	for _, part := range [][]option{
		f.serving(), f.filesAndVerbs(), f.dataPlane(), f.nodePortsAndPods(), f.listeners(), f.kernel(),
		f.apiServer(), f.logging(), f.ipvs(), f.ebpf(), f.ebpfSizes(), f.userspace(), f.obsolete(),
		f.obsoleteLogging(),
	} {
		all = append(all, part...)
	}
	return all
}

func (f *Flags) serving() []option {
	own := &f.said.fairlead
	return []option{
		{group: serving, flag: "manifests", field: "manifests", always: true,
			bind: func(s *pflag.FlagSet, name, usage string) {
				s.StringArrayVar(&own.Manifests, name, own.Manifests, usage)
			},
			usage: "`file or directory` of manifests to serve instead of the API server's Services (repeatable)"},
		{group: serving, flag: "hostname-override", field: "hostnameOverride", always: true,
			bind: text(&f.said.hostname), usage: "name of this node's Node object (default: the hostname)"},
		{group: serving, flag: "node-ip", field: "nodeIPs", always: true, bind: texts(&own.NodeIPs),
			usage: "primary address of this node, one of each family (default: --bind-address, the Node object's, or " +
				"the first of the interfaces)"},
		{group: serving, flag: "bind-address", field: "bindAddress", bind: ip(&f.said.kubeProxy.BindAddress),
			usage: "primary address of this node, unless it is 0.0.0.0 or ::. Nothing binds to it, in spite of its name"},
		{group: serving, flag: "once", always: true, bind: yes(&f.Once), usage: "program the kernel, then exit"},
		{group: serving, flag: "feature-gates", field: "featureGates",
			bind: value(cliflag.NewMapStringBool(&f.said.kubeProxy.FeatureGates)),
			usage: "Kubernetes' feature gates. With a meaning here: " +
				strings.Join(meaningfulGates(), ", ")},
	}
}

func (f *Flags) filesAndVerbs() []option {
	return []option{
		{group: files, flag: "config", always: true, bind: text(&f.Config),
			usage: "`file` with a KubeProxyConfiguration. Flags that have a field in it are ignored then, but for " +
				"--hostname-override and those of logging"},
		{group: files, flag: "fairlead-config", always: true, bind: text(&f.FairleadConfig),
			usage: "`file` with a " + FairleadKind + "; flags go before it (default: " + fairleadFile +
				" beside --config, if it is there)"},
		{group: files, flag: "write-config-to", always: true, bind: text(&f.WriteConfigTo),
			usage: "write the KubeProxyConfiguration that results to this `file`, and exit"},
		{group: instead, flag: "cleanup", always: true, bind: yes(&f.Cleanup),
			usage: "remove every rule of kube-proxy and of Fairlead, and exit"},
		{group: instead, flag: "init-only", always: true, bind: yes(&f.InitOnly),
			usage: "do what needs root, and exit; CAP_NET_ADMIN is enough from then on"},
		{group: instead, flag: "version", always: true, bind: value(&f.Version),
			usage: "print the version, or with =raw all that is known of it, and exit; =vX.Y.Z is the version to report"},
	}
}

func (f *Flags) dataPlane() []option {
	c, own := &f.said.kubeProxy, &f.said.fairlead
	mode := stringValue[kubeproxy.ProxyMode]{&c.Mode, "ProxyMode", nil}
	const gathered = "where programming a change takes long, the next ones of its namespace are gathered " +
		"for 32 times as long, but not longer than this; 0: never (in a file: the default)"
	return []option{
		{group: plane, flag: "proxy-mode", field: "mode", bind: value(mode),
			usage: "iptables (which is what empty means), ipvs, nftables, ebpf, userspace, or auto, which chooses one of them"},
		{group: plane, flag: "masquerade-all", field: "iptables.masqueradeAll nftables.masqueradeAll",
			bind: yes(&f.said.masqueradeAll), usage: "replace the source address of every connection to a ClusterIP"},
		{group: plane, flag: "iptables-masquerade-bit", field: "iptables.masqueradeBit",
			bind: number(c.IPTables.MasqueradeBit),
			usage: "bit of the packet mark that remembers what is to be masqueraded, within 0 and 31; for every mode " +
				"but nftables"},
		{group: plane, flag: "iptables-min-sync-period", field: "iptables.minSyncPeriod nftables.minSyncPeriod",
			bind: span(&f.said.iptables.minSync), usage: gathered},
		{group: plane, flag: "ipvs-min-sync-period", field: "ipvs.minSyncPeriod", bind: span(&f.said.ipvs.minSync),
			usage: gathered + "; in mode ipvs"},
		{group: plane, flag: "audit-interval", field: "auditInterval", always: true, bind: span(&own.AuditInterval.Duration),
			usage: "time between two looks at whether the kernel still holds what it should"},
		{group: plane, flag: "take-over", field: "takeOver", always: true,
			bind: value(stringValue[TakeOver]{&own.TakeOver, "TakeOver", nil}),
			usage: "what becomes of rules that kube-proxy has left: Remove, as soon as Fairlead's own are in force, " +
				"or Keep"},
		{group: plane, flag: "iptables-backend", field: "iptablesBackend", always: true,
			bind: value(stringValue[IPTablesBackend]{&own.IPTablesBackend, "IPTablesBackend", nil}),
			usage: "which packet filter of the kernel holds the rules of mode iptables: legacy or nf_tables (default: the " +
				"one that kubelet, or else the machine's iptables, uses)"},
	}
}

func (f *Flags) nodePortsAndPods() []option {
	c := &f.said.kubeProxy
	local := stringValue[kubeproxy.LocalMode]{&c.DetectLocalMode, "LocalMode", nil}
	return []option{
		{group: nodePorts, flag: "nodeport-addresses", field: "nodePortAddresses", bind: texts(&c.NodePortAddresses),
			usage: "where NodePorts are open: CIDRs, primary, localhost, all (default: all in modes iptables and " +
				"ipvs, else primary)"},
		{group: nodePorts, flag: "iptables-localhost-nodeports", field: "iptables.localhostNodePorts",
			bind:  yes(c.IPTables.LocalhostNodePorts),
			usage: "open NodePorts on 127.0.0.1 too, in mode iptables"},
		{group: pods, flag: "detect-local-mode", field: "detectLocalMode", bind: value(local),
			usage: "how packets of pods are told from others: ClusterCIDR (which is what empty means), NodeCIDR, " +
				"BridgeInterface or InterfaceNamePrefix"},
		{group: pods, flag: "cluster-cidr", field: "clusterCIDR", bind: text(&c.ClusterCIDR),
			usage: "range of the pods' addresses, one of each family and a comma between them, for ClusterCIDR"},
		{group: pods, flag: "pod-bridge-interface", field: "detectLocal.bridgeInterface",
			bind: text(&c.DetectLocal.BridgeInterface), usage: "the bridge of the pods, for BridgeInterface"},
		{group: pods, flag: "pod-interface-name-prefix", field: "detectLocal.interfaceNamePrefix",
			bind:  text(&c.DetectLocal.InterfaceNamePrefix),
			usage: "how the interfaces of pods begin, for InterfaceNamePrefix"},
	}
}

func (f *Flags) listeners() []option {
	c := &f.said.kubeProxy
	return []option{
		{group: listeners, flag: "healthz-bind-address", field: "healthzBindAddress", bind: ipPort(&c.HealthzBindAddress),
			usage: "where /healthz, /livez and /readyz are; the port may be left out"},
		{group: listeners, flag: "metrics-bind-address", field: "metricsBindAddress", bind: ipPort(&c.MetricsBindAddress),
			usage: "where /metrics and other pages for operators are; the port may be left out"},
		{group: listeners, flag: "control-socket", field: "controlSocket", always: true,
			bind: text(&f.said.fairlead.ControlSocket), usage: "where dump, explain and others ask; empty: nowhere"},
		{group: listeners, flag: "bind-address-hard-fail", field: "bindAddressHardFail", bind: yes(&c.BindAddressHardFail),
			usage: "exit if one of the listeners cannot be opened"},
		{group: listeners, flag: "profiling", field: "enableProfiling", bind: yes(&c.EnableProfiling),
			usage: "serve /debug/pprof with the metrics"},
		{group: listeners, flag: "show-hidden-metrics-for-version", field: "showHiddenMetricsForVersion",
			bind:  text(&c.ShowHiddenMetricsForVersion),
			usage: "serve metrics that were deprecated in this `version` of Kubernetes, as 1.36; only the previous one counts"},
		{group: listeners, flag: "healthz-port", bind: number(&f.said.healthzPort),
			usage: "port of /healthz; 0: none", deprecated: "use --healthz-bind-address"},
		{group: listeners, flag: "metrics-port", bind: number(&f.said.metricsPort),
			usage: "port of /metrics; 0: none", deprecated: "use --metrics-bind-address"},
	}
}

func (f *Flags) kernel() []option {
	t, oom := &f.said.kubeProxy.Conntrack, f.said.kubeProxy.OOMScoreAdj
	return []option{
		{group: kernel, flag: "conntrack-max-per-core", field: "conntrack.maxPerCore", bind: number(t.MaxPerCore),
			usage: "connections to track per CPU; 0 leaves the limit as it is, whatever conntrack-min is"},
		{group: kernel, flag: "conntrack-min", field: "conntrack.min", bind: number(t.Min),
			usage: "connections to track at least, whatever the number of CPUs"},
		{group: kernel, flag: "conntrack-tcp-timeout-established", field: "conntrack.tcpEstablishedTimeout",
			bind: span(&t.TCPEstablishedTimeout.Duration), usage: "forget an idle TCP connection after this; 0: as it is"},
		{group: kernel, flag: "conntrack-tcp-timeout-close-wait", field: "conntrack.tcpCloseWaitTimeout",
			bind: span(&t.TCPCloseWaitTimeout.Duration), usage: "the same, where only one side has closed it"},
		{group: kernel, flag: "conntrack-tcp-be-liberal", field: "conntrack.tcpBeLiberal", bind: yes(&t.TCPBeLiberal),
			usage: "packets outside of a connection's window are valid (nf_conntrack_tcp_be_liberal)"},
		{group: kernel, flag: "conntrack-udp-timeout", field: "conntrack.udpTimeout", bind: span(&t.UDPTimeout.Duration),
			usage: "forget a UDP flow without answers after this; 0: as it is"},
		{group: kernel, flag: "conntrack-udp-timeout-stream", field: "conntrack.udpStreamTimeout",
			bind: span(&t.UDPStreamTimeout.Duration), usage: "the same, of one with answers"},
		{group: kernel, flag: "oom-score-adj", field: "oomScoreAdj", bind: number(oom),
			usage: "how willingly the kernel ends this process when memory is short, within -1000 and 1000"},
	}
}

func (f *Flags) apiServer() []option {
	c := &f.said.kubeProxy.ClientConnection
	return []option{
		{group: apiServer, flag: "kubeconfig", field: "clientConnection.kubeconfig", bind: text(&c.Kubeconfig),
			usage: "`file` that says where the API server is and how to log in (default: as a pod does)"},
		{group: apiServer, flag: "master", always: true, bind: text(&f.Master),
			usage: "`address` of the API server, instead of the one in the kubeconfig"},
		{group: apiServer, flag: "kube-api-content-type", field: "clientConnection.contentType", bind: text(&c.ContentType),
			usage: "content type of requests"},
		{group: apiServer, flag: "kube-api-qps", field: "clientConnection.qps",
			bind:  func(s *pflag.FlagSet, name, usage string) { s.Float32Var(&c.QPS, name, c.QPS, usage) },
			usage: "requests a second"},
		{group: apiServer, flag: "kube-api-burst", field: "clientConnection.burst", bind: number(&c.Burst),
			usage: "requests that may come at once"},
	}
}

func (f *Flags) logging() []option {
	c := &f.said.kubeProxy.Logging
	short := func(s *pflag.FlagSet, name, usage string) {
		s.VarP(logsapi.VerbosityLevelPflag(&c.Verbosity), name, "v", usage)
	}
	return []option{
		{group: logging, flag: "v", field: "logging.verbosity", always: true, bind: short,
			usage: "how much is logged: 0 what an operator must know, 2 what happens, 4 why"},
		{group: logging, flag: "logging-format", field: "logging.format", always: true, bind: text(&c.Format),
			usage: "text or json"},
	}
}

func (f *Flags) ipvs() []option {
	c, own := &f.said.kubeProxy.IPVS, &f.said.fairlead
	return []option{
		{group: ipvs, flag: "ipvs-address-mode", field: "ipvsAddressMode", always: true,
			bind: value(stringValue[IPVSAddressMode]{&own.IPVSAddressMode, "IPVSAddressMode", nil}),
			usage: "how the node takes packets to Service addresses for its own: cidr (a local route for each Service CIDR, " +
				"and for each address outside), route (a local route for each address) or dummy (each address on kube-ipvs0, " +
				"as with kube-proxy)"},
		{group: ipvs, flag: "ipvs-drain-timeout", field: "ipvsDrainTimeout", always: true,
			bind:  span(&own.IPVSDrainTimeout.Duration),
			usage: "how long a backend that is gone keeps its TCP and SCTP connections; 0: as long as they last"},
		{group: ipvs, flag: "ipvs-scheduler", field: "ipvs.scheduler", bind: text(&c.Scheduler),
			usage: "how a backend is chosen where a Service does not say it, by the kernel's name: rr (which is what empty " +
				"means), wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, fo, ovf or twos"},
		{group: ipvs, flag: "ipvs-exclude-cidrs", field: "ipvs.excludeCIDRs", bind: texts(&c.ExcludeCIDRs),
			usage: "addresses at which no virtual server of kube-proxy is removed"},
		{group: ipvs, flag: "ipvs-strict-arp", field: "ipvs.strictARP", bind: yes(&c.StrictARP),
			usage: "answer ARP only for addresses of the interface that is asked (arp_ignore 1, arp_announce 2)"},
		{group: ipvs, flag: "ipvs-tcp-timeout", field: "ipvs.tcpTimeout", bind: span(&c.TCPTimeout.Duration),
			usage: "forget an idle TCP connection after this; 0: as it is"},
		{group: ipvs, flag: "ipvs-tcpfin-timeout", field: "ipvs.tcpFinTimeout", bind: span(&c.TCPFinTimeout.Duration),
			usage: "the same, of one that is being closed"},
		{group: ipvs, flag: "ipvs-udp-timeout", field: "ipvs.udpTimeout", bind: span(&c.UDPTimeout.Duration),
			usage: "forget a UDP flow after this; 0: as it is"},
	}
}

func (f *Flags) ebpf() []option {
	own := &f.said.fairlead.EBPF
	return []option{
		{group: ebpf, flag: "cgroup-root", field: "ebpf.cgroupRoot", always: true, bind: text(&own.CgroupRoot),
			usage: "`directory` of the machine's cgroups of version 2, whose processes are served (default: where they are " +
				"mounted)"},
		{group: ebpf, flag: "bpf-root", field: "ebpf.bpfRoot", always: true, bind: text(&own.BPFRoot),
			usage: "`directory` where a file system of type bpf is mounted, which keeps programs when the process ends; it is " +
				"mounted if it is not"},
		{group: ebpf, flag: "ebpf-packets", field: "ebpf.packets", always: true,
			bind: value(stringValue[EBPFPackets]{&own.Packets, "EBPFPackets", nil}),
			usage: "who serves packets that come from no socket of the node: tc (programs at the node's devices, where the " +
				"kernel can do that) or nftables (that data plane, with connection tracking)"},
		{group: ebpf, flag: "ebpf-acceleration", field: "ebpf.acceleration", always: true,
			bind: value(stringValue[EBPFAcceleration]{&own.Acceleration, "EBPFAcceleration", nil}),
			usage: "whether drivers of network devices forward packets of known connections from outside that go there again " +
				"(XDP): off, best-effort (where the driver can) or native (an error says where it cannot)"},
		{group: ebpf, flag: "ebpf-forwarding", field: "ebpf.forwarding", always: true,
			bind: value(stringValue[EBPFForwarding]{&own.Forwarding, "EBPFForwarding", nil}),
			usage: "how clients from outside reach backends on other nodes: snat (the node hides them, and answers pass it) " +
				"or dsr (backends see them and their nodes answer; all nodes must say so, and the network must let IP " +
				"options pass)"},
		{group: ebpf, flag: "ebpf-sockets", field: "ebpf.sockets", always: true,
			bind: value(stringValue[EBPFSockets]{&own.Sockets, "EBPFSockets", nil}),
			usage: "whose connections are translated in connect(): of all, or of the node alone, so that packets of pods " +
				"still have the Service's address when they meet a sidecar (Istio) or a cache on the node (NodeLocal DNSCache)"},
		{group: ebpf, flag: "ebpf-abort-tcp", field: "ebpf.abortTCP", always: true, bind: yes(&own.AbortTCP),
			usage: "abort TCP connections that were translated in connect() when their backend has left its Service; those " +
				"of UDP sockets always are"},
	}
}

func (f *Flags) ebpfSizes() []option {
	own := &f.said.fairlead.EBPF.Sizes
	return []option{
		{group: ebpf, flag: "ebpf-size-affinities", field: "ebpf.sizes.affinities", always: true,
			bind: number(&own.Affinities),
			usage: "how many clients of Services with session affinity are remembered, in 112 bytes each, shared among " +
				"namespaces; 0: 65536"},
		{group: ebpf, flag: "ebpf-size-flows", field: "ebpf.sizes.flows", always: true, bind: number(&own.Flows),
			usage: "how many peers of UDP sockets that are not connected and ask several Services are remembered, two for " +
				"each, in 128 bytes, before those go that were silent for longest; answers of those that are forgotten seem to " +
				"come from the backend; 0: 65536"},
		{group: ebpf, flag: "ebpf-size-sockets", field: "ebpf.sizes.sockets", always: true, bind: number(&own.Sockets),
			usage: "how many sockets that are connected, or ask one Service by UDP, have 72 bytes each at hand, rounded up " +
				"to a power of two; for more than that connect() takes longer; 0: 65536"},
		{group: ebpf, flag: "ebpf-size-translations", field: "ebpf.sizes.translations", always: true,
			bind: number(&own.Translations),
			usage: "how many translations of packets are remembered, in 192 bytes each: two for each connection, four if its " +
				"client is hidden; a quarter for clients that have not gone on after an answer, the rest shared among " +
				"namespaces; 0: in a 128th of the machine's memory, 262144 to 2097152"},
		{group: ebpf, flag: "ebpf-size-services", field: "ebpf.sizes.services", always: true, bind: number(&own.Services),
			usage: "how many Services, of one port and one backend each, tables have room for from the start, in some 350 " +
				"bytes each; 0: for half as much again as there is. Tables that are full are replaced by larger ones"},
	}
}

func (f *Flags) userspace() []option {
	own := &f.said.fairlead.Userspace
	const bound = "; 0: a%s of the files that the process may open, %s at most"
	return []option{
		{group: userspace, flag: "userspace-redirect", field: "userspace.redirect", always: true,
			bind: value(stringValue[UserspaceRedirect]{&own.Redirect, "UserspaceRedirect", nil}),
			usage: "how packets come to the process: auto (the first of the others that the kernel has), tproxy, nat (while " +
				"there is no process, clients are refused), iptables (endpoints see the process as their client, too), or " +
				"listen (without rules and rights, on addresses of the machine only, likewise)"},
		{group: userspace, flag: "userspace-dial-timeout", field: "userspace.dialTimeout", always: true,
			bind: span(&own.DialTimeout.Duration),
			usage: "how long one backend is waited for; an eighth of that if it is the first of several, and twice as long " +
				"for each further one"},
		{group: userspace, flag: "userspace-dials", field: "userspace.dials", always: true, bind: number(&own.Dials),
			usage: "how many backends are tried for one connection before its client is told that there is none"},
		{group: userspace, flag: "userspace-idle-timeout", field: "userspace.idleTimeout", always: true,
			bind: span(&own.IdleTimeout.Duration), usage: "end a TCP connection over which nothing has passed for this long"},
		{group: userspace, flag: "userspace-half-closed-timeout", field: "userspace.halfClosedTimeout", always: true,
			bind: span(&own.HalfClosedTimeout.Duration), usage: "the same, where one side has ended its direction"},
		{group: userspace, flag: "userspace-flow-timeout", field: "userspace.flowTimeout", always: true,
			bind: span(&own.FlowTimeout.Duration), usage: "forget a UDP flow without answers after this"},
		{group: userspace, flag: "userspace-stream-timeout", field: "userspace.streamTimeout", always: true,
			bind: span(&own.StreamTimeout.Duration), usage: "the same, of one with answers"},
		{group: userspace, flag: "userspace-max-connections", field: "userspace.maxConnections", always: true,
			bind: number(&own.MaxConnections),
			usage: "how many TCP connections may be open, of two files each, if there are files for so many; " +
				"those beyond their client's share are reset" +
				fmt.Sprintf(bound, " quarter", "65536")},
		{group: userspace, flag: "userspace-max-flows", field: "userspace.maxFlows", always: true,
			bind: number(&own.MaxFlows),
			usage: "how many UDP flows there may be, of up to two files each, if there are files for so many; " +
				"those beyond their client's share end older ones" +
				fmt.Sprintf(bound, "n eighth", "32768")},
	}
}

// obsolete are flags that are accepted, so that kube-proxy's command line is, and do nothing.
func (f *Flags) obsolete() []option {
	c, win := &f.said.kubeProxy, &f.said.kubeProxy.Winkernel
	const audited = "audits do that, see auditInterval"
	const windows = "for Windows"
	return []option{
		{group: obsolete, flag: "iptables-sync-period", field: "iptables.syncPeriod nftables.syncPeriod",
			bind: span(&f.said.iptables.sync), usage: audited},
		{group: obsolete, flag: "ipvs-sync-period", field: "ipvs.syncPeriod", bind: span(&f.said.ipvs.sync), usage: audited},
		{group: obsolete, flag: "config-sync-period", field: "configSyncPeriod", bind: span(&c.ConfigSyncPeriod.Duration),
			usage: "objects are watched"},
		{group: obsolete, flag: "windows-service", field: "windowsRunAsService", bind: yes(&c.WindowsRunAsService),
			usage: windows},
		{group: obsolete, flag: "source-vip", field: "winkernel.sourceVip", bind: text(&win.SourceVip), usage: windows},
		{group: obsolete, flag: "network-name", field: "winkernel.networkName", bind: text(&win.NetworkName), usage: windows},
		{group: obsolete, flag: "enable-dsr", field: "winkernel.enableDSR", bind: yes(&win.EnableDSR), usage: windows},
		{group: obsolete, flag: "root-hnsendpoint-name", field: "winkernel.rootHnsEndpointName",
			bind: text(&win.RootHnsEndpointName), usage: windows},
		{group: obsolete, flag: "forward-healthcheck-vip", field: "winkernel.forwardHealthCheckVip",
			bind: yes(&win.ForwardHealthCheckVip), usage: windows},
	}
}

func (f *Flags) obsoleteLogging() []option {
	c := &f.said.kubeProxy.Logging
	const unbuffered = "logs are one stream without a buffer"
	return []option{
		{group: obsolete, flag: "vmodule", field: "logging.vmodule", always: true,
			bind: value(logsapi.VModuleConfigurationPflag(&c.VModule)), usage: "nothing is logged by file"},
		{group: obsolete, flag: "log-flush-frequency", field: "logging.flushFrequency", always: true,
			bind: span(&c.FlushFrequency.Duration.Duration), usage: unbuffered},
		{group: obsolete, flag: "log-text-split-stream", field: "logging.options.text.splitStream", always: true,
			bind: yes(&c.Options.Text.SplitStream), usage: unbuffered},
		{group: obsolete, flag: "log-text-info-buffer-size", field: "logging.options.text.infoBufferSize", always: true,
			bind: value(&c.Options.Text.InfoBufferSize), usage: unbuffered},
		{group: obsolete, flag: "log-json-split-stream", field: "logging.options.json.splitStream", always: true,
			bind: yes(&c.Options.JSON.SplitStream), usage: unbuffered},
		{group: obsolete, flag: "log-json-info-buffer-size", field: "logging.options.json.infoBufferSize", always: true,
			bind: value(&c.Options.JSON.InfoBufferSize), usage: unbuffered},
	}
}
