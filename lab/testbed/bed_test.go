package testbed

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

func TestBed_everybodyReachesEveryPod(t *testing.T) {
	for _, bridged := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge=%v", bridged), func(t *testing.T) {
			t.Parallel()
			everybodyReachesEveryPod(t, bridged, model.TCP, model.UDP)
		})
	}
}

func TestBed_SCTP(t *testing.T) {
	if needSCTP(t) {
		everybodyReachesEveryPod(t, false, model.SCTP)
	}
}

func everybodyReachesEveryPod(t *testing.T, bridged bool, protocols ...model.Protocol) {
	var ports []PodPort
	for _, p := range protocols {
		ports = append(ports, PodPort{p, 80})
	}
	host := []netip.Addr{netip.MustParseAddr("203.0.113.99"), netip.MustParseAddr("2001:db8::1")}
	b := Need(t, Spec{PodBridge: bridged, Pods: []PodSpec{
		{Name: "a", Ports: ports},
		{Name: "a2", Ports: ports},
		{Name: "b", Node: NodeB, Ports: ports},
		{Name: "far", Node: LAN, Addrs: host, Ports: ports},
	}})
	for _, v6 := range []bool{false, true} {
		for _, p := range protocols {
			for _, from := range []Place{Node, NodeB, Outside, "a", "a2", "b", "far"} {
				for _, to := range []Place{"a", "a2", "b", "far"} {
					addr := b.Addr(to, v6)
					check(t, b, from, addr, 80, p, fmt.Sprintf("%s source %s", to, b.Addr(from, v6)))
					check(t, b, from, addr, 81, p, "refused")
				}
				service := netip.MustParseAddr("10.96.0.7")
				if v6 {
					service = EmbedV6(service)
				}
				check(t, b, from, service, 80, p, "unreachable")
			}
		}
	}
}

// check makes a probe and compares its outcome's text.
func check(t *testing.T, b *Bed, from Place, to netip.Addr, port uint16, p model.Protocol, want string) {
	t.Helper()
	o, err := b.Probe(t.Context(), Probe{
		From: from, To: netip.AddrPortFrom(to, port), Protocol: p, Timeout: patience(want),
	})
	if err != nil || o.String() != want {
		t.Errorf("%s to %s port %d/%s: %v, %v; want %s", from, to, port, p, o, err, want)
	}
}

// patience is how long to wait for an outcome: short only where silence is what must come.
func patience(want string) time.Duration {
	if want == TimedOut.String() {
		return 200 * time.Millisecond
	}
	return time.Minute
}

// Packets to the node's own address and a pod's port go to the pod, as a service proxy sends them. The pod's neighbour
// needs no masquerading for it, because its packets pass the node's routing on the way back as well; the pod itself
// does.
func TestBed_hairpin(t *testing.T) {
	for _, bridged := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge=%v", bridged), func(t *testing.T) {
			t.Parallel()
			ports := []PodPort{{model.TCP, 80}, {model.UDP, 80}}
			b := Need(t, Spec{PodBridge: bridged, Pods: []PodSpec{{Name: "a", Ports: ports}, {Name: "a2"}}})
			for _, v6 := range []bool{false, true} {
				ip, a := "ip", b.Addr("a", v6)
				if v6 {
					ip = "ip6"
				}
				run(t, b, Node, "nft", fmt.Sprintf(`table %s t {
					chain pre { type nat hook prerouting priority dstnat
						%[1]s daddr %[2]s dnat to %[3]s
					}
					chain post { type nat hook postrouting priority srcnat
						%[1]s saddr %[3]s %[1]s daddr %[3]s masquerade
					}
				}`, ip, b.Addr(Node, v6), a))
				for _, p := range []model.Protocol{model.TCP, model.UDP} {
					check(t, b, "a", b.Addr(Node, v6), 80, p, "a source "+b.Addr(Node, v6).String())
					check(t, b, "a2", b.Addr(Node, v6), 80, p, "a source "+b.Addr("a2", v6).String())
					check(t, b, Outside, b.Addr(Node, v6), 80, p, "a source "+b.Addr(Outside, v6).String())
				}
			}
		})
	}
}

