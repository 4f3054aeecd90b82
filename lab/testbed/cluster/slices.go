package cluster

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxEndpoints is how many endpoints the controller puts into a slice (--max-endpoints-per-slice).
const maxEndpoints = 100

// slicesOf is the endpoint slice controller: for each family of the Service, pods that resolve its
// ports alike share slices. A Service without pods has an empty slice.
func slicesOf(s *service) []*discoveryv1.EndpointSlice {
	if len(s.Spec.Selector) == 0 || s.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // they are written elsewhere, or not at all
	}
	var all []*discoveryv1.EndpointSlice
	for _, family := range s.Spec.IPFamilies {
		var made []*discoveryv1.EndpointSlice
		for _, p := range s.pods {
			addr := addrOf(p.addrs, family)
			if !addr.IsValid() { // of one family, or not running
				continue
			}
			ports := s.endpointPorts(p)
			i := slices.IndexFunc(made, func(e *discoveryv1.EndpointSlice) bool {
				return len(e.Endpoints) < maxEndpoints && reflect.DeepEqual(e.Ports, ports)
			})
			if i < 0 {
				i = len(made)
				made = append(made, s.newSlice(family, i+1, ports))
			}
			made[i].Endpoints = append(made[i].Endpoints, s.endpoint(p, addr))
		}
		if len(made) == 0 {
			made = append(made, s.newSlice(family, 1, nil))
		}
		all = append(all, made...)
	}
	return all
}

func (s *service) newSlice(family corev1.IPFamily, n int, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	slice := emptySlice(s.object, family, "endpointslice-controller.k8s.io")
	slice.Name = fmt.Sprintf("%s-%s-%d", s.Name, strings.ToLower(string(family)), n)
	slice.Ports = ports
	for k, v := range s.Labels {
		if _, ours := slice.Labels[k]; !ours {
			slice.Labels[k] = v
		}
	}
	if s.headless() {
		slice.Labels[corev1.IsHeadlessService] = ""
	}
	return slice
}

func emptySlice(o object, family corev1.IPFamily, manager string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.namespace,
			Labels: map[string]string{
				discoveryv1.LabelServiceName: o.name,
				discoveryv1.LabelManagedBy:   manager,
			},
		},
		AddressType: discoveryv1.AddressType(family),
		Endpoints:   []discoveryv1.Endpoint{},
	}
}

// endpointPorts are the Service's ports as a pod has them. Ports that it has not are left out.
func (s *service) endpointPorts(p *pod) []discoveryv1.EndpointPort {
	var ports []discoveryv1.EndpointPort
	for _, port := range s.Spec.Ports {
		if target, ok := p.target(port); ok {
			ports = append(ports, discoveryv1.EndpointPort{
				Name:        new(port.Name),
				Protocol:    new(port.Protocol),
				Port:        new(int32(target.Port)),
				AppProtocol: port.AppProtocol,
			})
		}
	}
	return ports
}

// endpoint is a pod in a slice. A traffic distribution becomes hints, as in the real controller
// (k8s.io/endpointslice/trafficdist).
func (s *service) endpoint(p *pod, a netip.Addr) discoveryv1.Endpoint {
	ready := p.ready() || s.Spec.PublishNotReadyAddresses
	e := discoveryv1.Endpoint{
		Addresses: []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{
			Ready:       &ready,
			Serving:     new(p.serving),
			Terminating: new(p.leaving),
		},
		NodeName:  new(string(p.node)),
		Zone:      new(zoneOf(p.node)),
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.namespace, Name: p.name},
	}
	if s.Spec.TrafficDistribution != nil && ready {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: *e.Zone}}}
		if *s.Spec.TrafficDistribution == corev1.ServiceTrafficDistributionPreferSameNode {
			e.Hints.ForNodes = []discoveryv1.ForNode{{Name: *e.NodeName}}
		}
	}
	return e
}

func addrOf(addrs []netip.Addr, family corev1.IPFamily) netip.Addr {
	for _, a := range addrs {
		if familyOf(a) == family {
			return a
		}
	}
	return netip.Addr{}
}

// addSlice takes an EndpointSlice that a manifest has.
func (in *input) addSlice(data []byte) error {
	var slice discoveryv1.EndpointSlice
	if err := json.Unmarshal(data, &slice); err != nil {
		return err
	}
	slice.Namespace, slice.ManagedFields = cmp.Or(slice.Namespace, metav1.NamespaceDefault), nil
	key := slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]
	in.slices[key] = append(in.slices[key], &slice)
	return nil
}

// addEndpoints takes an Endpoints object and mirrors it, as the mirroring controller does for a
// Service without selector.
func (in *input) addEndpoints(o object, data []byte) error {
	var given corev1.Endpoints
	if err := json.Unmarshal(data, &given); err != nil {
		return err
	}
	for i, subset := range given.Subsets {
		for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
			slice := emptySlice(o, family, "endpointslicemirroring-controller.k8s.io")
			slice.Name = fmt.Sprintf("%s-mirror-%s-%d", o.name, strings.ToLower(string(family)), i+1)
			for _, p := range subset.Ports {
				slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{
					Name: new(p.Name), Protocol: new(cmp.Or(p.Protocol, corev1.ProtocolTCP)), Port: new(p.Port),
					AppProtocol: p.AppProtocol,
				})
			}
			mirror(slice, subset.Addresses, true)
			mirror(slice, subset.NotReadyAddresses, false)
			if len(slice.Endpoints) > 0 {
				in.mirrored[o.key()] = append(in.mirrored[o.key()], slice)
			}
		}
	}
	return nil
}

// mirror adds addresses of the slice's family.
func mirror(slice *discoveryv1.EndpointSlice, addrs []corev1.EndpointAddress, ready bool) {
	for _, a := range addrs {
		if addr, err := netip.ParseAddr(a.IP); err == nil && discoveryv1.AddressType(familyOf(addr)) == slice.AddressType {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{addr.String()},
				Conditions: discoveryv1.EndpointConditions{Ready: new(ready)},
				NodeName:   a.NodeName,
				TargetRef:  a.TargetRef,
			})
		}
	}
}
