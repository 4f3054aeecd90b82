package config

import (
	_ "embed"
	"fmt"
	"strings"

	"k8s.io/component-base/featuregate"
)

// meaningfulGates are those that change what Fairlead does.
const meaningfulGates = "AllowServiceExternalIPs, KubeProxyIPVS, ComponentFlagz, ComponentStatusz"

// knownGates are kube-proxy's: name, default, whether that is locked, stage. cmd/gates of the nested
// module writes it.
//
//go:embed gates-1.37.txt
var knownGates string

// newGates sets gates from what was said, and refuses unknown and locked ones.
func newGates(said map[string]bool) (featuregate.MutableVersionedFeatureGate, error) {
	gates := featuregate.NewFeatureGate()
	specs := map[featuregate.Feature]featuregate.FeatureSpec{}
	for line := range strings.Lines(knownGates) {
		var name, stage string
		var spec featuregate.FeatureSpec
		_, _ = fmt.Sscan(line, &name, &spec.Default, &spec.LockToDefault, &stage) // GA has no stage
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
	if err := gates.Add(specs); err != nil {
		return nil, err
	}
	return gates, gates.SetFromMap(said)
}
