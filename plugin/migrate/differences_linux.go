package migrate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/service"
)

// Severity says what a difference means to a user.
type Severity string

// The severities.
const (
	Blocks  Severity = "blocks"  // Services would not work
	Changes Severity = "changes" // users may notice
	Note    Severity = "note"    // good to know
)

// difference is what the proxy that serves does otherwise than Fairlead in the proposed mode.
type difference struct {
	severity Severity
	from, to string // modes, separated by blanks; a "!" before them: all others; empty: all
	subject  string // a setting, field, annotation or object
	text     string // how the subject changes
	do       string // empty: nothing
	// objects are those on this node that it is about; none: there is no such difference. Nil: it is about the node.
	objects func(*seen) []string
}

// is reports whether it holds between two modes.
func (d *difference) is(from, to string) bool {
	return amongModes(d.from, from) && amongModes(d.to, to)
}

func amongModes(modes, mode string) bool {
	others, not := strings.CutPrefix(modes, "!")
	return modes == "" || slices.Contains(strings.Fields(others), mode) != not
}

const netfilter = "iptables nftables"

// differences are all that are known. Those of kube-proxy's packets are in docs/differences.md.
func differences() []difference {
	return slices.Concat(blocking(), ofSettings(), ofIPVS(), ofNode(), ofServices(), ofOtherProxies())
}

func blocking() []difference {
	return []difference{
		{Blocks, "", "nftables ipvs", "kernel", "older than Linux 5.13, which this mode needs",
			"take `iptables`, or from Linux 5.10 `ebpf`", olderThan("5.13")},
		{Blocks, "", "ebpf", "kernel", "older than Linux 5.10, which this mode needs", "take `iptables`", olderThan("5.10")},
		{Blocks, "", "", "configuration", "Fairlead would refuse it", "correct it",
			func(s *seen) []string { return s.invalid }},
		{Blocks, "cilium", "", "kube-proxy-replacement", "Cilium goes on serving, before Fairlead",
			"drain the node, set `kubeProxyReplacement: false`", (*seen).ciliumReplacement},
		{Blocks, "", "", "service.cilium.io/src-ranges-policy", "`deny` has no equivalent: the ranges would let clients in",
			"list the ranges that may come in", annotated("service.cilium.io/src-ranges-policy", "deny")},
	}
}

func ofSettings() []difference {
	return []difference{
		{Changes, "iptables ipvs", "nftables ebpf userspace", "nodePortAddresses",
			"unset, it means all addresses now, and primary ones then; on 127.0.0.1 nothing answers",
			"set `nodePortAddresses: [all]`, or `[primary, localhost]`", nodePorts()},
		{Changes, "nftables", "iptables ipvs", "nodePortAddresses", "unset, it means primary addresses now, and all then",
			"set `nodePortAddresses: [primary]`", nodePorts("primary")},
		{Changes, "!nftables", "nftables", "iptables.masqueradeBit, masqueradeAll", "not read", "set them in `nftables`",
			settings("iptables", func(c *kubeproxy.KubeProxyConfiguration) []any {
				bit := differs(c.IPTables.MasqueradeBit, usualBit)
				return []any{"masqueradeBit", bit, "masqueradeAll", c.IPTables.MasqueradeAll}
			})},
		{Changes, "nftables", "!nftables", "nftables.masqueradeBit, masqueradeAll", "not read", "set them in `iptables`",
			settings("nftables", func(c *kubeproxy.KubeProxyConfiguration) []any {
				bit := differs(c.NFTables.MasqueradeBit, usualBit)
				return []any{"masqueradeBit", bit, "masqueradeAll", c.NFTables.MasqueradeAll}
			})},
		{Note, "", "ebpf", "conntrack.*", "without effect on connections that sockets or packet programs translate", "",
			settings("conntrack", func(c *kubeproxy.KubeProxyConfiguration) []any {
				return []any{"maxPerCore", differs(c.Conntrack.MaxPerCore, usualPerCore)}
			})},
		{Note, "", "", "other settings", "accepted, and without meaning", "",
			func(s *seen) []string { return s.warnings }},
	}
}

// The defaults of kube-proxy's configuration.
const (
	usualBit     = 14
	usualPerCore = 32 << 10
)

