package sidebyside

import (
	"context"
	"fmt"
	"math"
	"net/netip"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// member is a pod of the cast, which every cluster has.
type member struct {
	name        string
	node        testbed.Place
	addr        string
	hostNetwork bool
}

var cast = []member{
	{name: "client", node: testbed.Node, addr: "10.244.1.20"},
	{name: "pod-a", node: testbed.Node, addr: "10.244.1.11"},
	{name: "pod-b", node: testbed.Node, addr: "10.244.1.12"},
	{name: "pod-c", node: testbed.NodeB, addr: "10.244.2.13"},
	{name: "pod-d", node: testbed.NodeB, addr: "10.244.2.14"},
	{name: hostPod, node: testbed.Node, addr: "192.0.2.1", hostNetwork: true},
	{name: "host-b", node: testbed.NodeB, addr: "192.0.2.2", hostNetwork: true},
}

// hostPod is a pod in the node's own network.
const hostPod = "host"

// clients are where probes come from.
var clients = []testbed.Place{"client", "pod-a", farPod, testbed.Node, testbed.NodeB, testbed.Outside}

// farPod is a client whose address is a pod's, but none of this node.
const farPod testbed.Place = "pod-c"

// nodeAddrs are the addresses of the node, the second of which is none that it would choose.
var nodeAddrs = []string{"192.0.2.1", "192.0.2.101"}

// Ports that pods serve; those of the host network serve others.
const (
	podTCP, podTCP2, podTCP3 = 8080, 8081, 9090
	podUDP                   = 5353
	podSCTP                  = 7000
	hostTCP, hostUDP         = 6443, 6053
)

func (m member) ports() []testbed.PodPort {
	if m.hostNetwork {
		return []testbed.PodPort{{Protocol: model.TCP, Port: hostTCP}, {Protocol: model.UDP, Port: hostUDP}}
	}
	ports := []testbed.PodPort{{Protocol: model.UDP, Port: podUDP}}
	for _, port := range []uint16{podTCP, podTCP2, podTCP3} {
		ports = append(ports, testbed.PodPort{Protocol: model.TCP, Port: port})
	}
	if hasSCTP {
		ports = append(ports, testbed.PodPort{Protocol: model.SCTP, Port: podSCTP})
	}
	return ports
}

var hasSCTP = testbed.HasProtocol(model.SCTP)

// newBed is a cluster with the cast.
func newBed(ctx context.Context, bridged bool) (*testbed.Bed, error) {
	spec := testbed.Spec{PodBridge: bridged}
	for _, m := range cast {
		p := testbed.PodSpec{Name: m.name, Node: m.node, Ports: m.ports(), HostNetwork: m.hostNetwork}
		if !m.hostNetwork {
			p.Addrs = both(m.addr)
		}
		spec.Pods = append(spec.Pods, p)
	}
	bed, err := testbed.New(ctx, spec)
	if err != nil {
		return nil, err
	}
	if err := bed.Do(testbed.Node, addSecondAddr); err != nil {
		return nil, fmt.Errorf("second address of the node: %w", err)
	}
	return bed, nil
}

// addSecondAddr gives the node one more address. Its preferred lifetime of 0 keeps it from being a
// source by choice.
func addSecondAddr() error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	for _, a := range both(nodeAddrs[1]) {
		addr, err := netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String())
		if err != nil {
			return err
		}
		addr.ValidLft = math.MaxUint32
		if err := netlink.AddrAdd(eth0, addr); err != nil {
			return err
		}
	}
	return nil
}

// both are an IPv4 address and its IPv6 twin.
func both(v4 string) []netip.Addr {
	a := netip.MustParseAddr(v4)
	return []netip.Addr{a, testbed.EmbedV6(a)}
}

// in is an IPv4 address or its twin.
func in(v6 bool, v4 string) string {
	if v6 {
		return both(v4)[1].String()
	}
	return v4
}
