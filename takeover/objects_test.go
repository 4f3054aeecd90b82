package takeover_test

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// clusterObjects are Services and their slices, as the API has them.
type clusterObjects struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
	node     *corev1.Node
}

// serviceSpec is a Service of both families.
type serviceSpec struct {
	name     string
	address  string
	protocol corev1.Protocol
	port     int32
	nodePort int32
	pods     []string
}

const (
	tcpPort, udpPort = 8080, 5353
	webPort, dnsPort = 80, 53
)

// The Services. Each pod serves all of them.
var (
	web  = serviceSpec{"web", "10.96.0.10", corev1.ProtocolTCP, webPort, 30080, []string{"pod-a", "pod-b"}}
	dns  = serviceSpec{"dns", "10.96.0.11", corev1.ProtocolUDP, dnsPort, 30053, []string{"pod-a", "pod-b"}}
	self = serviceSpec{"self", "10.96.0.12", corev1.ProtocolTCP, webPort, 30081, []string{"pod-a"}}
	late = serviceSpec{"late", "10.96.0.13", corev1.ProtocolTCP, webPort, 30082, []string{"pod-b"}}
)

// podNodes are the pods and where they run.
var podNodes = map[string]testbed.Place{"pod-a": testbed.Node, "pod-b": testbed.NodeB, "client": testbed.Node}

func (s serviceSpec) clusterIP(v6 bool) netip.AddrPort {
	a := netip.MustParseAddr(s.address)
	if v6 {
		a = testbed.EmbedV6(a)
	}
	return netip.AddrPortFrom(a, uint16(s.port))
}

func (s serviceSpec) modelProtocol() model.Protocol {
	if s.protocol == corev1.ProtocolUDP {
		return model.UDP
	}
	return model.TCP
}

func newObjects(bed *testbed.Bed, specs ...serviceSpec) clusterObjects {
	o := clusterObjects{node: &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)},
	}}
	for _, v6 := range []bool{false, true} {
		o.node.Status.Addresses = append(o.node.Status.Addresses, corev1.NodeAddress{
			Type: corev1.NodeInternalIP, Address: bed.Addr(testbed.Node, v6).String()})
	}
	for _, s := range specs {
		o.services = append(o.services, s.service())
		for _, v6 := range []bool{false, true} {
			o.slices = append(o.slices, s.slice(bed, v6))
		}
	}
	return o
}

func (s serviceSpec) service() *corev1.Service {
	both := corev1.IPFamilyPolicyRequireDualStack
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name, ResourceVersion: "1"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: s.address, IPFamilyPolicy: &both,
			IPFamilies:      []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			SessionAffinity: corev1.ServiceAffinityNone, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			Ports: []corev1.ServicePort{{Protocol: s.protocol, Port: s.port, NodePort: s.nodePort, TargetPort: intstr.FromInt32(tcpPort)}},
		},
	}
	o.Spec.ClusterIPs = []string{s.address, s.clusterIP(true).Addr().String()}
	return o
}

func (s serviceSpec) slice(bed *testbed.Bed, v6 bool) *discoveryv1.EndpointSlice {
	kind, port, none := discoveryv1.AddressTypeIPv4, int32(tcpPort), ""
	if v6 {
		kind = discoveryv1.AddressTypeIPv6
	}
	if s.protocol == corev1.ProtocolUDP {
		port = udpPort
	}
	o := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: s.name + "-" + strings.ToLower(string(kind)), ResourceVersion: "1",
			Labels: map[string]string{discoveryv1.LabelServiceName: s.name},
		},
		AddressType: kind,
		Ports:       []discoveryv1.EndpointPort{{Name: &none, Protocol: &s.protocol, Port: &port}},
	}
	for _, pod := range s.pods {
		node := string(podNodes[pod])
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{bed.Addr(testbed.Place(pod), v6).String()}, NodeName: &node})
	}
	return o
}

// all are what the API server has.
func (o clusterObjects) all() []runtime.Object {
	all := []runtime.Object{o.node}
	for _, s := range o.services {
		all = append(all, s)
	}
	for _, s := range o.slices {
		all = append(all, s)
	}
	return all
}

// state is what Fairlead makes of the objects.
func (o clusterObjects) state(t *testing.T, bed *testbed.Bed, detect service.DetectLocal) *model.State {
	table, err := service.NewTable(service.Options{
		NodeName: string(testbed.Node), NodePortAddresses: []string{"primary"}, DetectLocal: detect,
	})
	if err != nil {
		t.Fatal(err)
	}
	batch := service.Batch{
		ServiceCIDRs: testbed.ServiceCIDRs(),
		Addrs:        []netip.Addr{bed.Addr(testbed.Node, false), bed.Addr(testbed.Node, true)},
	}
	var problems []service.Problem
	batch.Node, problems = service.FromNode(o.node)
	for _, s := range o.services {
		from, some := service.FromService(s)
		batch.Services.Set(service.Name{Namespace: s.Namespace, Name: s.Name}, from)
		problems = append(problems, some...)
	}
	for _, s := range o.slices {
		from, some := service.FromSlice(s)
		batch.Slices.Set(service.Name{Namespace: s.Namespace, Name: s.Name}, from)
		problems = append(problems, some...)
	}
	state, _, some := table.Update(batch)
	if problems = append(problems, some...); len(problems) > 0 {
		t.Fatal(problems)
	}
	return state
}
