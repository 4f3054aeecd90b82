package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const outsideRows = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http local 10.244.1.11:8080 local
backend default/web:http cluster6 [fd00::af4:10b]:8080 local
backend default/web:http cluster6 [fd00::af4:20d]:8080
backend default/web:dns cluster 10.244.1.11:5353 local
backend default/web:dns cluster6 [fd00::af4:20d]:5353
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http local snat never
frontend 203.0.113.1:80/tcp internal forward default/web:http cluster snat offcluster
frontend 192.0.2.1:30053/udp any forward default/web:dns cluster snat offcluster
frontend 203.0.113.1:53/udp any forward default/web:dns cluster snat never
frontend [fd00::c000:201]:30080/tcp any forward default/web:http cluster6 snat offcluster
frontend [fd00::c000:201]:30053/udp any forward default/web:dns cluster6 snat offcluster
frontend 203.0.113.2:80/tcp any forward default/web:http cluster snat never allow 198.51.100.0/24
backend default/web:deaf cluster 10.244.1.11:9 local
backend default/web:deaf cluster6 [fd00::af4:20d]:9
frontend 192.0.2.1:9/tcp any forward default/web:deaf cluster snat offcluster
frontend 192.0.2.1:9/udp any forward default/web:deaf cluster snat offcluster
frontend 203.0.113.1:9/udp any forward default/web:deaf cluster snat never
frontend [fd00::c000:201]:9/udp any forward default/web:deaf cluster6 snat offcluster
frontend 192.0.2.1:30081/tcp any reject default/none
frontend 192.0.2.1:30081/udp any reject default/none
frontend 192.0.2.1:30081/sctp any reject default/none
frontend [fd00::c000:201]:30081/tcp any reject default/none
frontend [fd00::c000:201]:30081/udp any reject default/none
frontend [fd00::c000:201]:30081/sctp any reject default/none
guard 203.0.113.0/24 drop
guard 203.0.113.1/32 reject
guard fd00::cb00:7101/128 reject
pods 10.244.0.0/16
pods fd00::af4:0/112
`

// devicesOf are those of the node, to which programs are attached by filters of tc or by links.
func devicesOf(t *testing.T, bed *testbed.Bed, filters bool) *devices {
	t.Helper()
	dir := testbed.NeedBPFFS(t)
	var d *devices
	err := bed.Do(testbed.Node, func() (err error) {
		d, err = newDevices(filepath.Join(dir, "links"), nil, func(string) error { return nil })
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	d.filters = filters
	t.Cleanup(func() {
		if err := errors.Join(d.remove(), d.close()); err != nil {
			t.Error(err)
		}
	})
	return d
}

// attachTo attaches the programs to all devices of the node but lo, by filters of tc or by links.
func attachTo(t *testing.T, bed *testbed.Bed, filters bool, r packetRun) *devices {
	t.Helper()
	d := devicesOf(t, bed, filters)
	if err := d.attachAll(r); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *devices) attachAll(r packetRun) error {
	p := &packets{Collection: r.programs, others: map[kind]*ebpf.Collection{{pods: true}: r.programs}}
	return d.replace(p, model.Pods{Interfaces: []string{"cali*"}})
}

func outsideBed(t *testing.T) *testbed.Bed {
	t.Helper()
	return outsideBedOf(t, testbed.Spec{})
}

func outsideBedOf(t *testing.T, spec testbed.Spec) *testbed.Bed {
	t.Helper()
	pod := func(name string, node testbed.Place, addr string) testbed.PodSpec {
		v4 := netip.MustParseAddr(addr)
		return testbed.PodSpec{
			Name: name, Node: node, Addrs: []netip.Addr{v4, testbed.EmbedV6(v4)},
			Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}},
		}
	}
	spec.Pods = []testbed.PodSpec{
		pod("pod-a", testbed.Node, "10.244.1.11"), pod("pod-c", testbed.NodeB, "10.244.2.13"),
	}
	bed := testbed.Need(t, spec)
	return bed
}

// probes are the outcomes of some probes, each once. After silence, which takes long, there are no more of them.
func probes(t *testing.T, bed *testbed.Bed, p testbed.Probe, n int) string {
	t.Helper()
	var seen []string
	p.Timeout = cmp.Or(p.Timeout, 10*time.Second)
	for range n {
		o, err := bed.Probe(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, o.String())
		if o.Result == testbed.TimedOut {
			break
		}
	}
	slices.Sort(seen)
	return strings.Join(slices.Compact(seen), ", ")
}

// refused tries what is to be refused, and fails unless it is at once.
func refused(t *testing.T, bed *testbed.Bed, protocols []model.Protocol) {
	t.Helper()
	for _, from := range []testbed.Place{testbed.Outside, "pod-a"} {
		for _, protocol := range protocols {
			for _, to := range []string{
				"192.0.2.1:30081", "203.0.113.1:81", "[fd00::c000:201]:30081", "[fd00::cb00:7101]:81",
			} {
				p := testbed.Probe{From: from, Protocol: protocol, To: netip.MustParseAddrPort(to)}
				want := "refused"
				if protocol == model.SCTP && p.To.Addr().Is4() {
					want = "unreachable" // is the protocol then
				}
				if got := probes(t, bed, p, 1); got != want {
					t.Errorf("%s to %s/%s: %s; want %s", from, to, protocol, got, want)
				}
			}
		}
	}
}

// Checksums are in the packets or not when they arrive, and a device of the node computes those of what it sends or not.
func TestRefused(t *testing.T) {
	for _, client := range []bool{true, false} {
		for _, node := range []bool{true, false} {
			t.Run(fmt.Sprintf("client=%t node=%t", client, node), func(t *testing.T) {
				t.Parallel()
				bed := outsideBed(t)
				for place, on := range map[testbed.Place]bool{testbed.Node: node, testbed.Outside: client, "pod-a": client} {
					if err := bed.Do(place, func() error { return setOffload(on) }); err != nil {
						t.Fatal(err)
					}
				}
				attachTo(t, bed, false, newPacketRun(t, outsideRows))
				protocols := []model.Protocol{model.TCP, model.UDP}
				// Only the device computes the CRC of a packet of which an error quotes a part.
				if testbed.HasProtocol(model.SCTP) && (node || !client) {
					protocols = append(protocols, model.SCTP)
				}
				refused(t, bed, protocols)
				p := testbed.Probe{
					From: testbed.Outside, Protocol: model.TCP, To: netip.MustParseAddrPort("203.0.113.99:80"), Timeout: time.Second,
				}
				if got := probes(t, bed, p, 1); got != "timed out" {
					t.Errorf("to an address that is guarded: %s", got)
				}
			})
		}
	}
}

// setOffload says whether the devices of this network namespace compute checksums of what is sent.
func setOffload(on bool) error {
	devices, err := net.Interfaces()
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ command, on uint32 }{command: unix.ETHTOOL_STXCSUM}
	if on {
		value.on = 1
	}
	for _, d := range devices {
		if d.Name == "lo" {
			continue
		}
		request := struct { // struct ifreq
			name  [unix.IFNAMSIZ]byte
			value unsafe.Pointer
			_     [16]byte
		}{value: unsafe.Pointer(&value)}
		copy(request.name[:], d.Name)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		if errno != 0 {
			return fmt.Errorf("%s: %w", d.Name, errno)
		}
	}
	return nil
}

func TestFromOutside(t *testing.T) {
	for name, filters := range map[string]bool{"link": false, "filter": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := outsideBed(t)
			attachTo(t, bed, filters, newPacketRun(t, outsideRows))
			node, node6 := bed.Addr(testbed.Node, false), bed.Addr(testbed.Node, true)
			for _, c := range []struct {
				from     testbed.Place
				protocol model.Protocol
				to, want string
			}{
				{testbed.Outside, model.TCP, "192.0.2.1:30080", fmt.Sprintf("pod-a source %s, pod-c source %[1]s", node)},
				{testbed.Outside, model.TCP, "[fd00::c000:201]:30080",
					fmt.Sprintf("pod-a source %s, pod-c source %[1]s", node6)},
				{testbed.Outside, model.UDP, "192.0.2.1:30053", fmt.Sprintf("pod-a source %s", node)},
				{testbed.Outside, model.UDP, "[fd00::c000:201]:30053", fmt.Sprintf("pod-c source %s", node6)},
				{testbed.Outside, model.TCP, "203.0.113.1:80", "pod-a source 192.0.2.9"},
				{testbed.Outside, model.UDP, "203.0.113.1:53", "pod-a source 192.0.2.9"},
				{testbed.Outside, model.TCP, "192.0.2.1:9", "refused"},
				{testbed.Outside, model.UDP, "192.0.2.1:9", "refused"}, // by an ICMP error
				{testbed.Outside, model.UDP, "203.0.113.1:9", "refused"},
				{testbed.Outside, model.UDP, "[fd00::c000:201]:9", "refused"},
				{testbed.Outside, model.TCP, "203.0.113.2:80", "timed out"}, // not an allowed source
				{"pod-a", model.TCP, "203.0.113.1:80",
					fmt.Sprintf("pod-a source %s, pod-c source 10.244.1.11", node)},
			} {
				p := testbed.Probe{From: c.from, Protocol: c.protocol, To: netip.MustParseAddrPort(c.to)}
				n := 1
				if strings.Contains(c.want, ", ") { // several backends
					n = 24
				}
				if c.want == "timed out" {
					p.Timeout = time.Second
				}
				if got := probes(t, bed, p, n); got != c.want {
					t.Errorf("%s to %s/%s: %s; want %s", c.from, c.to, c.protocol, got, c.want)
				}
			}
		})
	}
}

// A qdisc of another program that has one place for both sides of a device stays as it is, and keeps no other device from
// being served.
func TestAttach_ingress(t *testing.T) {
	t.Parallel()
	bed := outsideBed(t)
	d, r := devicesOf(t, bed, true), newPacketRun(t, outsideRows)
	l, err := d.netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	ingress := &netlink.Ingress{QdiscAttrs: *clsact(l.Attrs().Index).Attrs()}
	if err := d.netlink.QdiscAdd(ingress); err != nil {
		t.Fatal(err)
	}
	err = d.attachAll(r)
	if !errors.Is(err, dataplane.ErrPartial) || !strings.Contains(err.Error(), "attach to eth0: another program's qdisc ingress") {
		t.Errorf("with a qdisc ingress at eth0: %v", err)
	}
	filters, err := d.netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	if err != nil || len(filters) > 0 {
		t.Errorf("filters in the qdisc ingress: %v, %v", filters, err)
	}
	if len(d.served) == 0 {
		t.Error("no other device is served")
	}
	if err := errors.Join(d.netlink.QdiscDel(ingress), d.attachAll(r)); err != nil {
		t.Errorf("without it: %v", err)
	}
}

// A pod answers another one at its bridge past the node, so it sees the node in its place.
func TestBehindOneDevice(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{PodBridge: true})
	client := []netip.Addr{netip.MustParseAddr("10.244.1.20"), netip.MustParseAddr("fd00::af4:114")}
	if _, err := bed.AddPod(t.Context(), testbed.PodSpec{Name: "client", Addrs: client}); err != nil {
		t.Fatal(err)
	}
	err := bed.Do("pod-a", func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, a := range client {
			to := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
			err = errors.Join(err, netlink.RouteAdd(&netlink.Route{Dst: to, LinkIndex: eth0.Attrs().Index}))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	attachTo(t, bed, false, newPacketRun(t, outsideRows))
	for to, want := range map[string]string{
		"203.0.113.1:80":         "pod-a source 192.0.2.1, pod-c source 10.244.1.20",
		"[fd00::c000:201]:30080": "pod-a source fd00::c000:201, pod-c source fd00::af4:114",
	} {
		p := testbed.Probe{From: "client", Protocol: model.TCP, To: netip.MustParseAddrPort(to), Timeout: 2 * time.Second}
		if got := probes(t, bed, p, 24); got != want {
			t.Errorf("to %s: %s; want %s", to, got, want)
		}
	}
}

// TestFragmented sends datagrams that are larger than what any device takes.
func TestFragmented(t *testing.T) {
	t.Parallel()
	bed := outsideBed(t)
	attachTo(t, bed, false, newPacketRun(t, outsideRows))
	for to, want := range map[string]string{
		"192.0.2.1:30053": "192.0.2.1", "203.0.113.1:53": "192.0.2.9", "[fd00::c000:201]:30053": "fd00::c000:201",
	} {
		c, err := bed.Dial(t.Context(), testbed.Outside, model.UDP, netip.MustParseAddrPort(to))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 100)
		if _, err = c.Write(make([]byte, 4000)); err != nil {
			t.Fatal(err)
		}
		n, err := c.Read(answer)
		if err != nil || !strings.Contains(string(answer[:n]), want) {
			t.Errorf("%s: %q, %v; want an answer to %s", to, answer[:n], err, want)
		}
	}
}
