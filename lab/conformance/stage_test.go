package conformance

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/lab/testbed"
)

// places are all that are no pods.
func places() map[testbed.Place]string {
	return map[testbed.Place]string{testbed.Node: "192.0.2.1", testbed.NodeB: "192.0.2.2", testbed.Outside: "192.0.2.9"}
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

// onNode reports whether a place is the node under test or one of its pods.
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
