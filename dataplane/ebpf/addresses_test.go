package ebpf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// anyDevice has one address of each family for all devices.
func anyDevice(addrs ...netip.Addr) nodeAddrs {
	out := nodeAddrs{}
	for _, a := range addrs {
		out[addrKey(0, anywhere(a.Is4()))] = a
	}
	return out
}

// planeOf is a plane that serves the packets of a bed's node.
func planeOf(t *testing.T, bed *testbed.Bed, rows string) *Plane {
	t.Helper()
	return planeWith(t, bed, rows, dataplane.Config{})
}

func planeWith(t *testing.T, bed *testbed.Bed, rows string, c dataplane.Config) *Plane {
	t.Helper()
	dir := testbed.NeedBPFFS(t)
	var p *Plane
	err := bed.Do(testbed.Node, func() (err error) {
		o := Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(dir, "fairlead"), Serve: TC}
		p, err = open(c, o)
		return err
	})
	if errors.Is(err, dataplane.ErrUnsupported) {
		lack.Skip(t, lack.Root, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Remove(context.Background()), p.Close()); err != nil {
			t.Error(err)
		}
	})
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	return p
}

// addDevice adds a device that is up to a place, with addresses and routes.
func addDevice(t *testing.T, bed *testbed.Bed, at testbed.Place, l netlink.Link, addrs []string, routes ...string) {
	t.Helper()
	err := bed.Do(at, func() error {
		if err := netlink.LinkAdd(l); err != nil {
			return err
		}
		for _, text := range addrs {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(l, a); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
		for _, text := range routes {
			r := routeBy(l, text)
			if err := netlink.RouteReplace(&r); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// routeBy is a route by a device to a prefix, whose first address is the next hop if it has others.
func routeBy(l netlink.Link, prefix string) netlink.Route {
	p := netip.MustParsePrefix(prefix)
	r := netlink.Route{
		LinkIndex: l.Attrs().Index, Flags: int(netlink.FLAG_ONLINK),
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
	}
	if !p.IsSingleIP() {
		r.Gw = p.Addr().AsSlice()
	} else {
		r.Flags = 0
	}
	return r
}

// Pods of the other node are behind a tunnel that has addresses of its own, and its peers know no others: so it is with
// flannel.
func TestHidden_overlay(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.VXLAN)
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	tunnel := func(from, to testbed.Place) *netlink.Vxlan {
		return &netlink.Vxlan{
			LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 1, Port: 8472,
			SrcAddr: bed.Addr(from, false).AsSlice(), Group: bed.Addr(to, false).AsSlice(),
		}
	}
	addDevice(t, bed, testbed.Node, tunnel(testbed.Node, testbed.NodeB),
		[]string{"10.244.1.0/32", "fe80::1/64", "fd00::af4:100/128"},
		"10.244.2.0/32", "10.244.2.0/24", "fd00::af4:200/128", "fd00::af4:200/120")
	addDevice(t, bed, testbed.NodeB, tunnel(testbed.NodeB, testbed.Node),
		[]string{"10.244.2.0/32", "fe80::2/64", "fd00::af4:200/128"},
		"10.244.1.0/32", "fd00::af4:100/128")
	planeOf(t, bed, outsideRows)
	for to, want := range map[string]string{
		"192.0.2.1:30080":        "pod-a source 192.0.2.1, pod-c source 10.244.1.0", // a device to a pod has no address
		"[fd00::c000:201]:30080": "pod-a source fd00::c000:201, pod-c source fd00::af4:100",
	} {
		p := testbed.Probe{From: testbed.Outside, Protocol: model.TCP, To: netip.MustParseAddrPort(to)}
		if got := probes(t, bed, p, 24); got != want {
			t.Errorf("%s: %s; want %s", to, got, want)
		}
	}
}

// Of several addresses of a device that one is taken which MASQUERADE takes: the kernel is asked first.
func TestHidden_masquerade(t *testing.T) {
	const masquerade = `
		add table inet test
		add chain inet test arrive { type nat hook prerouting priority -100; }
		add chain inet test leave { type nat hook postrouting priority 100; }
		add rule inet test arrive ip daddr 192.0.2.1 tcp dport 30080 dnat ip to 10.244.2.13:8080
		add rule inet test arrive ip6 daddr fd00::c000:201 tcp dport 30080 dnat ip6 to [fd00::af4:20d]:8080
		add rule inet test leave masquerade`
	rows := strings.NewReplacer("backend default/web:http cluster 10.244.1.11:8080 local\n", "",
		"backend default/web:http cluster6 [fd00::af4:10b]:8080 local\n", "").Replace(outsideRows)
	for name, c := range map[string]struct{ node, other, want, want6 string }{
		"next hop in the second subnet": {
			"ip addr add 198.51.100.1/24 dev eth0; ip route replace 10.244.2.13 via 198.51.100.2",
			"ip addr add 198.51.100.2/24 dev eth0", "198.51.100.1", "fd00::c000:201",
		},
		"next hop in the first subnet": {
			"ip addr add 198.51.100.1/24 dev eth0; ip route replace 10.244.2.13 via 192.0.2.2",
			"ip addr add 198.51.100.2/24 dev eth0", "192.0.2.1", "fd00::c000:201",
		},
		"a preferred source": {
			"ip addr add 198.51.100.1/24 dev eth0; ip route replace 10.244.2.13 via 192.0.2.2 src 198.51.100.1",
			"ip addr add 198.51.100.2/24 dev eth0", "192.0.2.1", "fd00::c000:201",
		},
		"two addresses in a subnet": {
			"ip addr add 192.0.2.77/24 dev eth0; ip route replace 10.244.2.13 via 192.0.2.2 src 192.0.2.77", "true",
			"192.0.2.1", "fd00::c000:201",
		},
		"a peer": {
			"ip addr add 198.51.100.1 peer 198.51.100.2 dev eth0; ip route replace 10.244.2.13 via 198.51.100.2",
			"ip addr add 198.51.100.2 peer 198.51.100.1 dev eth0", "198.51.100.1", "fd00::c000:201",
		},
		"a global address": {
			"ip addr add 2001:db8::1/64 dev eth0 nodad", "ip addr add 2001:db8::2/64 dev eth0 nodad",
			"192.0.2.1", "fd00::c000:201",
		},
		"an address that is farther": {
			"ip addr add fd99::1/64 dev eth0 nodad", "ip addr add fd99::2/64 dev eth0 nodad", "192.0.2.1", "fd00::c000:201",
		},
		"an address that is nearer": {
			"ip addr add fd00::af0:1/128 dev eth0 nodad", "ip -6 route replace fd00::af0:1 via fd00::c000:201",
			"192.0.2.1", "fd00::af0:1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
			runAt(t, bed, testbed.NodeB, "sh", "-ec", c.other)
			runAt(t, bed, testbed.Node, "sh", "-ec", c.node)
			want := "pod-c source " + c.want + ", pod-c source " + c.want6
			runAt(t, bed, testbed.Node, "nft", masquerade)
			if got := sources(t, bed); got != want {
				t.Errorf("MASQUERADE has %s; want %s", got, want)
			}
			runAt(t, bed, testbed.Node, "nft", "delete table inet test")
			p := planeOf(t, bed, rows)
			if got := sources(t, bed); got != want {
				t.Errorf("%s; want %s; programs know %s", got, want, p.devices.hiddenBehind())
			}
		})
	}
}

// sources are what a client seems to come from, in both families. Neighbours may have to be found first.
func sources(t *testing.T, bed *testbed.Bed) string {
	t.Helper()
	var seen []string
	for _, to := range []string{"192.0.2.1:30080", "[fd00::c000:201]:30080"} {
		p := testbed.Probe{
			From: testbed.Outside, Protocol: model.TCP, To: netip.MustParseAddrPort(to), Timeout: time.Second,
		}
		got := probes(t, bed, p, 1)
		for tries := 0; got == "timed out" && tries < 10; tries++ {
			got = probes(t, bed, p, 1)
		}
		seen = append(seen, got)
	}
	return strings.Join(seen, ", ")
}

func runAt(t *testing.T, bed *testbed.Bed, at testbed.Place, command ...string) {
	t.Helper()
	if out, err := bed.Command(t.Context(), at, command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// The default route moves to another device while the plane serves.
func TestHidden_route(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	p := planeOf(t, bed, outsideRows)
	probe := testbed.Probe{From: testbed.Outside, Protocol: model.UDP, To: netip.MustParseAddrPort("192.0.2.1:30053")}
	if got := probes(t, bed, probe, 1); got != "pod-a source 192.0.2.1" {
		t.Error(got)
	}
	other := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "other"}}
	addDevice(t, bed, testbed.Node, other, []string{"198.18.0.1/24"})
	err := bed.Do(testbed.Node, func() error {
		gone := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}
		if err := netlink.RouteDel(gone); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{
			LinkIndex: other.Index, Gw: net.IPv4(198, 18, 0, 254), Flags: int(netlink.FLAG_ONLINK),
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	probe.Timeout = time.Second
	eventually.Nil(t, "by the other device", func() error {
		if got := probes(t, bed, probe, 1); got != "pod-a source 198.18.0.1" {
			return fmt.Errorf("%s; programs know %s", got, p.devices.hiddenBehind())
		}
		return nil
	})
}

// A connection keeps its address when the node gets another one, however long it was silent.
func TestHidden_keeps(t *testing.T) {
	t.Parallel()
	r := newPacketRun(t, outsideRows)
	r.sent("lan udp 192.0.2.9:4000 > 192.0.2.1:30053", "out udp 192.0.2.9:4000 > 10.244.1.11:5353")
	moved := anyDevice(netip.MustParseAddr("192.0.2.77"))
	if err := moved.put(r.programs.Maps[packetsMapNodeAddrs], nil); err != nil {
		t.Fatal(err)
	}
	translations := r.programs.Maps[packetsMapTranslations]
	flow := at(packetsHookINGRESS, unix.IPPROTO_UDP, endpointAt("192.0.2.9:4000"), endpointAt("192.0.2.1:30053"))
	var value packetsTranslation
	if err := translations.Lookup(flow, &value); err != nil {
		t.Fatal(err)
	}
	value.Last -= 11 * packetsTicksTICKS
	if err := translations.Put(flow, value); err != nil {
		t.Fatal(err)
	}
	r.play(`
lan udp 192.0.2.9:4000 > 192.0.2.1:30053 -> udp 192.0.2.9:4000 > 10.244.1.11:5353
out udp 192.0.2.9:4000 > 10.244.1.11:5353 -> udp 192.0.2.1:4000 > 10.244.1.11:5353
lan udp 192.0.2.9:4001 > 192.0.2.1:30053 -> udp 192.0.2.9:4001 > 10.244.1.11:5353
out udp 192.0.2.9:4001 > 10.244.1.11:5353 -> udp 192.0.2.77:4001 > 10.244.1.11:5353
`[1:])
}

// The node loses the address that a client is hidden behind, who goes on asking.
func TestHidden_gone(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	lost, err := netlink.ParseAddr("192.0.2.77/32")
	if err != nil {
		t.Fatal(err)
	}
	at := func(f func(eth0 netlink.Link) error) {
		t.Helper()
		err := bed.Do(testbed.Node, func() error {
			eth0, err := netlink.LinkByName("eth0")
			return errors.Join(err, f(eth0))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	at(func(eth0 netlink.Link) error {
		err := netlink.AddrAdd(eth0, lost)
		return errors.Join(err, netlink.RouteReplace(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Gw: net.IPv4(192, 0, 2, 254), Src: lost.IP,
		}))
	})
	p := planeOf(t, bed, outsideRows)
	c, err := bed.Dial(t.Context(), testbed.Outside, model.UDP, netip.MustParseAddrPort("192.0.2.1:30053"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func(wait time.Duration) string {
		answer := make([]byte, 200)
		if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("?")); err != nil {
			return err.Error()
		}
		n, err := c.Read(answer)
		if err != nil {
			return err.Error()
		}
		return string(answer[:n])
	}
	if got := ask(eventually.Patience()); !strings.Contains(got, "192.0.2.77") {
		t.Fatal(got)
	}
	at(func(eth0 netlink.Link) error { return netlink.AddrDel(eth0, lost) })
	eventually.Nil(t, "asked again and again", func() error {
		if got := ask(100 * time.Millisecond); !strings.Contains(got, "192.0.2.1") {
			return fmt.Errorf("%s; programs know %s", got, p.devices.hiddenBehind())
		}
		return nil
	})
}

// Sockets may have all ports, as many nodes are tuned: clients are hidden all the same, and it is said once.
func TestHidden_ports(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	err := bed.Do(testbed.Node, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("1024 65535"), 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	p := planeWith(t, bed, outsideRows, dataplane.Config{Log: log})
	s, err := model.ParseState(outsideRows)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(said.String(), "ip_local_port_range"); n != 1 {
		t.Errorf("said %d times: %s", n, said.String())
	}
	probe := testbed.Probe{From: testbed.Outside, Protocol: model.TCP, To: netip.MustParseAddrPort("192.0.2.1:30080")}
	if got, want := probes(t, bed, probe, 24), "pod-a source 192.0.2.1, pod-c source 192.0.2.1"; got != want {
		t.Errorf("%s; want %s", got, want)
	}
}

func endpointAt(text string) packetsEndpoint {
	return packetsEnd(netip.MustParseAddrPort(text))
}
