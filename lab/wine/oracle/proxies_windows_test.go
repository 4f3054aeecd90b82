package oracle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/kubernetes/pkg/proxy"
	"k8s.io/kubernetes/pkg/proxy/apis/config"
	"k8s.io/kubernetes/pkg/proxy/winkernel"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/wine/fakehns"
	"fairlead.dev/fairlead/service"
)

// The node.
const (
	here       = "node-a"
	zone       = "a"
	network    = "cni"
	gateway    = "cbr0"
	sourceVIP  = "10.244.1.2"
	healthPort = 10256
)

// setup is how both proxies are configured.
type setup struct {
	kind      string // of the network
	dsr, dual bool
	version   hns.Version // one for all in a process: hnslib asks once
}

func (s setup) String() string {
	text := s.kind
	if s.dsr {
		text += " with DSR"
	}
	if s.dual {
		text += " for two families"
	}
	return text
}

// node is a service with what the network plugin makes, and this machine's address: kube-proxy looks for its hardware
// address.
type node struct {
	sim *hnssim.Service
	ip  netip.Addr
	mac net.HardwareAddr
}

func newNode(t *testing.T, s setup) node {
	t.Helper()
	n := node{sim: hnssim.New(s.version)}
	n.ip, n.mac = address(t)
	id := n.make(t, hnssim.Networks, "", hns.Network{Name: network, Type: s.kind, Policies: []hns.Policy{
		n.route(t, "10.244.2.0/24", "192.0.2.22"), n.route(t, "10.244.3.0/24", "192.0.2.23"),
	}})
	n.make(t, hnssim.Endpoints, id, hns.Endpoint{Name: gateway, IPConfigurations: []hns.IPConfig{{Address: "10.244.1.1"}}})
	for last := 11; last < 15; last++ {
		n.make(t, hnssim.Endpoints, id, hns.Endpoint{IPConfigurations: []hns.IPConfig{
			{Address: fmt.Sprintf("10.244.1.%d", last)}, {Address: fmt.Sprintf("fd00::1:%x", last)},
		}})
	}
	return n
}

func (n node) route(t *testing.T, prefix, provider string) hns.Policy {
	t.Helper()
	settings, err := json.Marshal(hns.Route{DestinationPrefix: prefix, IsolationID: 4096, ProviderAddress: provider})
	if err != nil {
		t.Fatal(err)
	}
	return hns.Policy{Type: hns.RemoteSubnetRoute, Settings: settings}
}

func (n node) make(t *testing.T, k hnssim.Kind, within string, o any) (id string) {
	t.Helper()
	document, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := n.sim.Do(hnssim.Call{Verb: hnssim.Create, Kind: k, ID: within, Document: document})
	if err != nil {
		t.Fatal(err)
	}
	var made struct{ ID string }
	if err := json.Unmarshal(answer, &made); err != nil {
		t.Fatal(err)
	}
	return made.ID
}

// address is one of an interface with a hardware address.
func address(t *testing.T) (netip.Addr, net.HardwareAddr) {
	t.Helper()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		all, _ := i.Addrs()
		for _, a := range all {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && len(i.HardwareAddr) == 6 {
				return p.Addr(), i.HardwareAddr
			}
		}
	}
	t.Fatal("no interface has an IPv4 address and a hardware address")
	return netip.Addr{}, nil
}

// silent is an events.EventRecorder.
type silent struct{}

func (silent) Eventf(_, _ runtime.Object, _, _, _, _ string, _ ...any) {}

// kubeProxy is kube-proxy's proxier.
type kubeProxy struct {
	proxy.Provider
	server *fakehns.Server
}

