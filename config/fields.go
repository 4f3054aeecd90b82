package config

import (
	"slices"
	"strings"
)

// Field is a setting of one of the files, and what it means here.
type Field struct {
	Kind    string // of the file
	Path    string
	Flag    string // that says the same; empty: there is none
	Group   string // under which help shows the flag
	Default string // as JSON; empty: nothing
	Meaning string
	Takes   Class // what a change takes
}

// Fields are the settings of both files, in the order of the help.
func Fields() (fields []Field) {
	for _, o := range NewFlags().options {
		for _, path := range strings.Fields(o.field) {
			kind := KubeProxyKind
			if slices.Contains(fairleadPaths(), path) {
				kind = FairleadKind
			}
			usage := strings.ReplaceAll(o.usage, "`", "")
			fields = append(fields, Field{Kind: kind, Path: path, Flag: o.flag, Group: string(o.group), Meaning: usage})
		}
	}
	fields = append(fields, fieldsWithoutFlags()...)
	plain := &Config{Fairlead: defaultFairlead()}
	setDefaults(&plain.KubeProxy)
	defaults := flatten(plain)
	for i := range fields {
		f := &fields[i]
		f.Default = defaults[f.Path]
		switch f.Takes = class(f.Path); {
		case f.Group == string(obsolete):
			f.Takes = NoEffect
		case f.Path == "featureGates":
			f.Takes = OnTable
			f.Meaning += ". The first changes rows; the last two take effect in place"
		}
	}
	return fields
}

func fieldsWithoutFlags() []Field {
	field := func(path string, g group, meaning string) Field {
		return Field{Kind: KubeProxyKind, Path: path, Group: string(g), Meaning: meaning}
	}
	return []Field{
		field("clientConnection.acceptContentTypes", apiServer, "content types of answers, as an Accept header"),
		field("nftables.masqueradeBit", plane, "bit of the packet mark that requests source NAT, 0 to 31; in mode nftables"),
		field("logging.vmodule[].filePattern", obsolete, "name of a source file: nothing is logged by file"),
		field("logging.vmodule[].verbosity", obsolete, "how much that file logs"),
		field("portRange", obsolete, "unused, by kube-proxy too"),
	}
}

// fairleadPaths are the fields of Fairlead's own file.
func fairleadPaths() []string {
	return []string{
		"manifests", "nodeIPs", "controlSocket", "healthCheckMaxAge", "auditInterval", "metricsServices", "counters",
		"flowtable",
		"takeOver",
		"backendHealth", "ejection.failures", "ejection.floorPercent", "ejection.time", "ejection.maxTime",
		"ejection.slowStart", "resetOrphans", "readinessGate",
		"iptablesBackend", "ipvsAddressMode", "ipvsDrainTimeout", "ebpf.cgroupRoot", "ebpf.bpfRoot", "ebpf.packets",
		"ebpf.acceleration", "ebpf.forwarding", "ebpf.sockets", "ebpf.abortTCP",
		"ebpf.sizes.affinities", "ebpf.sizes.flows", "ebpf.sizes.sockets", "ebpf.sizes.translations",
		"ebpf.sizes.services",
		"userspace.redirect", "userspace.dialTimeout", "userspace.dials", "userspace.idleTimeout",
		"userspace.halfClosedTimeout",
		"userspace.udpTimeout", "userspace.udpStreamTimeout", "userspace.maxConnections", "userspace.maxFlows",
	}
}
