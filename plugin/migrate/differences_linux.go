package migrate

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/service"
)

// table has a difference a line: severity, modes from and to, subject, how that changes, and what to do, if anything.
// A subject is a setting, field, annotation or object. Differences of packets are in docs/differences.md.
//
//go:embed differences.txt
var table string

// difference is what the proxy that serves does otherwise than Fairlead in the proposed mode.
type difference struct {
	from, to string // modes: "iptables, ipvs", "all but ipvs", or "all"
	Finding         // without Objects
}

// differences reads table.
func differences() (all []difference) {
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSpace(line)+" | ", " | ")
		all = append(all, difference{cells[1], cells[2], Finding{
			Severity: Severity(cells[0]), Subject: cells[3], Text: cells[4], Do: cells[5],
		}})
	}
	return all
}

// among reports whether a mode is one of those in a cell of table.
func among(cell, mode string) bool {
	modes, others := strings.CutPrefix(cell, "all but ")
	return cell == "all" || slices.Contains(strings.Split(modes, ", "), mode) != others
}

// objects are those on this node that differences are about, by subject. A subject that is not there is no difference.
type objects map[string][]string

// add notes what a subject is about, if it is, and each object once.
func (o objects) add(subject string, is bool, names ...string) {
	for _, name := range names {
		if n := len(o[subject]); is && (n == 0 || o[subject][n-1] != name) {
			o[subject] = append(o[subject], name)
		}
	}
}

// objects finds them.
func (s *seen) objects() objects {
	o := objects{ // of every node
		"firewall": nil, "unused ports and addresses": nil, "metrics `kubeproxy_iptables_*`": nil, "connections": nil,
	}
	o.add("kernel", before(s.Kernel, "5.10") || s.To != "ebpf" && before(s.Kernel, "5.13"), s.Kernel)
	o.add("configuration", true, s.invalid...)
	o.add("kube-proxy-replacement", s.ciliumReplaces(), "ConfigMap "+ciliumConfig)
	o.add("kube-proxy-replacement", s.Mode == "cilium" && !s.ciliumReplaces(), s.By...)
	for _, name := range []string{istioConfig, nodeCacheConfig} {
		o.add("sidecars, node caches", s.maps[name] != nil, "ConfigMap "+name)
	}
	o.add("rules of others", true, s.foreign...)
	if s.config != nil {
		o.add("other settings", true, s.config.Warnings...)
		o.addSettings(s.config)
	}
	for _, name := range slices.Sorted(maps.Keys(s.schedulers)) {
		o.add(ofScheduler(name), true, fmt.Sprintf("virtual servers with %s: %d", name, s.schedulers[name]))
	}
	for _, l := range s.leftovers {
		subject, text := "rules of kube-proxy", l.String()
		switch {
		case l.Backend == "ipvs":
			subject = "virtual servers"
		case l.Backend == "link":
			subject = "kube-ipvs0"
		case l.Stays != "" && strings.Contains(text, "KUBE-FORWARD"):
			subject = "KUBE-FORWARD"
		case l.Stays != "":
			subject = "chains of kube-proxy that others use"
		}
		o.add(subject, true, text)
	}
	for i := range s.services {
		s.addService(o, &s.services[i])
	}
	return o
}

// addSettings adds those that are not as usual to the subjects that name them.
func (o objects) addSettings(c *config.Config) {
	usual, err := daemon.NewFlags().Load()
	if err != nil {
		return // which no flags at all do not cause
	}
	plain := strings.NewReplacer(`"`, "", "[", "", "]", "")
	for _, change := range config.Compare(usual, c) {
		section, name, _ := strings.Cut(change.Field, ".")
		for _, d := range differences() {
			of, names, is := strings.Cut(d.Subject, ".")
			is = is && of == section && (names == "*" || slices.Contains(strings.Split(names, ", "), name))
			o.add(d.Subject, is, change.Field+": "+plain.Replace(change.New))
		}
	}
	scheduler := c.KubeProxy.IPVS.Scheduler
	o.add(ofScheduler(scheduler), true, fmt.Sprintf("ipvs.scheduler: %q", scheduler))
}

// ofScheduler is the subject that a scheduler of IPVS belongs to.
func ofScheduler(name string) string {
	switch name {
	case "", "rr", "wrr", "twos":
		return "ipvs.scheduler rr, wrr"
	case "sh", "dh", "mh":
		return "ipvs.scheduler sh, dh, mh"
	case "lc", "wlc", "sed", "nq", "lblc", "lblcr", "fo", "ovf":
		return "ipvs.scheduler lc, wlc, sed, nq, lblc, lblcr, fo, ovf"
	}
	return ""
}

func (s *seen) addService(to objects, o *corev1.Service) {
	name := "Service " + o.Namespace + "/" + o.Name
	to.add("sessionAffinity", o.Spec.SessionAffinity == corev1.ServiceAffinityClientIP, name)
	to.add("externalIPs", len(o.Spec.ExternalIPs) > 0, name)
	to.add("loadBalancerSourceRanges", len(o.Spec.LoadBalancerSourceRanges) > 0, name)
	to.add("healthCheckNodePort", o.Spec.HealthCheckNodePort != 0, name)
	for _, p := range o.Spec.Ports {
		to.add("ports of "+string(p.Protocol), true, name)
		to.add("source ports", p.NodePort != 0 && o.Spec.ExternalTrafficPolicy != "Local", name)
		to.add("nodePortAddresses", p.NodePort != 0 && s.usualNodePorts(), name)
	}
	for annotation, value := range o.Annotations {
		s.addAnnotation(to, name, annotation, value)
	}
	_, problems := service.FromService(o)
	for _, p := range problems {
		to.add("invalid objects", true, p.Error())
	}
}

// usualNodePorts reports whether NodePorts are open on the addresses that an unset nodePortAddresses means.
func (s *seen) usualNodePorts() bool {
	var usual []string
	if s.Mode == "nftables" {
		usual = []string{"primary"}
	}
	return s.config != nil && slices.Equal(s.config.KubeProxy.NodePortAddresses, usual)
}

// addAnnotation has a Service be what an annotation is about. Most annotations are subjects themselves.
func (s *seen) addAnnotation(to objects, name, annotation, value string) {
	const scheduler, algorithm = "fairlead.dev/scheduler", "service.cilium.io/lb-algorithm"
	strictARP := s.config != nil && s.config.KubeProxy.IPVS.StrictARP && s.config.KubeProxy.Mode == config.ModeIPVS
	switch {
	case annotation == scheduler:
		to.add(scheduler+", "+algorithm, true, name)
		to.add(scheduler, value != "mh" && value != "twos" && value != "least-of-two", name)
	case annotation == algorithm:
		to.add(scheduler+", "+algorithm, value == "maglev" || value == "least-of-two", name)
	case annotation == "service.cilium.io/src-ranges-policy":
		to.add(annotation, value == "deny", name)
	case strings.HasPrefix(annotation, "service.cilium.io/"):
		to.add("other `service.cilium.io/…`", true, name)
	case strings.HasPrefix(annotation, "metallb."):
		to.add("MetalLB", !strictARP, name)
	default: // others than annotations have no slash
		to.add(annotation, strings.Contains(annotation, "/"), name)
	}
}