func TestBed_podInterfaces(t *testing.T) {
	for bridged, want := range map[bool]string{false: "cali86f7e437faa", true: "cbr0"} {
		b := Need(t, Spec{PodBridge: bridged})
		p, err := b.AddPod(t.Context(), PodSpec{Name: "a"})
		if err != nil {
			t.Fatal(err)
		}
		if p.Interface != want {
			t.Errorf("bridge=%v: the pod's interface is %q, want %q", bridged, p.Interface, want)
		}
		run(t, b, Node, "nft", "table inet t { chain c { type filter hook prerouting priority 0; iifname "+want+" meta l4proto { tcp, udp } reject; }; }")
		check(t, b, "a", b.Addr(Node, false), 80, model.UDP, "refused")
		check(t, b, "a", netip.MustParseAddr("10.96.0.1"), 80, model.TCP, "refused")
	}
}

func TestBed_AddPod(t *testing.T) {
	b := Need(t, Spec{})
	addr := netip.MustParseAddr
	for _, test := range []struct {
		spec PodSpec
		want string // the pod's addresses, or a part of the error
	}{
		{PodSpec{Name: "first"}, "[10.244.1.2 fd00::af4:102]"},
		{PodSpec{Name: "second"}, "[10.244.1.3 fd00::af4:103]"},
		{PodSpec{Name: "third", Node: NodeB}, "[10.244.2.2 fd00::af4:202]"},
		{PodSpec{Name: "ordered", Addrs: []netip.Addr{addr("fd00::1"), addr("10.244.1.4")}}, "[10.244.1.4 fd00::1]"},
		{PodSpec{Name: "fifth"}, "[10.244.1.5 fd00::af4:105]"},
		{PodSpec{Name: "host", HostNetwork: true}, "[192.0.2.1 fd00::c000:201]"},
		{PodSpec{Name: "v6", Addrs: []netip.Addr{addr("fd00::2")}}, "[fd00::2]"},
		{PodSpec{Name: "first"}, `pod "first": the name is empty or taken`},
		{PodSpec{Name: "node"}, `pod "node": the name is empty or taken`},
		{PodSpec{}, `pod "": the name is empty or taken`},
		{PodSpec{Name: "x", Node: "mars"}, `"mars" is not a node`},
		{PodSpec{Name: "x", Node: LAN}, "a host on the LAN needs an address"},
		{PodSpec{Name: "x", Addrs: []netip.Addr{addr("10.244.1.2")}}, "10.244.1.2 is the address of first"},
		{PodSpec{Name: "x", Addrs: []netip.Addr{addr("192.0.2.9")}}, "192.0.2.9 is the address of outside"},
		{PodSpec{Name: "x", Addrs: []netip.Addr{addr("1.1.1.1"), addr("1.1.1.2")}}, "are of one family"},
		{PodSpec{Name: "x", Addrs: []netip.Addr{addr("127.0.0.2")}}, "127.0.0.2 cannot be its address"},
		{PodSpec{Name: "x", Addrs: []netip.Addr{{}}}, "invalid IP cannot be its address"},
		{PodSpec{Name: "x", Ports: []PodPort{{model.TCP, 1}, {9, 1}}}, "serve 1/protocol 9"},
		{PodSpec{Name: "x"}, "[10.244.1.6 fd00::af4:106]"}, // the failure before left nothing
	} {
		p, err := b.AddPod(t.Context(), test.spec)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(p.Addrs)
		}
		if !strings.Contains(got, test.want) {
			t.Errorf("%+v: %s, want %s", test.spec, got, test.want)
		}
	}
}

func TestBed_RemovePod(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	a := b.Addr("a", false)
	check(t, b, Outside, a, 80, model.UDP, "a source 192.0.2.9")
	if err := b.RemovePod("a"); err != nil {
		t.Fatal(err)
	}
	check(t, b, Outside, a, 80, model.UDP, "unreachable")
	if _, err := b.Probe(t.Context(), Probe{From: "a", To: netip.AddrPortFrom(a, 80)}); err == nil {
		t.Error("a removed pod makes probes")
	}
	if err := b.RemovePod("a"); err == nil {
		t.Error("removed a pod that is not there")
	}
	if _, err := b.AddPod(t.Context(), PodSpec{Name: "new", Ports: []PodPort{{model.UDP, 80}}}); err != nil {
		t.Fatal(err)
	}
	check(t, b, Outside, a, 80, model.UDP, "new source 192.0.2.9")
}

func TestBed_Serve(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}}}}})
	check(t, b, Outside, b.Addr("a", true), 81, model.TCP, "refused")
	for range 2 {
		if err := b.Serve("a", PodPort{model.TCP, 80}, PodPort{model.TCP, 81}); err != nil {
			t.Fatal(err)
		}
	}
	check(t, b, Outside, b.Addr("a", true), 81, model.TCP, "a source fd00::c000:209")
}

