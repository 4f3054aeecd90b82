package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/component-base/featuregate"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
)

// meaningless says, one line each, what was set to something else than its default and has no meaning
// here.
func (c *Config) meaningless() (lines []string) {
	switch {
	case string(c.KubeProxy.Mode) == c.Plane:
	case c.ModeUnset:
		lines = append(lines, fmt.Sprintf("mode is not set, which means %s, as with kube-proxy; "+
			"the data plane %s serves it", c.KubeProxy.Mode, c.Plane))
	default:
		lines = append(lines, fmt.Sprintf("mode: the data plane %s serves mode %s", c.Plane, c.KubeProxy.Mode))
	}
	defaults := c.defaults()
	settings := flatten(c)
	for _, path := range slices.Sorted(maps.Keys(settings)) {
		reason := c.reason(path)
		if reason != "" && settings[path] != defaults[path] && used(c.KubeProxy.Mode, path) {
			lines = append(lines, fmt.Sprintf("%s: %s has no meaning here: %s", path, settings[path], reason))
		}
	}
	return append(lines, c.meaninglessGates()...)
}

// defaults are the settings of a Config in the same mode of which nothing else was said.
func (c *Config) defaults() map[string]string {
	d := &Config{Fairlead: defaultFairlead()}
	d.KubeProxy.Mode = c.KubeProxy.Mode
	setDefaults(&d.KubeProxy)
	setModeDefaults(&d.KubeProxy)
	fold(&d.KubeProxy)
	return flatten(d)
}

// reason says why a field has no meaning here; empty: it has.
func (c *Config) reason(path string) string {
	for _, only := range []struct {
		plane kubeproxy.ProxyMode
		paths []string
	}{
		{ModeNFTables, []string{"flowtable"}}, {ModeIPVS, []string{"ipvsAddressMode", "ipvsDrainTimeout"}},
		{ModeEBPF, []string{"ebpf"}}, {ModeUserspace, []string{"userspace"}},
	} {
		if matches(path, only.paths) && !c.may(only.plane) {
			return "it is for the data plane " + string(only.plane)
		}
	}
	section, name, _ := strings.Cut(path, ".")
	switch {
	case section == "ipvs" && name != "syncPeriod" && name != "minSyncPeriod":
		if c.may(ModeIPVS) {
			return ""
		}
		return "the data plane " + c.Plane + " has nothing like it"
	case name == "minSyncPeriod":
		return ""
	case name == "syncPeriod":
		return "audits do that, see auditInterval"
	case path == "readinessGate":
		if len(c.Fairlead.Manifests) > 0 {
			return "manifests have no pods"
		}
	case path == "iptablesBackend":
		if c.KubeProxy.Mode != ModeIPTables && c.KubeProxy.Mode != ModeAuto {
			return "it is for mode iptables"
		}
	case path == "counters":
		if !c.may(ModeNFTables) && !c.may(ModeIPTables) && (!c.may(ModeEBPF) || c.Fairlead.Counters != CountBackends) {
			return "the data plane " + c.Plane + " counts for each backend in any case"
		}
	case section == "ebpf":
		packets := []string{"ebpf.acceleration", "ebpf.forwarding", "ebpf.sizes.translations"}
		if slices.Contains(packets, path) && c.Fairlead.EBPF.Packets != EBPFPacketsByTC {
			return "it is for packets that tc serves, and ebpf.packets says otherwise"
		}
	case path == "configSyncPeriod":
		return "objects are watched, not refreshed"
	case section == "winkernel", path == "windowsRunAsService":
		if c.Plane != string(ModeKernelspace) {
			return "it is for Windows"
		}
	case c.Plane == string(ModeKernelspace) && matches(path, []string{
		"conntrack", "oomScoreAdj", "takeOver", "iptables.masqueradeBit", "iptables.masqueradeAll",
	}):
		return "Windows has nothing like it"
	case strings.HasPrefix(path, "logging.vmodule"):
		return "nothing is logged by file"
	case strings.HasPrefix(path, "logging.options"), path == "logging.flushFrequency":
		return "logs are one stream without a buffer"
	}
	return ""
}

// may reports whether the data plane of that name may serve.
func (c *Config) may(plane kubeproxy.ProxyMode) bool {
	return c.Plane == string(plane) || c.Plane == string(ModeAuto)
}

// meaninglessGates is one line about all gates together.
func (c *Config) meaninglessGates() []string {
	known := c.gates.GetAll()
	var without []string
	for name, value := range c.KubeProxy.FeatureGates {
		said := fmt.Sprintf("%s=%t", name, value)
		means := slices.Contains(meaningfulGates(), name) || slices.Contains(alwaysOn(), said)
		if spec, ok := known[featuregate.Feature(name)]; !means && ok && spec.Default != value {
			without = append(without, said)
		}
	}
	if len(without) == 0 {
		return nil
	}
	slices.Sort(without)
	return []string{"featureGates: without meaning here: " + strings.Join(without, ", ")}
}