func ofIPVS() []difference {
	return []difference{
		{Note, "ipvs", "!ipvs", "ipvs.scheduler rr, wrr", "random by weight", "", scheduledBy("", "rr", "wrr", "twos")},
		{Changes, "ipvs", "!ipvs", "ipvs.scheduler lc, wlc, sed, nq, lblc, lblcr, fo, ovf",
			"random by weight, however busy a backend is", "stay with `ipvs` where connections are few and long, or in `ebpf` " +
				"annotate `fairlead.dev/scheduler: twos`",
			scheduledBy("lc", "wlc", "sed", "nq", "lblc", "lblcr", "fo", "ovf")},
		{Changes, "ipvs", "!ipvs", "ipvs.scheduler sh, dh, mh", "random by weight: a client meets another backend each time",
			"set `sessionAffinity: ClientIP`, or in `ebpf` annotate `fairlead.dev/scheduler: mh`",
			scheduledBy("sh", "dh", "mh")},
		{Note, "ipvs", "!ipvs", "ipvs.strictARP", "not needed: no interface has the addresses", "",
			settings("ipvs", func(c *kubeproxy.KubeProxyConfiguration) []any { return []any{"strictARP", c.IPVS.StrictARP} })},
		{Note, "ipvs", "", "ipvs.excludeCIDRs", "virtual servers there stay", "keep the setting",
			settings("ipvs", func(c *kubeproxy.KubeProxyConfiguration) []any {
				return []any{"excludeCIDRs", strings.Join(c.IPVS.ExcludeCIDRs, ",")}
			})},
		{Changes, "ipvs", "!ipvs", "ipvs.tcpTimeout, tcpFinTimeout, udpTimeout", "those of connection tracking hold",
			"set `conntrack.tcpEstablishedTimeout`, `tcpCloseWaitTimeout`, `udpStreamTimeout`",
			settings("ipvs", func(c *kubeproxy.KubeProxyConfiguration) []any {
				return []any{"tcpTimeout", c.IPVS.TCPTimeout.Duration, "tcpFinTimeout", c.IPVS.TCPFinTimeout.Duration,
					"udpTimeout", c.IPVS.UDPTimeout.Duration}
			})},
		{Note, "ipvs", "", "virtual servers", "take no new connections; open ones have 24 hours, and live on in mode `ipvs`",
			"", left(leftover.ofIPVS)},
		{Note, "ipvs", "", "kube-ipvs0", "goes: programs can no longer bind to Service addresses; a `ping` is refused by " +
			"`ipvs`, and not answered by others", "`ipvsAddressMode: dummy` in mode `ipvs`; needed for Calico's policies",
			left(leftover.isLink)},
		{Changes, "ipvs", "!ipvs", "firewall", "packets to Services pass FORWARD, no longer INPUT", "move such rules", nil},
		{Changes, netfilter, "ipvs", "firewall", "packets to Services pass INPUT, no longer FORWARD", "move such rules", nil},
	}
}

func ofNode() []difference {
	return []difference{
		{Note, "", "", "rules of kube-proxy", "removed once Fairlead's are in force", "", left(leftover.goes)},
		{Changes, "", "!iptables", "KUBE-FORWARD", "stays: FORWARD drops packets, and the mode cannot accept them",
			"have the CNI plug-in or your rules accept packets from and to pods", left(leftover.forwards)},
		{Changes, "", "", "chains of kube-proxy that others use", "stay", "delete the other rule if it is not needed",
			left(leftover.shared)},
		{Note, "iptables", "", "unused ports and addresses", "ports of a ClusterIP are refused, Service addresses dropped; " +
			"until now their packets leave the node", "", nil},
		{Note, "iptables", "", "metrics `kubeproxy_iptables_*`", "end", "use Fairlead's", nil},
		{Changes, "", "ebpf", "sidecars, node caches", "see the backend, no longer the Service address",
			"set `ebpf.sockets: node`", configMaps("istio-system/istio", "kube-system/node-local-dns")},
		{Changes, "", "userspace", "connections", "end with the process", "take another mode", nil},
	}
}