func TestBed_StopServing(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	for range 2 {
		if err := b.StopServing("a"); err != nil {
			t.Fatal(err)
		}
	}
	check(t, b, Outside, b.Addr("a", false), 80, model.TCP, "refused")
	check(t, b, Outside, b.Addr("a", true), 80, model.UDP, "refused")
	if err := b.Serve("a", PodPort{model.TCP, 80}); err != nil {
		t.Fatal(err)
	}
	check(t, b, Outside, b.Addr("a", false), 80, model.TCP, "a source 192.0.2.9")
	if err := b.StopServing("b"); err == nil {
		t.Error("stopped a pod that is not there")
	}
}

func TestBed_Route(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "b", Node: NodeB}, {Name: "web", HostNetwork: true, Ports: []PodPort{{model.TCP, 80}}}}})
	odd := netip.MustParsePrefix("100.64.0.0/24")
	run(t, b, Node, "ip", "addr", "add", "100.64.0.1/32", "dev", "lo")
	check(t, b, "b", odd.Addr().Next(), 80, model.TCP, "unreachable")
	if err := b.Route(odd); err != nil {
		t.Fatal(err)
	}
	check(t, b, "b", odd.Addr().Next(), 80, model.TCP, "web source 10.244.2.2")
}

func TestBed_Do(t *testing.T) {
	b := Need(t, Spec{})
	var names []string
	err := b.Do(Node, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if l.Type() == "veth" || l.Type() == "bridge" {
				names = append(names, l.Attrs().Name)
			}
		}
		return err
	})
	if err != nil || fmt.Sprint(names) != "[eth0]" {
		t.Errorf("the node's links are %v, %v; want eth0 only", names, err)
	}
	boom := errors.New("boom")
	if err := b.Do(Node, func() error { return boom }); !errors.Is(err, boom) {
		t.Errorf("Do returned %v, want its function's error", err)
	}
	if err := b.Do(Node, func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Do returned no error for a function that did not return")
	}
	if err := b.Do("mars", func() error { return nil }); err == nil {
		t.Error("Do worked in a place that is not there")
	}
}

// The kernel frees a namespace when nothing refers to it any more, and with it the interfaces
// inside. One of them is tied to an interface outside, which shows when that happens.
func TestBed_CloseLeavesNothing(t *testing.T) {
	files, goroutines := openFiles(t), runtime.NumGoroutine()
	watch, err := newNetns(nil)
	if err != nil {
		t.Fatal(err)
	}
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	err = watch.do(func() error { return netlink.LinkSubscribe(updates, done) })
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(t.Context(), Spec{Pods: []PodSpec{
		{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}},
		{Name: "b", Node: NodeB},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var ends []string
	for place, h := range b.places {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "t-" + string(place)
		ends = append(ends, attrs.Name)
		link := &netlink.Veth{LinkAttrs: attrs, PeerName: "t", PeerNamespace: netlink.NsFd(h.file.Fd())}
		if err := watch.link.LinkAdd(link); err != nil {
			t.Fatal(err)
		}
	}
	check(t, b, Outside, b.Addr("a", true), 80, model.TCP, "a source fd00::c000:209")
	conn, err := b.Dial(t.Context(), Outside, model.TCP, netip.AddrPortFrom(b.Addr("a", false), 80))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	for gone := 0; gone < len(ends); {
		u := eventually.Receive(t, fmt.Sprintf("the end of %d of the namespaces %v", len(ends)-gone, ends), updates)
		if u.Header.Type == unix.RTM_DELLINK {
			gone++
		}
	}
	close(done)
	for range updates {
	}
	watch.close()
	eventually.Nil(t, "all is given back", func() error { // threads end shortly after their goroutines
		if n := runtime.NumGoroutine(); n > goroutines {
			stacks := make([]byte, 1<<20)
			return fmt.Errorf("%d goroutines, before %d\n%s", n, goroutines, stacks[:runtime.Stack(stacks, true)])
		}
		if now := openFiles(t); now > files {
			return fmt.Errorf("%d open files, before %d", now, files)
		}
		return nil
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestNew_badSpec(t *testing.T) {
	_, err := New(t.Context(), Spec{Pods: []PodSpec{{Name: "a"}, {Name: "a"}}})
	if want := `testbed: pod "a": the name is empty or taken`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		bed, err := New(b.Context(), Spec{})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		bed.Close()
		b.StartTimer()
	}
}

func BenchmarkAddPod(b *testing.B) {
	bed := Need(b, Spec{})
	for b.Loop() {
		if _, err := bed.AddPod(b.Context(), PodSpec{Name: "a", Ports: []PodPort{{model.TCP, 80}}}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := bed.RemovePod("a"); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
