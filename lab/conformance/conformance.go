// Package conformance is the one table of cases that every data plane passes. A case says in a file what objects a
// cluster has, which rows they mean, and which answers real packets get:
//
//	testdata/*.txtar ─┬─ objects ─► service.Table ─► State ─┬─ equals the case's state?  (no root)
//	                  │                                     ├─ Lookup says of each probe what the case says?
//	                  │                                     └─► plane ─► kernel ◄─┐
//	                  └─ probes ─────────────────────────────── packets ──────────┘ the case's answers?
//
// The first lines of a file are its rule, in words; docs/semantics.md lists all rules. Then come the sections, each
// with "-2", "-3" and so on for later steps of the case:
//
//	options       flags of the proxy; "family: ipv4 WHY", "family: dual WHY"; "skip PLANE [FAMILY or WAY]: WHY"
//	objects.yaml  what is new or replaces something
//	delete        what goes: "Kind namespace/name"
//	rows          in place of objects: rows for which there are no objects
//	state         all rows in canonical text form
//	problems      how each problem begins
//	probes        see type probe
//
// A case is written in IPv4; its IPv6 form is derived by embedding each address in fd00::/96. A case plays on the
// cluster of package testbed. The node has two more addresses, 192.0.2.101 and 127.0.0.1. This is the cast:
//
//	client  10.244.1.20  node     pods; each serves tcp 8080, 8081 and 9090,
//	pod-a   10.244.1.11  node     udp 5353 and sctp 7000
//	pod-b   10.244.1.12  node
//	pod-c   10.244.2.13  node-b
//	pod-d   10.244.2.14  node-b
//	host    192.0.2.1    node     pods of the host network; they serve tcp 6443 and udp 6053
//	host-b  192.0.2.2    node-b
//
// Beside the table there are random objects, where Lookup is the oracle of the kernel. Kernel calls that fail are in
// RunFaults; see also RunRandom. All of that is in the tests of this package; the cast is package sidebyside's as well.
package conformance

import (
	"context"
	"fmt"
	"math"
	"net/netip"

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