func ofServices() []difference {
	return []difference{
		{Note, "", "", "sessionAffinity", "clients choose anew, once", "", services(hasAffinity)},
		{Note, "", "ebpf", "sessionAffinity", "a pod is one client, whatever its addresses", "", services(hasAffinity)},
		{Note, "", "", "externalIPs", "the same; of two Services with one address the older has it", "",
			services(func(o *corev1.Service) bool { return len(o.Spec.ExternalIPs) > 0 })},
		{Note, "", "", "loadBalancerSourceRanges", "the same; without endpoints, others are dropped, not refused", "",
			services(func(o *corev1.Service) bool { return len(o.Spec.LoadBalancerSourceRanges) > 0 })},
		{Note, "", "", "healthCheckNodePort", "the same; endpoints without a port of the Service do not count", "",
			services(func(o *corev1.Service) bool { return o.Spec.HealthCheckNodePort != 0 })},
		{Note, "", "", "ports of UDP", "flows move when hints or policies exclude their endpoint", "",
			ofProtocol(corev1.ProtocolUDP)},
		{Note, "", "ebpf", "ports of SCTP", "served by rules of nftables", "", ofProtocol(corev1.ProtocolSCTP)},
		{Changes, "", "", "invalid objects", "left out, and reported", "correct them", (*seen).problems},
		{Changes, "", "ipvs", "MetalLB", "without `ipvs.strictARP` the node answers ARP for its addresses",
			"set `ipvs.strictARP: true`", (*seen).answersForMetalLB},
	}
}

// ofOtherProxies are about annotations of other proxies, whichever serves now.
func ofOtherProxies() []difference {
	const policy = "set `internalTrafficPolicy` and `externalTrafficPolicy: Local`"
	cilium := "service.cilium.io/"
	return []difference{
		{Changes, "", netfilter, "fairlead.dev/scheduler, service.cilium.io/lb-algorithm", "random by weight",
			"take `ipvs`, or `ebpf` for `mh` and `twos`", annotated("fairlead.dev/scheduler", "",
				cilium+"lb-algorithm", "maglev", cilium+"lb-algorithm", "least-of-two")},
		{Changes, "", "ebpf", "fairlead.dev/scheduler", "random by weight, but for `mh` and `twos`",
			"take `ipvs`, or one of these", services(func(o *corev1.Service) bool {
				own, is := o.Annotations["fairlead.dev/scheduler"]
				return is && !slices.Contains([]string{"mh", "twos", "least-of-two"}, own)
			})},
		{Changes, "", "!ipvs", "kube-router.io/service.scheduler", "random by weight",
			"take `ipvs`, with `fairlead.dev/scheduler`",
			annotated("kube-router.io/service.scheduler", "")},
		{Changes, "", "ipvs", "kube-router.io/service.scheduler", "not read", "annotate `fairlead.dev/scheduler`",
			annotated("kube-router.io/service.scheduler", "")},
		{Changes, "", "", "kube-router.io/service.local", "not read", policy, annotated("kube-router.io/service.local", "")},
		{Changes, "", "", "kube-router.io/service.dsr", "answers pass the node", "`ebpf.forwarding: dsr`, for all Services",
			annotated("kube-router.io/service.dsr", "")},
		{Changes, "", "", "lb.projectcalico.org/external-traffic-strategy", "not read",
			"annotate `fairlead.dev/scheduler: mh`", annotated("lb.projectcalico.org/external-traffic-strategy", "")},
		{Changes, "", "", "projectcalico.org/natExcludeService", "not read",
			"label `service.kubernetes.io/service-proxy-name`", annotated("projectcalico.org/natExcludeService", "")},
		{Changes, "", "", "other `service.cilium.io/…`", "not read", "",
			annotated(cilium+"forwarding-mode", "", cilium+"node", "", cilium+"node-selector", "", cilium+"type", "",
				cilium+"proxy-delegation", "", cilium+"lb-l7", "", cilium+"global", "", cilium+"shared", "",
				cilium+"affinity", "")},
	}
}

// The functions below make the objects of a difference.

func olderThan(release string) func(*seen) []string {
	return func(s *seen) []string {
		if before(s.Kernel, release) {
			return []string{s.Kernel}
		}
		return nil
	}
}

// settings are fields of a section of kube-proxy's configuration that are not zero; of tells names and values in turn.
func settings(section string, of func(*kubeproxy.KubeProxyConfiguration) []any) func(*seen) []string {
	return func(s *seen) (all []string) {
		if s.config == nil {
			return nil
		}
		for field := range slices.Chunk(of(&s.config.KubeProxy), 2) {
			if value := fmt.Sprint(field[1]); !slices.Contains([]string{"", "0", "0s", "false", "<nil>"}, value) {
				all = append(all, fmt.Sprintf("%s.%s: %s", section, field[0], value))
			}
		}
		return all
	}
}

