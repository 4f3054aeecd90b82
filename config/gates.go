package config

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/component-base/featuregate"
)

// Gates that change what Fairlead does.
const (
	GateExternalIPs = "AllowServiceExternalIPs" // KEP-5707
	GateFlagz       = "ComponentFlagz"
	GateStatusz     = "ComponentStatusz"
	gateIPVS        = "KubeProxyIPVS"
)

func meaningfulGates() []string { return []string{GateExternalIPs, gateIPVS, GateFlagz, GateStatusz} }

// alwaysOn are gates of what Fairlead does in any case, and of what changes nothing in it by itself.
func alwaysOn() []string {
	return []string{"KubeProxyNFTablesLocalhostNodePorts=true", "LoggingAlphaOptions=true", "LoggingBetaOptions=false"}
}

// knownGates are those of kube-proxy: name, default, whether that is locked, stage; none is general availability.
// --help omits those that are locked or deprecated, but a configuration may have them.
//
//go:embed gates-1.37.txt
var knownGates string

// gates are feature gates that have been set.
type gates = featuregate.MutableVersionedFeatureGate

// newGates sets what was said, as far as kube-proxy would, and tells what is wrong with the others.
func newGates(said map[string]bool) (set gates, wrong map[string]string) {
	set, wrong = featuregate.NewFeatureGate(), map[string]string{}
	if err := set.Add(knownSpecs()); err != nil {
		wrong["featureGates"] = err.Error()
	}
	known, right := set.GetAll(), map[string]bool{}
	for name, value := range said {
		spec, ok := known[featuregate.Feature(name)]
		switch {
		case !ok:
			wrong[name] = "is not a feature gate of kube-proxy " + Kubernetes
		case spec.LockToDefault && value != spec.Default:
			wrong[name] = fmt.Sprintf("is locked to %t", spec.Default)
		default:
			right[name] = value
		}
	}
	if err := set.(featuregate.MutableFeatureGateWithLogger).SetFromMapWithLogger(logr.Discard(), right); err != nil {
		wrong["featureGates"] = err.Error()
	}
	return set, wrong
}

func knownSpecs() map[featuregate.Feature]featuregate.FeatureSpec {
	specs := map[featuregate.Feature]featuregate.FeatureSpec{}
	for line := range strings.Lines(knownGates) {
		var name, stage string
		var spec featuregate.FeatureSpec
		_, _ = fmt.Sscan(line, &name, &spec.Default, &spec.LockToDefault, &stage) // the stage may lack
		switch stage {
		case "ALPHA":
			spec.PreRelease = featuregate.Alpha
		case "BETA":
			spec.PreRelease = featuregate.Beta
		case "DEPRECATED":
			spec.PreRelease = featuregate.Deprecated
		}
		specs[featuregate.Feature(name)] = spec
	}
	return specs
}
