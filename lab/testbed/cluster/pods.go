package cluster

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// pod is one replica of a workload, or the holder of an address that manifests name.
type pod struct {
	object  // the workload
	name    string
	node    testbed.Place
	labels  labels.Set
	spec    *corev1.PodSpec
	targets []testbed.PodPort // of the Services that select it, beside its containers' ports
	wanted  []netip.Addr      // addresses that it must have; nil: any
	serving bool              // its readiness
	leaving bool              // it is being deleted
	addrs   []netip.Addr      // that it has, once it runs
}

// continues reports whether a running pod can become this one without being started anew.
func (p *pod) continues(old *pod) bool {
	return p.node == old.node && p.spec.HostNetwork == old.spec.HostNetwork && slices.Equal(p.wanted, old.wanted)
}

// ready is the endpoint controller's word for a pod that gets new connections.
func (p *pod) ready() bool { return p.serving && !p.leaving }

// plan is which pods must run, by their names in the testbed.
type plan map[string]*pod

// planPods are the pods of workloads.
func planPods(workloads []*workload, report reporter) plan {
	pods := plan{}
	for _, w := range workloads {
		replicas, err := w.replicas()
		if err != nil {
			report(w.object, err)
		}
		for _, p := range replicas {
			if pods[p.place()] != nil { // real ones have random names
				p.name = strings.ToLower(w.kind) + "-" + p.name
			}
			if other := pods[p.place()]; other != nil {
				report(w.object, fmt.Errorf("its pod %s is one of %s already", p.name, other.object))
				continue
			}
			pods[p.place()] = p
		}
	}
	return pods
}

// selected are the pods that a Service selects, in the order of their names. They get a server for
// each of its ports.
func (pods plan) selected(s *service) []*pod {
	var selected []*pod
	for _, p := range pods {
		if s.selects(p) {
			p.targets = append(p.targets, s.targets(p)...)
			selected = append(selected, p)
		}
	}
	slices.SortFunc(selected, func(a, b *pod) int { return cmp.Compare(a.name, b.name) })
	return selected
}

func (p *pod) place() string { return placeOf(p.namespace, p.name) }

// placeOf is what a pod is called in the testbed, where there are no namespaces.
func placeOf(namespace, name string) string {
	switch place := testbed.Place(name); {
	case namespace != corev1.NamespaceDefault:
		return namespace + "/" + name
	case place == testbed.Node || place == testbed.NodeB || place == testbed.Outside || place == testbed.LAN:
		return "pod/" + name
	}
	return name
}

// maxReplicas is more than two nodes have addresses for.
const maxReplicas = 1000

// replicas are the pods of a workload.
func (w *workload) replicas() ([]*pod, error) {
	for _, p := range containerPorts(&w.Spec.Template.Spec) {
		if p.ContainerPort < 1 || p.ContainerPort > 65535 {
			return nil, fmt.Errorf("containerPort: %d is not a port", p.ContainerPort)
		}
	}
	where := w.nodes()
	switch w.kind {
	case "Pod":
		if w.status.Phase == corev1.PodSucceeded || w.status.Phase == corev1.PodFailed {
			return nil, nil
		}
		return []*pod{w.pod(w.name, where[0])}, nil
	case "DaemonSet":
		var pods []*pod
		for _, node := range where {
			pods = append(pods, w.pod(w.name+"-"+string(node), node))
		}
		return pods, nil
	}
	count, first := ptr.Deref(w.Spec.Replicas, 1), int32(1)
	if w.kind == "StatefulSet" {
		first = 0
	}
	if count < 0 || count > maxReplicas {
		return nil, fmt.Errorf("spec.replicas: %d is not between 0 and %d", count, maxReplicas)
	}
	var pods []*pod
	for i := range count {
		p := w.pod(w.name+"-"+strconv.Itoa(int(first+i)), where[int(i)%len(where)])
		if w.kind == "StatefulSet" {
			p.labels = labels.Merge(p.labels, labels.Set{
				"statefulset.kubernetes.io/pod-name": p.name,
				"apps.kubernetes.io/pod-index":       strconv.Itoa(int(i)),
			})
		}
		pods = append(pods, p)
	}
	return pods, nil
}

