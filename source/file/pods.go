package file

import (
	"cmp"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"sigs.k8s.io/json"

	"fairlead.dev/fairlead/service"
)

// wants are what a Service says of the pods behind it, which the Table does not need.
type wants struct {
	selector []string // "app=web", sorted
	targets  []target
}

// target is a port of pods.
type target struct {
	port     intstr.IntOrString
	protocol corev1.Protocol
}

// wantsOf is nil for a Service that no proxy serves.
func wantsOf(from *corev1.Service, s *service.Service) *wants {
	if s.Ignored != "" && s.Ignored != service.NoClusterIP {
		return nil
	}
	w := &wants{selector: pairs(from.Spec.Selector)}
	for _, p := range from.Spec.Ports {
		t := target{p.TargetPort, protocolOf(p.Protocol)}
		if t.port == (intstr.IntOrString{}) {
			t.port = intstr.FromInt32(p.Port)
		}
		w.targets = append(w.targets, t)
	}
	return w
}

func protocolOf(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }

// pairs are shared: the pods of a workload have the same.
func pairs(labels map[string]string) (all []string) {
	for key, value := range labels {
		all = append(all, unique.Make(key+"="+value).Value())
	}
	slices.Sort(all)
	return all
}

// workload is what makes pods, or is one.
type workload struct {
	labels []string // of its pods, as in wants
	ports  []corev1.ContainerPort
}

// workloadOf takes anything that has containers, or a template of pods that has them; nil: the object has none.
func workloadOf(text []byte) *workload {
	type containers struct {
		Containers []struct {
			Ports []corev1.ContainerPort `json:"ports"`
		} `json:"containers"`
		InitContainers []struct {
			Ports []corev1.ContainerPort `json:"ports"`
		} `json:"initContainers"` // sidecars
	}
	type metadata struct {
		Labels map[string]string `json:"labels"`
	}
	var o struct {
		Metadata metadata `json:"metadata"`
		Spec     struct {
			containers `json:",inline"`
			Template   struct {
				Metadata metadata   `json:"metadata"`
				Spec     containers `json:"spec"`
			} `json:"template"`
		} `json:"spec"`
	}
	if json.UnmarshalCaseSensitivePreserveInts(text, &o) != nil {
		return nil
	}
	labels, of := o.Metadata.Labels, o.Spec.containers
	if len(o.Spec.Template.Spec.Containers) > 0 {
		labels, of = o.Spec.Template.Metadata.Labels, o.Spec.Template.Spec
	}
	if len(of.Containers) == 0 {
		return nil
	}
	w := &workload{labels: pairs(labels)}
	for _, c := range append(of.Containers, of.InitContainers...) {
		w.ports = append(w.ports, c.Ports...)
	}
	return w
}

// selects reports whether a workload's pods are those of a Service in the same namespace.
func (w *wants) selects(of *workload) bool {
	return len(w.selector) > 0 && !slices.ContainsFunc(w.selector, func(pair string) bool {
		_, found := slices.BinarySearch(of.labels, pair)
		return !found
	})
}

// misses reports whether no container of some workloads has a port, and what their ports are. A container need not
// name its ports, so that one without any may serve each number.
func (t *target) misses(pods []*workload) (ports []string, misses bool) {
	for _, w := range pods {
		if len(w.ports) == 0 && t.port.Type == intstr.Int {
			return nil, false
		}
		for _, p := range w.ports {
			name := intstr.FromInt32(p.ContainerPort)
			if t.port.Type == intstr.String {
				name = intstr.FromString(p.Name)
			}
			if protocolOf(p.Protocol) == t.protocol && name == t.port {
				return nil, false
			}
			if name.String() != "" {
				ports = append(ports, name.String()+"/"+strings.ToLower(string(protocolOf(p.Protocol))))
			}
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports), true
}
