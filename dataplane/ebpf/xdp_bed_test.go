package ebpf

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// remoteBed has a client outside and a backend on the other node, and the programs at the node's eth0. What is returned
// takes those of tc away.
func remoteBed(t *testing.T) (bed *testbed.Bed, withoutTC func()) {
	t.Helper()
	v4 := netip.MustParseAddr("10.244.2.13")
	bed = fastBed(t, testbed.Spec{Pods: []testbed.PodSpec{{
		Name: "pod-c", Node: testbed.NodeB, Addrs: []netip.Addr{v4, testbed.EmbedV6(v4)},
		Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}},
	}}})
	r := newPacketRun(t, fastRows)
	eth0 := accelerate(t, bed, r, "eth0")
	var links []link.Link
	do(t, bed, testbed.Node, func() error {
		for program, at := range map[string]side{packetsProgFromAnywhere: ingress(), packetsProgLeave: egress()} {
			l, err := link.AttachTCX(link.TCXOptions{
				Interface: eth0.Attrs().Index, Program: r.programs.Programs[program], Attach: at.attach,
			})
			if err != nil {
				return err
			}
			links = append(links, l)
		}
		return nil
	})
	withoutTC = func() {
		for _, l := range links {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
		links = nil
	}
	t.Cleanup(withoutTC)
	return bed, withoutTC
}

// flow is one that is open, and how it names its client.
type openFlow struct {
	net.Conn
	want string
}

// openFlows are some of each kind, which have been answered once.
func openFlows(t *testing.T, bed *testbed.Bed) (flows []openFlow) {
	t.Helper()
	for to, protocol := range map[string]model.Protocol{
		"192.0.2.1:30080": model.TCP, "[fd00::c000:201]:30080": model.TCP,
		"192.0.2.1:30053": model.UDP, "[fd00::c000:201]:30053": model.UDP,
	} {
		addr := netip.MustParseAddrPort(to)
		c, err := bed.Dial(t.Context(), testbed.Outside, protocol, addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		f := openFlow{c, fmt.Sprintf("pod-c %s", addr.Addr())}
		if protocol == model.TCP { // it greets
			f.answered(t)
		}
		f.ask(t, 1)
		flows = append(flows, f)
	}
	return flows
}

func (f openFlow) answered(t *testing.T) {
	t.Helper()
	answer := make([]byte, 100)
	if err := f.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	n, err := f.Read(answer)
	if got := strings.NewReplacer("[", "", "]", "").Replace(string(answer[:n])); err != nil || !strings.HasPrefix(got, f.want) {
		t.Fatalf("%s: %q, %v; want %s", f.RemoteAddr(), got, err, f.want)
	}
}

func (f openFlow) ask(t *testing.T, times int) {
	t.Helper()
	for range times {
		if _, err := f.Write([]byte("again\n")); err != nil {
			t.Fatal(err)
		}
		f.answered(t)
	}
}

// Once a flow is known, the stack has no part in it: it goes on when nothing there would translate it.
func TestFastGoesPastTheStack(t *testing.T) {
	t.Parallel()
	bed, withoutTC := remoteBed(t)
	for _, sender := range []testbed.Place{testbed.Outside, "pod-c"} {
		do(t, bed, sender, func() error { return ethtool("eth0", ethtoolTXSum, 0) })
	}
	flows := openFlows(t, bed)
	withoutTC()
	for _, f := range flows {
		f.ask(t, 20)
	}
}

// Who counts on a device to finish its checksums is served by the stack, which knows.
func TestFastLeavesUnfinishedSums(t *testing.T) {
	t.Parallel()
	bed, _ := remoteBed(t)
	for _, f := range openFlows(t, bed) {
		f.ask(t, 20)
	}
}

// A device has one program at a time: ours is not put in place of another, and takes that of an earlier process's.
func TestDrivers(t *testing.T) {
	t.Parallel()
	bed := fastBed(t, testbed.Spec{})
	first, second := newPacketRun(t, fastRows), newPacketRun(t, fastRows)
	fs, pins, err := testbed.BPFFS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { fs.Close() })
	d := drivers{pins}
	do(t, bed, testbed.Node, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		index := eth0.Attrs().Index
		put := func(r packetRun) error {
			return d.attach(eth0, r.programs.Programs[packetsProgFromOutside], r.programs.Maps[packetsMapOutside])
		}
		has := func(want packetRun) {
			info, err := want.programs.Programs[packetsProgFromOutside].Info()
			if err != nil {
				t.Error(err)
				return
			}
			if id, _ := info.ID(); d.runs(index) != id {
				t.Errorf("program %d is in force; want %d", d.runs(index), id)
			}
		}
		for _, r := range []packetRun{first, second} {
			if err := put(r); err != nil {
				return err
			}
			has(r)
		}
		if err := d.keep(map[int]bool{index: true}); err != nil {
			return err
		}
		has(second)
		if err := d.keep(nil); err != nil {
			return err
		}
		if d.runs(index) != 0 {
			t.Error("a program is left")
		}
		if err := attachPass(t, "eth0"); err != nil {
			return err
		}
		if err := put(first); err == nil {
			t.Error("the program of somebody else was replaced")
		} else {
			t.Log(err)
		}
		return nil
	})
}
