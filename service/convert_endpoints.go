package service

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// leaderAnnotation marks Endpoints that are a lock of the old leader election.
const leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"

// FromSlice validates an EndpointSlice and keeps what matters. It returns nil for a slice that is no
// concern of a proxy: of a headless Service, without a Service, or with names in place of addresses.
func FromSlice(o *discoveryv1.EndpointSlice) (*Slice, []Problem) {
	r := &report{kind: "EndpointSlice"}
	s := &Slice{Name: r.name(&o.ObjectMeta), Service: o.Labels[discoveryv1.LabelServiceName]}
	if _, headless := o.Labels[corev1.IsHeadlessService]; headless {
		return nil, nil
	}
	switch {
	case !subdomain(s.Name.Name) || !label(s.Name.Namespace):
		r.add("metadata.name", "is not a DNS subdomain; the slice is ignored")
		return nil, r.done()
	case o.AddressType != discoveryv1.AddressTypeIPv4 && o.AddressType != discoveryv1.AddressTypeIPv6:
		r.add("addressType", "%.40q is neither IPv4 nor IPv6; the slice is ignored", o.AddressType)
		return nil, r.done()
	case s.Service == "":
		r.add("metadata.labels", "%s is missing; the slice is ignored", discoveryv1.LabelServiceName)
		return nil, r.done()
	}
	if text, ok := o.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		if at, err := time.Parse(time.RFC3339Nano, text); err == nil { // else nothing is known, which does no harm
			s.Changed = at.UnixMicro()
		}
	}
	if strings.HasPrefix(s.Name.Name, s.Service) {
		s.Service = s.Name.Name[:len(s.Service)] // which is the rule: one copy is enough
	}
	w := sliceWriter{report: r, slice: s, weights: r.weights(o.Annotations)}
	w.ports(o.Ports)
	s.Endpoints = make([]Endpoint, 0, len(o.Endpoints))
	for i := range o.Endpoints {
		w.endpoint(index("endpoints", i), &o.Endpoints[i], o.AddressType)
	}
	return s, r.done()
}

// sliceWriter fills a Slice.
type sliceWriter struct {
	*report
	slice   *Slice
	weights weights
	hints   map[string]*Hints // those that endpoints before had; there are few different ones
}

func (w *sliceWriter) ports(ports []discoveryv1.EndpointPort) {
	for i, p := range ports {
		field := index("ports", i)
		if p.Port == nil {
			w.add(field+".port", "is missing, which means all ports; the port is left out")
			continue
		}
		w.port(field, SlicePort{Name: deref(p.Name, "")}, *p.Port, string(deref(p.Protocol, "")))
	}
}

// port adds a port whose number and protocol are not yet checked.
func (w *sliceWriter) port(field string, p SlicePort, number int32, protocol string) {
	var ok, ok2 bool
	p.Protocol, ok = w.protocol(field+".protocol", protocol)
	p.Port, ok2 = w.report.port(field+".port", number)
	if !ok || !ok2 {
		return
	}
	i, taken := w.slice.find(p.Name)
	if taken {
		w.add(field+".name", "%.40q is the name of an earlier port too; the port is left out", p.Name)
		return
	}
	p.Name = intern(p.Name)
	w.slice.Ports = slices.Insert(w.slice.Ports, i, p)
}

// endpoint takes the first address; the API gives the others no meaning.
func (w *sliceWriter) endpoint(field string, o *discoveryv1.Endpoint, family discoveryv1.AddressType) {
	if len(o.Addresses) == 0 {
		w.add(field+".addresses", "is empty; the endpoint is left out")
		return
	}
	field = index(field+".addresses", 0)
	a, ok := w.plainAddr(field, o.Addresses[0])
	switch {
	case !ok:
		return
	case a.Is4() != (family == discoveryv1.AddressTypeIPv4):
		w.add(field, "%s is not of the slice's addressType %s; the endpoint is left out", a, family)
		return
	}
	w.slice.Endpoints = append(w.slice.Endpoints, Endpoint{
		Addr:        a,
		Node:        w.node(field, deref(o.NodeName, "")),
		Ready:       deref(o.Conditions.Ready, true),
		Serving:     deref(o.Conditions.Serving, true),
		Terminating: deref(o.Conditions.Terminating, false),
		Weight:      w.weights.of(a),
		Hints:       w.hint(o.Hints),
	})
}

