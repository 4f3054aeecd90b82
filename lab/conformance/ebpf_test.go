package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// probed is what the first plane has found out, for the others.
var probed ebpf.Probed

// ebpfPlane serves the sockets of the calling thread's cgroup, and packets itself or by another plane.
func ebpfPlane(t *testing.T, serve ebpf.Server, behind dataplane.New) dataplane.New {
	return ebpfPlaneAs(t, ebpf.Options{Serve: serve, Packets: behind})
}

func ebpfPlaneAs(t *testing.T, o ebpf.Options) dataplane.New {
	lack.Need(t, lack.Cgroup)
	pins := testbed.NeedBPFFS(t)
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		cgroup, err := threadCgroup()
		if err != nil {
			return nil, err
		}
		o := o
		o.Cgroup, o.Pins, o.Probed = cgroup, filepath.Join(pins, filepath.Base(cgroup)), &probed
		o.Sizes.Translations = 1 << 14 // the machine's memory is for many tests
		return ebpf.New(o)(c)
	}
}

// threadCgroup is the directory of the calling thread's cgroup.
func threadCgroup() (string, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return "", err
	}
	_, path, _ := strings.Cut(string(own), "0::")
	for _, m := range mounts {
		if m.FSType == "cgroup2" {
			return filepath.Join(m.MountPoint, strings.TrimSpace(path)), nil
		}
	}
	return "", fmt.Errorf("no control groups of version 2: %w", errors.ErrUnsupported)
}

func TestEBPF(t *testing.T) {
	t.Parallel()
	conformance.RunSockets(t, "ebpf", ebpfPlane(t, ebpf.TC, plane))
}

// The kernel has no programs for packets, or they are switched off.
func TestEBPF_behind(t *testing.T) {
	t.Parallel()
	conformance.RunSockets(t, "ebpf", ebpfPlane(t, ebpf.Behind, plane))
}

// With known flows from outside to outside past the stack.
func TestEBPF_accelerated(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.Linux63)
	conformance.RunAccelerated(t, "ebpf", ebpfPlaneAs(t, ebpf.Options{
		Serve: ebpf.TC, Packets: plane, Acceleration: ebpf.AccelerationNative,
	}))
}

// Sockets alone, without another plane behind them, pass the cases that concern them.
func TestEBPF_alone(t *testing.T) {
	t.Parallel()
	conformance.RunOnlySockets(t, "sockets", ebpfPlane(t, ebpf.Behind, nil))
}

func TestEBPF_random(t *testing.T) {
	t.Parallel()
	conformance.RunRandomSockets(t, ebpfPlane(t, ebpf.TC, plane))
}

func TestEBPF_faults(t *testing.T) {
	t.Parallel()
	conformance.RunFaultsSockets(t, ebpfPlane(t, ebpf.TC, plane))
}