// differs is the value of a field that does not have its usual one, or nil.
func differs(field *int32, usual int32) any {
	if field == nil || *field == usual {
		return nil
	}
	return *field
}

// scheduledBy are the setting and the kernel's virtual servers of some schedulers.
func scheduledBy(schedulers ...string) func(*seen) []string {
	return func(s *seen) (all []string) {
		if s.config != nil && slices.Contains(schedulers, s.config.KubeProxy.IPVS.Scheduler) {
			all = append(all, fmt.Sprintf("ipvs.scheduler: %q", s.config.KubeProxy.IPVS.Scheduler))
		}
		for _, name := range slices.Sorted(maps.Keys(s.schedulers)) {
			if slices.Contains(schedulers, name) {
				all = append(all, fmt.Sprintf("virtual servers with %s: %d", name, s.schedulers[name]))
			}
		}
		return all
	}
}

// left are objects in the kernel that a condition holds for.
func left(is func(leftover) bool) func(*seen) []string {
	return func(s *seen) (all []string) {
		for _, l := range s.leftovers {
			if is(l) {
				all = append(all, l.text)
			}
		}
		return all
	}
}

func (l leftover) ofIPVS() bool   { return l.backend == "ipvs" }
func (l leftover) isLink() bool   { return l.backend == "link" }
func (l leftover) goes() bool     { return !l.stays && !l.ofIPVS() && !l.isLink() }
func (l leftover) forwards() bool { return l.stays && strings.Contains(l.text, "KUBE-FORWARD") }
func (l leftover) shared() bool   { return l.stays && !l.forwards() }

func configMaps(names ...string) func(*seen) []string {
	return func(s *seen) (all []string) {
		for _, name := range names {
			if s.maps[name] != nil {
				all = append(all, "ConfigMap "+name)
			}
		}
		return all
	}
}

func (s *seen) ciliumReplacement() []string {
	m := s.maps[ciliumConfig]
	if m == nil || !slices.Contains([]string{"true", "strict", "partial"}, m.Data[ciliumReplaces]) {
		return nil
	}
	return []string{"ConfigMap " + ciliumConfig}
}

// services are those that a condition holds for.
func services(is func(*corev1.Service) bool) func(*seen) []string {
	return func(s *seen) (all []string) {
		for i := range s.services {
			if o := &s.services[i]; is(o) {
				all = append(all, "Service "+o.Namespace+"/"+o.Name)
			}
		}
		return all
	}
}

func ofProtocol(p corev1.Protocol) func(*seen) []string {
	return services(func(o *corev1.Service) bool {
		return slices.ContainsFunc(o.Spec.Ports, func(port corev1.ServicePort) bool { return port.Protocol == p })
	})
}

// annotated are Services with one of some annotations: names, each with a value; empty: any.
func annotated(pairs ...string) func(*seen) []string {
	return services(func(o *corev1.Service) bool {
		for pair := range slices.Chunk(pairs, 2) {
			if value, ok := o.Annotations[pair[0]]; ok && (pair[1] == "" || value == pair[1]) {
				return true
			}
		}
		return false
	})
}

func hasAffinity(o *corev1.Service) bool {
	return o.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
}

func hasNodePort(o *corev1.Service) bool {
	return slices.ContainsFunc(o.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort != 0 })
}

// nodePorts are the Services with NodePorts, if these are open on such addresses.
func nodePorts(on ...string) func(*seen) []string {
	return func(s *seen) []string {
		if s.config == nil || !slices.Equal(s.config.KubeProxy.NodePortAddresses, on) {
			return nil
		}
		return services(hasNodePort)(s)
	}
}

func (s *seen) answersForMetalLB() []string {
	if s.config != nil && s.config.KubeProxy.IPVS.StrictARP && s.config.KubeProxy.Mode == config.ModeIPVS {
		return nil
	}
	return services(func(o *corev1.Service) bool {
		return slices.ContainsFunc(slices.Collect(maps.Keys(o.Annotations)), func(name string) bool {
			return strings.HasPrefix(name, "metallb.")
		})
	})(s)
}

// problems are what is wrong in Services.
func (s *seen) problems() (all []string) {
	for i := range s.services {
		_, problems := service.FromService(&s.services[i])
		for _, p := range problems {
			all = append(all, p.Error())
		}
	}
	return all
}