// node keeps the name of an endpoint's node, which explanations show, if it can be one.
func (w *sliceWriter) node(field, name string) NodeName {
	if !subdomain(name) {
		w.add(field, "its nodeName %.40q is not the name of a node; it is taken to be unknown", name)
		name = ""
	}
	return NodeNamed(name)
}

// hint shares equal hints: a slice has thousands of endpoints and few zones.
func (w *sliceWriter) hint(o *discoveryv1.EndpointHints) *Hints {
	if o == nil || len(o.ForNodes)+len(o.ForZones) == 0 {
		return nil
	}
	h := &Hints{}
	for _, n := range o.ForNodes {
		h.Nodes = append(h.Nodes, intern(n.Name))
	}
	for _, z := range o.ForZones {
		h.Zones = append(h.Zones, intern(z.Name))
	}
	key := strings.Join(h.Nodes, ",") + ";" + strings.Join(h.Zones, ",")
	if same, ok := w.hints[key]; ok {
		return same
	}
	if w.hints == nil {
		w.hints = map[string]*Hints{}
	}
	w.hints[key] = h
	return h
}

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// FromEndpoints turns the Endpoints of old manifests into slices, as the mirroring controller of
// Kubernetes does: one for each subset and address family. Their names cannot be those of real
// slices (they have a slash), and a Service that has real slices does not use them.
func FromEndpoints(o *corev1.Endpoints) ([]*Slice, []Problem) {
	r := &report{kind: "Endpoints"}
	name := r.name(&o.ObjectMeta)
	_, lock := o.Annotations[leaderAnnotation]
	_, headless := o.Labels[corev1.IsHeadlessService]
	if lock || headless || o.Labels[discoveryv1.LabelSkipMirror] == "true" {
		return nil, nil
	}
	var all []*Slice
	shares := r.weights(o.Annotations) // which the controller hands on to the slices
	for i := range o.Subsets {
		both := sliceWriter{report: r, slice: &Slice{}, weights: shares}
		both.subset(index("subsets", i), &o.Subsets[i])
		for _, v6 := range []bool{false, true} {
			s := &Slice{Service: name.Name, Mirrored: true, Ports: both.slice.Ports}
			s.Name = Name{Namespace: name.Namespace, Name: fmt.Sprintf("%s/%d", name.Name, len(all))}
			for _, e := range both.slice.Endpoints {
				if e.Addr.Is6() == v6 {
					s.Endpoints = append(s.Endpoints, e)
				}
			}
			if s.Endpoints != nil {
				all = append(all, s)
			}
		}
	}
	return all, r.done()
}

// subset takes the addresses of both families.
func (w *sliceWriter) subset(field string, o *corev1.EndpointSubset) {
	for i, p := range o.Ports {
		w.port(index(field+".ports", i), SlicePort{Name: p.Name}, p.Port, string(p.Protocol))
	}
	w.addresses(field+".addresses", o.Addresses, true)
	w.addresses(field+".notReadyAddresses", o.NotReadyAddresses, false)
}

func (w *sliceWriter) addresses(field string, addresses []corev1.EndpointAddress, ready bool) {
	for i := range addresses {
		if a, ok := w.plainAddr(index(field, i)+".ip", addresses[i].IP); ok {
			w.slice.Endpoints = append(w.slice.Endpoints, Endpoint{
				Addr: a, Node: w.node(index(field, i), deref(addresses[i].NodeName, "")), Ready: ready, Serving: ready,
				Weight: w.weights.of(a),
			})
		}
	}
}
