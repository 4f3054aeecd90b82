package config

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// Class says what it takes to bring a changed setting into force.
type Class int

// The classes, from the least to the most.
const (
	// NoEffect: nothing, as the setting has no meaning here, or not in this mode.
	NoEffect Class = iota
	// AtStart: another process, as the setting is looked at only when one starts.
	AtStart
	// InPlace: something beside the engine's rows is set anew: listeners, the log level, kernel settings.
	InPlace
	// OnTable: the engine computes its rows anew; connections live on.
	OnTable
	// Rebuild: the engine, its sources or its plane are made anew, in this process.
	Rebuild
)

// Change is a setting that differs between two Configs.
type Change struct {
	Field    string // its path in the file
	Old, New string // as JSON; empty: not set
	Class    Class
}

// Changes are sorted by their fields.
type Changes []Change

// Has reports whether a field that begins with one of the paths has changed, and with an effect.
func (c Changes) Has(paths ...string) bool {
	return slices.ContainsFunc(c, func(change Change) bool {
		return change.Class != NoEffect && matches(change.Field, paths)
	})
}

// Compare lists what differs between two Configs that Load has made.
func Compare(before, after *Config) (changes Changes) {
	was, is := flatten(before), flatten(after)
	all := maps.Clone(was)
	maps.Copy(all, is)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		if was[path] == is[path] {
			continue
		}
		c := Change{Field: path, Old: was[path], New: is[path], Class: class(path)}
		if after.reason(path) != "" || !used(before.KubeProxy.Mode, path) && !used(after.KubeProxy.Mode, path) {
			c.Class = NoEffect
		}
		changes = append(changes, c)
	}
	return changes
}

// class knows what a change of a field takes, if the field has an effect at all.
func class(path string) Class {
	switch {
	case matches(path, []string{
		"nodePortAddresses", "iptables.localhostNodePorts", "detectLocalMode", "detectLocal", "clusterCIDR",
		"iptables.masqueradeAll", "nftables.masqueradeAll", "bindAddress", "nodeIPs", "backendHealth", "ejection",
		"winkernel.enableDSR",
		"winkernel.forwardHealthCheckVip",
		"featureGates." + GateExternalIPs,
	}):
		return OnTable
	case matches(path, []string{
		"logging", "healthzBindAddress", "metricsBindAddress", "enableProfiling", "conntrack",
		"oomScoreAdj", "controlSocket", "auditInterval", "metricsServices", "takeOver", "healthCheckMaxAge",
		"resetOrphans",
		"featureGates." + GateFlagz,
		"featureGates." + GateStatusz, "iptables.minSyncPeriod", "nftables.minSyncPeriod", "ipvs.minSyncPeriod",
		"ipvs.excludeCIDRs",
	}):
		return InPlace
	case matches(path, []string{"bindAddressHardFail", "windowsRunAsService", "showHiddenMetricsForVersion"}):
		return AtStart
	case matches(path, []string{"featureGates"}):
		return NoEffect
	}
	return Rebuild
}

// matches reports whether a path is one of others, or below it.
func matches(path string, others []string) bool {
	return slices.ContainsFunc(others, func(o string) bool {
		rest, ok := strings.CutPrefix(path, o)
		return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
	})
}

// flatten lists the settings of both parts with their values as JSON. Empty settings are left out.
func flatten(c *Config) map[string]string {
	flat := map[string]string{}
	for _, part := range []any{c.KubeProxy, c.Fairlead} {
		data, err := json.Marshal(part)
		if err != nil {
			continue // the types have no values that cannot be encoded
		}
		var tree map[string]any
		if json.Unmarshal(data, &tree) == nil {
			delete(tree, "kind")
			delete(tree, "apiVersion")
			flattenInto(flat, "", tree)
		}
	}
	return flat
}

func flattenInto(flat map[string]string, at string, value any) {
	if object, ok := value.(map[string]any); ok {
		for key, item := range object {
			path := key
			if at != "" {
				path = at + "." + key
			}
			flattenInto(flat, path, item)
		}
		return
	}
	text, err := json.Marshal(value)
	if err == nil && !slices.Contains([]string{"null", `""`, "[]"}, string(text)) {
		flat[at] = string(text)
	}
}