func (w *workload) pod(name string, node testbed.Place) *pod {
	return &pod{
		object:  w.object,
		name:    name,
		node:    node,
		labels:  w.Spec.Template.Labels,
		spec:    &w.Spec.Template.Spec,
		serving: w.ready(),
		leaving: w.DeletionTimestamp != nil,
	}
}

// ready: all pods are, but those whose status in the manifest says otherwise.
func (w *workload) ready() bool {
	return !slices.ContainsFunc(w.status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse
	})
}

// nodes are the nodes on which a workload's pods may run, in the order in which they get them. Half
// of the workloads begin with the second node. A selector that fits neither node asks for hardware
// that a virtual cluster has on every node.
func (w *workload) nodes() []testbed.Place {
	spec := w.Spec.Template.Spec
	selector := labels.SelectorFromSet(spec.NodeSelector)
	var fit []testbed.Place
	for _, n := range bothNodes() {
		if spec.NodeName == string(n) || spec.NodeName == "" && selector.Matches(labels.Set(nodeLabels(n))) {
			fit = append(fit, n)
		}
	}
	if len(fit) == 0 {
		fit = bothNodes()
	}
	if hash := fnv.New32a(); w.kind != "DaemonSet" {
		hash.Write([]byte(w.key()))
		if hash.Sum32()%2 == 1 {
			slices.Reverse(fit)
		}
	}
	return fit
}

// ports are the ports on which a pod is meant to answer: those of its containers, and those to which
// Services send.
func (p *pod) ports() map[testbed.PodPort]bool {
	all := map[testbed.PodPort]bool{}
	for _, port := range containerPorts(p.spec) {
		all[testbed.PodPort{Protocol: protocolOf(port.Protocol), Port: uint16(port.ContainerPort)}] = true
	}
	for _, port := range p.targets {
		all[port] = true
	}
	return all
}

// listens are those that this kernel has the protocol for.
func (p *pod) listens() []testbed.PodPort {
	all := p.ports()
	maps.DeleteFunc(all, func(port testbed.PodPort, _ bool) bool { return !testbed.HasProtocol(port.Protocol) })
	return slices.SortedFunc(maps.Keys(all), func(a, b testbed.PodPort) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
}

// silent reports whether pods have ports that this kernel lacks the protocol for.
func (pods plan) silent(protocol model.Protocol) bool {
	for _, p := range pods {
		for port := range p.ports() {
			if port.Protocol == protocol {
				return !testbed.HasProtocol(protocol)
			}
		}
	}
	return false
}

// containerPorts are the ports of all containers that stay, sidecars included.
func containerPorts(spec *corev1.PodSpec) []corev1.ContainerPort {
	var ports []corev1.ContainerPort
	for _, c := range spec.InitContainers {
		if ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways {
			ports = append(ports, c.Ports...)
		}
	}
	for _, c := range spec.Containers {
		ports = append(ports, c.Ports...)
	}
	return ports
}

// target is the port of a pod to which a Service's port leads: a number, or the container port of
// that name and protocol. It reports false if the pod has none.
func (p *pod) target(port corev1.ServicePort) (testbed.PodPort, bool) {
	protocol := protocolOf(port.Protocol)
	if port.TargetPort.Type == intstr.Int {
		return testbed.PodPort{Protocol: protocol, Port: uint16(port.TargetPort.IntVal)}, true
	}
	for _, c := range containerPorts(p.spec) {
		if c.Name == port.TargetPort.StrVal && protocolOf(c.Protocol) == protocol {
			return testbed.PodPort{Protocol: protocol, Port: uint16(c.ContainerPort)}, true
		}
	}
	return testbed.PodPort{}, false
}

func protocolOf(p corev1.Protocol) model.Protocol {
	protocol, _ := model.ParseProtocol(string(p)) // unknown protocols have been reported
	return cmp.Or(protocol, model.TCP)
}
