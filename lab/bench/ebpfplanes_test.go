package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// contender is a way in which connections come to a pod.
type contender struct {
	name  string
	plane dataplane.New // nil: none, they go to the pod itself
	ebpf  *ebpf.Options // the plane's, but for where it is
	idle  bool          // past programs that do nothing
}

// contenders are what is compared for connections that are open, and, with the one that has drivers serve packets, for
// those from outside. The planes are as the daemon runs them: the one behind ebpf has what is left, here nothing.
func contenders() []contender {
	packets := localhost.Wrap(conntrack.Wrap(nftables.New))
	return []contender{
		{name: direct},
		{name: directAgain},
		{name: idlePrograms, idle: true},
		{name: "ebpf", ebpf: &ebpf.Options{Packets: packets}},
		{name: "nftables", plane: packets},
	}
}

func contendersOutside() []contender {
	fast := ebpf.Options{Packets: localhost.Wrap(conntrack.Wrap(nftables.New)), Acceleration: ebpf.AccelerationNative}
	return append(contenders(), contender{name: "ebpf, XDP", ebpf: &fast})
}

// remotePod is a server on the other node.
const remotePod = "server-far"

// arenaFor makes a cluster in which a contender serves rows.
func (c contender) arenaFor(b *testing.B, rows func(*testbed.Bed) string) *arena {
	b.Helper()
	a := newWideArena(b)
	c.install(b, a.bed, rows(a.bed))
	return a
}

// newWideArena makes a cluster without a proxy, with a server on the other node, too.
func newWideArena(b *testing.B) *arena {
	b.Helper()
	pods := append(arenaPods(), testbed.PodSpec{Name: remotePod, Node: testbed.NodeB})
	bed := testbed.Need(b, testbed.Spec{Pods: pods, Cgroup: true})
	a := newArenaOn(b, bed)
	if err := bed.Do(remotePod, a.listen); err != nil {
		b.Fatal(err)
	}
	return a
}

// install has a contender serve rows until the benchmark ends.
func (c contender) install(b *testing.B, bed *testbed.Bed, rows string) {
	b.Helper()
	b.Cleanup(c.serve(b, bed, rows))
}

// serve has a contender serve rows until the end.
func (c contender) serve(b *testing.B, bed *testbed.Bed, rows string) (end func()) {
	b.Helper()
	if c.idle {
		return attachIdle(b, bed)
	}
	release := func() error { return nil }
	if c.ebpf != nil {
		pins, path, err := testbed.BPFFS()
		if err != nil {
			b.Fatal(err)
		}
		release = pins.Close
		o := *c.ebpf
		if o.Acceleration == ebpf.AccelerationNative {
			takeFrames(b, bed)
		}
		o.Cgroup, o.Pins = bed.Cgroup(), filepath.Join(path, "fairlead")
		c.plane = ebpf.New(o)
	}
	if c.plane == nil {
		return func() {}
	}
	state, err := model.ParseState(rows)
	if err != nil {
		b.Fatal(err)
	}
	var plane dataplane.Dataplane
	err = bed.Do(testbed.Node, func() (err error) {
		plane, err = c.plane(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(errors.Join(err, release()))
	}
	end = func() {
		if err := errors.Join(plane.Remove(context.WithoutCancel(b.Context())), plane.Close(), release()); err != nil {
			b.Error(err)
		}
	}
	if err := plane.Sync(b.Context(), state); err != nil {
		end()
		b.Fatal(err)
	}
	return end
}

// to is a client at a place that connects to one address.
func (a *arena) to(place testbed.Place, address netip.AddrPort) *client {
	c := a.target(address)
	c.place = place
	return c
}

// local is the first server's address, remote that of the one on the other node.
func local(bed *testbed.Bed) netip.AddrPort {
	return netip.AddrPortFrom(bed.Addr(testbed.Place(serverPod(0)), false), podPort)
}

func remote(bed *testbed.Bed) netip.AddrPort {
	return netip.AddrPortFrom(bed.Addr(remotePod, false), podPort)
}

// forward are the rows of a Service with one backend.
func forward(service string, address, backend netip.AddrPort, how string) string {
	return fmt.Sprintf("backend default/%[1]s cluster %[3]s\nfrontend %[2]s/tcp any forward default/%[1]s cluster snat %[4]s\n"+
		"pool default/%[1]s cluster\n", service, address, backend, how)
}

// takeFrames lets the switch take what XDP programs of the node send, as hardware does.
func takeFrames(b *testing.B, bed *testbed.Bed) {
	b.Helper()
	if err := bed.SetFeature(testbed.LAN, string(testbed.Node), testbed.GRO, true); err != nil {
		b.Fatal("let the switch take frames: ", err)
	}
}
