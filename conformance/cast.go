package conformance

import (
	"context"
	"fmt"
	"math"
	"net/netip"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// member is a pod of the cast; see the package's comment.
type member struct {
	name        string
	node        testbed.Place
	addr        string
	hostNetwork bool
}

func cast() []member {
	return []member{
		{name: "client", node: testbed.Node, addr: "10.244.1.20"},
		{name: "pod-a", node: testbed.Node, addr: "10.244.1.11"},
		{name: "pod-b", node: testbed.Node, addr: "10.244.1.12"},
		{name: "pod-c", node: testbed.NodeB, addr: "10.244.2.13"},
		{name: "pod-d", node: testbed.NodeB, addr: "10.244.2.14"},
		{name: "host", node: testbed.Node, addr: "192.0.2.1", hostNetwork: true},
		{name: "host-b", node: testbed.NodeB, addr: "192.0.2.2", hostNetwork: true},
	}
}

// nodeAddrs are the addresses of the node under test; the first is its primary one.
func nodeAddrs() []string { return []string{"192.0.2.1", "192.0.2.101", "127.0.0.1"} }

// places are all that are no pods.
func places() map[testbed.Place]string {
	return map[testbed.Place]string{testbed.Node: "192.0.2.1", testbed.NodeB: "192.0.2.2", testbed.Outside: "192.0.2.9"}
}

func (m member) ports() []testbed.PodPort {
	if m.hostNetwork {
		return []testbed.PodPort{{Protocol: model.TCP, Port: 6443}, {Protocol: model.UDP, Port: 6053}}
	}
	ports := []testbed.PodPort{
		{Protocol: model.TCP, Port: 8080},
		{Protocol: model.TCP, Port: 8081},
		{Protocol: model.TCP, Port: 9090},
		{Protocol: model.UDP, Port: 5353},
	}
	if testbed.HasProtocol(model.SCTP) {
		ports = append(ports, testbed.PodPort{Protocol: model.SCTP, Port: 7000})
	}
	return ports
}

// podAt is the name of the pod that serves at an address; of a host's pods the one with that port.
func podAt(a netip.AddrPort) string {
	for _, m := range cast() {
		v4 := netip.MustParseAddr(m.addr)
		if a.Addr() == v4 || a.Addr() == embedAddr(v4) {
			return m.name
		}
	}
	return "nobody"
}

// arrival is the source address of a packet that a place sends to an address, and the interface on
// which it reaches the node under test.
func (c *testCase) arrival(from testbed.Place, to netip.Addr) (source netip.Addr, iface string) {
	v4, ok := places()[from]
	iface = "eth0"
	for _, m := range cast() {
		if m.name == string(from) {
			v4, ok = m.addr, true
			if m.node == testbed.Node {
				iface = c.podInterface()
			}
		}
	}
	if !ok {
		return netip.Addr{}, ""
	}
	source = netip.MustParseAddr(v4)
	if to.Is6() {
		source = embedAddr(source)
	}
	if from == testbed.Node {
		if to.IsLoopback() {
			source = to
		}
		return source, ""
	}
	return source, iface
}

// podInterface is how the interface is called on which the packets of the node's pods arrive.
func (c *testCase) podInterface() string {
	if c.bridged() {
		return "cbr0"
	}
	return "cali0"
}

// bridged reports whether the case wants the pods on a bridge.
func (c *testCase) bridged() bool { return c.options["pod-bridge"] == "true" }

// newBed builds the cluster with the cast in it.
func newBed(ctx context.Context, bridged bool) (*testbed.Bed, error) {
	spec := testbed.Spec{PodBridge: bridged}
	for _, m := range cast() {
		p := testbed.PodSpec{Name: m.name, Node: m.node, Ports: m.ports(), HostNetwork: m.hostNetwork}
		if !m.hostNetwork {
			v4 := netip.MustParseAddr(m.addr)
			p.Addrs = []netip.Addr{v4, embedAddr(v4)}
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

// addSecondAddr gives the node one more address, which its own packets do not use.
func addSecondAddr() error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	v4 := netip.MustParseAddr(nodeAddrs()[1])
	for _, a := range []netip.Addr{v4, embedAddr(v4)} {
		addr, err := netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String())
		if err != nil {
			return err
		}
		addr.ValidLft = math.MaxUint32 // and a preferred lifetime of 0: never a source by choice
		if err := netlink.AddrAdd(eth0, addr); err != nil {
			return err
		}
	}
	return nil
}
