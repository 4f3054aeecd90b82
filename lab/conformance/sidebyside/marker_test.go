package sidebyside

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Two Services show how far a proxy has come, in each address family, because kube-proxy programs them apart. Each kind
// of object arrives in order. So a proxy that serves the marker's new port has seen all Services that were written
// before it. If the new endpoint answers there, it has seen all slices, too. The other Service's endpoints are hinted
// for zones: those that answer show which one the node is in.
const (
	markerName, zoneName = "zz-marker", "zz-zone"
	markerIP, zoneIP     = "10.96.77.1", "10.96.77.2"
)

// marker is the n-th state of the marker.
type marker int

func (m marker) port() int32 { return 1000 + int32(m)%30000 }

func (m marker) pod() member { return cast[1+int(m)%2] } // pod-a, pod-b

// addTo puts the marker's Services among objects.
func (m marker) addTo(o objects) {
	o.add(markerService(markerName, markerIP, m.port()),
		markerSlice(markerName, false, m.pod()), markerSlice(markerName, true, m.pod()))
	if s := o.services[zoneName]; s != nil {
		return
	}
	var list []*discoveryv1.EndpointSlice
	for _, v6 := range []bool{false, true} {
		slice := markerSlice(zoneName, v6, cast[1], cast[2])
		for i, zone := range []string{"zone-a", "zone-b"} {
			slice.Endpoints[i].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
		}
		list = append(list, slice)
	}
	o.add(markerService(zoneName, zoneIP, 80), list...)
}

func markerService(name, ip string, port int32) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault}}
	s.Spec.ClusterIPs = texts(both(ip))
	s.Spec.ClusterIP = ip
	families(&s.Spec)
	s.Spec.Ports = []corev1.ServicePort{{Name: "m", Port: port, Protocol: corev1.ProtocolTCP}}
	return s
}

func markerSlice(service string, v6 bool, pods ...member) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: fmt.Sprintf("%s-%t", service, v6), Namespace: metav1.NamespaceDefault},
		AddressType: map[bool]discoveryv1.AddressType{false: "IPv4", true: "IPv6"}[v6],
		Ports:       []discoveryv1.EndpointPort{{Name: new("m"), Port: new(int32(podTCP)), Protocol: new(corev1.ProtocolTCP)}},
	}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "sidebyside.fairlead.dev"}
	for _, m := range pods {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{in(v6, m.Addr)}})
	}
	return s
}

// await returns when the proxy on a bed's node has come so far.
func (m marker) await(ctx context.Context, bed *testbed.Bed, zone string) error {
	for _, v6 := range []bool{false, true} {
		newest := netip.AddrPortFrom(netip.MustParseAddr(in(v6, markerIP)), uint16(m.port()))
		if err := awaitBackends(ctx, bed, newest, 1, m.pod().Name); err != nil {
			return err
		}
		inZone := map[string]string{"zone-a": "pod-a", "zone-b": "pod-b", "": "pod-a pod-b"}[zone]
		hinted := netip.AddrPortFrom(netip.MustParseAddr(in(v6, zoneIP)), 80)
		if err := awaitBackends(ctx, bed, hinted, 14, inZone); err != nil {
			return err
		}
	}
	return nil
}

// awaitBackends returns when so many probes are answered by the wanted backends, all of them.
func awaitBackends(ctx context.Context, bed *testbed.Bed, to netip.AddrPort, n int, want string) error {
	return eventually.Poll(ctx, func() error {
		got, err := backends(ctx, bed, to, n)
		if err == nil && got != want {
			err = fmt.Errorf("the proxy has not followed: %s is answered by %q, not %q", to, got, want)
		}
		return err
	})
}

// backends are those that answer so many probes, sorted.
func backends(ctx context.Context, bed *testbed.Bed, to netip.AddrPort, n int) (string, error) {
	all := outcomes{}
	for range n {
		if err := all.ask(ctx, bed, probe{"client", model.TCP, to}, 100*time.Millisecond); err != nil {
			return "", err
		}
	}
	names := strings.Split(all.String(), ", ")
	for i, name := range names {
		names[i], _, _ = strings.Cut(name, " ")
	}
	return strings.Join(names, " "), nil
}