const untouched = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
frontend 203.0.113.1:53/udp any forward default/web:dns cluster snat never
frontend 10.96.0.10:81/tcp any reject default/web:none
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
backend default/web:dns cluster 10.244.1.11:5353 local
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
`

// While nothing is left for the plane behind, packets are neither tracked nor filtered on the proxy's account.
func TestEBPF_withoutNetfilter(t *testing.T) {
	t.Parallel()
	pod := func(name string, node testbed.Place, addr string) testbed.PodSpec {
		return testbed.PodSpec{
			Name: name, Node: node, Addrs: []netip.Addr{netip.MustParseAddr(addr)},
			Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}},
		}
	}
	bed := testbed.Need(t, testbed.Spec{Cgroup: true, Pods: []testbed.PodSpec{
		pod("pod-a", testbed.Node, "10.244.1.11"), pod("pod-c", testbed.NodeB, "10.244.2.13"),
	}})
	var p dataplane.Dataplane
	must(t, bed.Do(testbed.Node, func() (err error) {
		p, err = ebpfPlane(t, ebpf.TC, plane)(dataplane.Config{Mark: dataplane.DefaultMark})
		return err
	}))
	t.Cleanup(func() { must(t, errors.Join(p.Remove(context.Background()), p.Close())) })

	first, err := model.ParseState(untouched)
	must(t, err)
	must(t, p.Sync(t.Context(), first))
	served(t, bed)
	tracked(t, bed, false)
	have := first
	for _, c := range []struct {
		ranges string
		want   testbed.Result
	}{
		{"198.51.100.0/24", testbed.TimedOut}, // none of the node's addresses
		{"192.0.2.0/24", testbed.Answered},    // all
	} {
		next := limitedTo(t, c.ranges)
		must(t, p.Apply(t.Context(), next, model.Diff(have, next)))
		have = next
		if got := asks(t, bed); got != c.want {
			t.Errorf("only %s may use a Service, and the node is %s", c.ranges, got)
		}
		tracked(t, bed, false)
	}
	must(t, bed.Do(testbed.Node, anotherAddr))
	limited := have
	for report := (dataplane.Report{}); len(report.Drifts) == 0; { // the plane hears of the address at some time
		report, err = p.Audit(t.Context(), limited, dataplane.Quick)
		must(t, errors.Join(err, t.Context().Err()))
	}
	must(t, p.Sync(t.Context(), limited))
	if asks(t, bed) != testbed.Answered {
		t.Error("the node is not answered by the plane behind")
	}
	tracked(t, bed, true)
	must(t, p.Apply(t.Context(), first, model.Diff(limited, first)))
	must(t, bed.Do(testbed.Node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	served(t, bed)
	tracked(t, bed, false)
}

// limitedTo has one more Service, which only some may use.
func limitedTo(t *testing.T, ranges string) *model.State {
	t.Helper()
	s, err := model.ParseState(untouched +
		"frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow " + ranges + "\n")
	must(t, err)
	return s
}

// asks is what becomes of the node there. Before Linux 5.18 it is not permitted what it should wait for.
func asks(t *testing.T, bed *testbed.Bed) testbed.Result {
	t.Helper()
	o, err := bed.Probe(t.Context(), testbed.Probe{From: testbed.Node, To: netip.MustParseAddrPort("203.0.113.1:80")})
	if errors.Is(err, unix.EPERM) {
		return testbed.TimedOut
	}
	must(t, err)
	return o.Result
}

func anotherAddr() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 18, 0, 1), Mask: net.CIDRMask(32, 32)}})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// served is an error if a client is not served.
func served(t *testing.T, bed *testbed.Bed) {
	t.Helper()
	for _, c := range []struct {
		from     testbed.Place
		protocol model.Protocol
		to       string
		want     testbed.Result
	}{
		{testbed.Outside, model.TCP, "192.0.2.1:30080", testbed.Answered},
		{testbed.Outside, model.UDP, "203.0.113.1:53", testbed.Answered},
		{testbed.Outside, model.TCP, "10.96.0.10:81", testbed.Refused},
		{testbed.Node, model.TCP, "10.96.0.10:80", testbed.Answered},
		{testbed.Node, model.TCP, "10.96.0.10:81", testbed.Refused},
		{"pod-a", model.TCP, "192.0.2.1:30080", testbed.Answered},
	} {
		p := testbed.Probe{From: c.from, Protocol: c.protocol, To: netip.MustParseAddrPort(c.to), Timeout: 15 * time.Second}
		if o, err := bed.Probe(t.Context(), p); err != nil || o.Result != c.want {
			t.Errorf("%s to %s/%s: %s (%v); want %s", c.from, c.to, c.protocol, o, err, c.want)
		}
	}
}

// tracked is an error if the node has rules, or tracks connections, and should not, or the other way round.
func tracked(t *testing.T, bed *testbed.Bed, want bool) {
	t.Helper()
	rules, err := bed.Command(t.Context(), testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	must(t, err)
	var flows []*netlink.ConntrackFlow
	must(t, bed.Do(testbed.Node, func() (err error) {
		flows, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		return err
	}))
	if (len(rules) > 0) != want || (len(flows) > 0) != want {
		t.Errorf("rules and flows should be there: %t; they are:\n%s\n%v", want, rules, flows)
	}
}
