package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Member is a pod of the cast; see the package's comment.
type Member struct {
	Name        string
	Node        testbed.Place
	Addr        string
	HostNetwork bool
}

// Cast is also that of package sidebyside.
func Cast() []Member {
	return []Member{
		{Name: "client", Node: testbed.Node, Addr: "10.244.1.20"},
		{Name: "pod-a", Node: testbed.Node, Addr: "10.244.1.11"},
		{Name: "pod-b", Node: testbed.Node, Addr: "10.244.1.12"},
		{Name: "pod-c", Node: testbed.NodeB, Addr: "10.244.2.13"},
		{Name: "pod-d", Node: testbed.NodeB, Addr: "10.244.2.14"},
		{Name: "host", Node: testbed.Node, Addr: "192.0.2.1", HostNetwork: true},
		{Name: "host-b", Node: testbed.NodeB, Addr: "192.0.2.2", HostNetwork: true},
	}
}

// nodeAddrs are the addresses of the node under test; the first is its primary one.
func nodeAddrs() []string { return []string{"192.0.2.1", "192.0.2.101", "127.0.0.1"} }

// places are all that are no pods.
func places() map[testbed.Place]string {
	return map[testbed.Place]string{testbed.Node: "192.0.2.1", testbed.NodeB: "192.0.2.2", testbed.Outside: "192.0.2.9"}
}

func (m Member) ports() []testbed.PodPort {
	if m.HostNetwork {
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
	for _, m := range Cast() {
		v4 := netip.MustParseAddr(m.Addr)
		if a.Addr() == v4 || a.Addr() == embedAddr(v4) {
			return m.Name
		}
	}
	return "nobody"
}

// onNode reports whether somebody is the node under test or one of its pods.
func onNode(who testbed.Place) bool {
	return who == testbed.Node || slices.ContainsFunc(Cast(), func(m Member) bool {
		return m.Name == string(who) && m.Node == testbed.Node
	})
}

// arrival is the source address of a packet that a place sends to an address, and the interface on
// which it reaches the node under test.
func (c *testCase) arrival(from testbed.Place, to netip.Addr) (source netip.Addr, iface string) {
	v4, ok := places()[from]
	iface = "eth0"
	for _, m := range Cast() {
		if m.Name == string(from) {
			v4, ok = m.Addr, true
			if m.Node == testbed.Node {
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

// NewBed builds the cluster with the cast in it.
func NewBed(ctx context.Context, bridged bool) (*testbed.Bed, error) {
	return newBed(ctx, testbed.Spec{PodBridge: bridged})
}

func newBed(ctx context.Context, spec testbed.Spec) (*testbed.Bed, error) {
	for _, m := range Cast() {
		p := testbed.PodSpec{Name: m.Name, Node: m.Node, Ports: m.ports(), HostNetwork: m.HostNetwork}
		if !m.HostNetwork {
			v4 := netip.MustParseAddr(m.Addr)
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

// likeHardware has the LAN's cables do what others than virtual ones do.
func likeHardware(bed *testbed.Bed) error {
	machines := slices.Collect(maps.Keys(places()))
	errs := []error{bed.SetFeature(testbed.LAN, string(testbed.Node), testbed.GRO, true)}
	for _, m := range Cast() {
		if !m.HostNetwork {
			machines = append(machines, testbed.Place(m.Name))
		}
	}
	for _, m := range machines {
		errs = append(errs, bed.SetFeature(m, "eth0", testbed.TXChecksums, false))
	}
	return errors.Join(errs...)
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