func newKubeProxy(t *testing.T, n node, s setup) *kubeProxy {
	t.Helper()
	server, err := fakehns.Start(n.sim)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	t.Setenv(fakehns.Variable, server.Address())
	c := &config.KubeProxyConfiguration{
		SyncPeriod: metav1.Duration{Duration: time.Hour}, MinSyncPeriod: metav1.Duration{Duration: time.Second},
		HealthzBindAddress: fmt.Sprintf("0.0.0.0:%d", healthPort),
		Winkernel: config.KubeProxyWinkernelConfiguration{
			NetworkName: network, SourceVip: sourceVIP, EnableDSR: s.dsr, RootHnsEndpointName: gateway,
			ForwardHealthCheckVip: true,
		},
	}
	var p proxy.Provider
	if ip := net.IP(n.ip.AsSlice()); s.dual {
		p, err = winkernel.NewDualStackProxier(c, here, map[corev1.IPFamily]net.IP{
			corev1.IPv4Protocol: ip, corev1.IPv6Protocol: net.ParseIP("fd00::c000:201"),
		}, silent{}, nil)
	} else {
		p, err = winkernel.NewProxier(c, corev1.IPv4Protocol, here, ip, silent{}, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &kubeProxy{p, server}
}

// feed changes the objects from those of one cluster to those of another one, and waits for the sync.
func (p *kubeProxy) feed(from, to cluster) {
	services, slices := map[string]*corev1.Service{}, map[string]*discoveryv1.EndpointSlice{}
	for _, s := range from.services {
		services[s.Name] = s
	}
	for _, s := range from.slices {
		slices[s.Name] = s
	}
	for _, s := range to.services {
		p.OnServiceUpdate(services[s.Name], s)
		delete(services, s.Name)
	}
	for _, s := range to.slices {
		if old := slices[s.Name]; old != nil {
			p.OnEndpointSliceUpdate(old, s)
		} else {
			p.OnEndpointSliceAdd(s)
		}
		delete(slices, s.Name)
	}
	for _, s := range services {
		p.OnServiceDelete(s)
	}
	for _, s := range slices {
		p.OnEndpointSliceDelete(s)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
}

// ours is Fairlead: the table of Services, and the plane.
type ours struct {
	table *service.Table
	plane dataplane.Dataplane
}

// newFairlead starts with the objects of a cluster.
func newFairlead(t *testing.T, n node, s setup, c cluster) *ours {
	t.Helper()
	table, err := service.NewTable(service.Options{
		NodeName: here, ExternalIPs: true, MasqueradeAll: !s.dsr,
		HNS: &service.HNS{HealthVIPs: true, Healthz: healthPort},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := batch(cluster{}, c)
	b.Node = &service.Node{Name: here, Zone: zone, IPs: []netip.Addr{n.ip}, Eligible: true}
	b.Addrs = []netip.Addr{n.ip}
	if s.dual {
		v6 := netip.MustParseAddr("fd00::c000:201")
		b.Node.IPs, b.Addrs = append(b.Node.IPs, v6), append(b.Addrs, v6)
	}
	p, err := kernelspace.Driver(kernelspace.Options{
		Network: network, SourceVIP: netip.MustParseAddr(sourceVIP), RootEndpoint: gateway, NodeIP: n.ip, Everywhere: true,
		Host: func(_, _ netip.Addr) (netip.Addr, net.HardwareAddr, error) { return n.ip, n.mac, nil },
		HNS:  hnssim.Client{Service: n.sim},
	}).Open(dataplane.Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	f := &ours{table, p}
	state, _, _ := table.Update(b)
	f.err(t, p.Sync(t.Context(), state))
	return f
}

// err ends the test unless the plane has only done a part: the endpoint of a pod is not there yet.
func (f *ours) err(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, dataplane.ErrPartial) {
		t.Fatal(err)
	}
}

// feed changes the objects from those of one cluster to those of another one.
func (f *ours) feed(t *testing.T, from, to cluster) {
	t.Helper()
	state, change, _ := f.table.Update(batch(from, to))
	f.err(t, f.plane.Apply(t.Context(), state, change))
}

func batch(from, to cluster) (b service.Batch) {
	for _, o := range from.services {
		b.Services.Set(service.Name{Namespace: o.Namespace, Name: o.Name}, nil)
	}
	for _, o := range from.slices {
		b.Slices.Set(service.Name{Namespace: o.Namespace, Name: o.Name}, nil)
	}
	for _, o := range to.services {
		converted, _ := service.FromService(o)
		b.Services.Set(service.Name{Namespace: o.Namespace, Name: o.Name}, converted)
	}
	for _, o := range to.slices {
		converted, _ := service.FromSlice(o)
		b.Slices.Set(service.Name{Namespace: o.Namespace, Name: o.Name}, converted)
	}
	return b
}
