package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// attached lists the programs at the devices of the node, a line for each device that has some.
func (c cluster) attached() string {
	c.t.Helper()
	var lines []string
	check(c.t, c.Do(testbed.Node, func() error {
		devices, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, d := range devices {
			names, err := programsAt(d.Index)
			if err != nil {
				return err
			}
			if len(names) > 0 {
				lines = append(lines, d.Name+": "+strings.Join(names, " "))
			}
		}
		return nil
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// programsAt are the programs of links, and of filters, at a device of the calling thread's namespace.
func programsAt(index int) (names []string, err error) {
	for _, at := range []bpf.AttachType{bpf.AttachTCXIngress, bpf.AttachTCXEgress} {
		result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
		if errors.Is(err, bpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) { // before Linux 6.6
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, p := range result.Programs {
			name, err := programName(p.ID)
			if err != nil {
				return nil, err
			}
			names = append(names, name)
		}
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
		if err != nil {
			return nil, err
		}
		for _, f := range filters {
			if f, ok := f.(*netlink.BpfFilter); ok {
				name, err := programName(bpf.ProgramID(f.Id))
				if err != nil {
					return nil, err
				}
				names = append(names, name)
			}
		}
	}
	return names, nil
}

func programName(id bpf.ProgramID) (string, error) {
	p, err := bpf.NewProgramFromID(id)
	if err != nil {
		return "", err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return "", err
	}
	return info.Name, nil
}

// await returns when the programs at the node's devices are as wanted.
func (c cluster) await(want string) {
	c.t.Helper()
	eventually.Equal(c.t, "attached", want, c.attached)
}

// device is the name of the node's device that leads to a pod.
func (c cluster) device(pod string) (name string) {
	c.t.Helper()
	check(c.t, c.Do(testbed.Node, func() error {
		routes, err := netlink.RouteGet(c.Addr(testbed.Place(pod), false).AsSlice())
		if err != nil {
			return err
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			return err
		}
		name = l.Attrs().Name
		return nil
	}))
	return name
}

func (c cluster) pinned() string {
	c.t.Helper()
	entries, err := os.ReadDir(filepath.Join(c.pins, "links"))
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	check(c.t, err)
	n := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "ingress-") || strings.HasPrefix(e.Name(), "egress-") {
			n++
		}
	}
	return fmt.Sprint(n)
}

const fromPods = "pods interface cali*\n"

// A device has programs as soon as it is there, and pins no longer than that.
func TestDevices(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	s := parse(t, web+fromPods)
	check(t, p.Sync(t.Context(), s))
	want := []string{"eth0: from_anywhere leave"}
	for _, pod := range []string{"client", "pod-a", "pod-b"} {
		want = append(want, c.device(pod)+": from_pods leave")
	}
	slices.Sort(want)
	c.await(strings.Join(want, "\n"))

	_, err := c.AddPod(t.Context(), testbed.PodSpec{Name: "late", Node: testbed.Node})
	check(t, err)
	more := append([]string{c.device("late") + ": from_pods leave"}, want...)
	slices.Sort(more)
	c.await(strings.Join(more, "\n"))
	c.audited(p, s)
	check(t, c.RemovePod("late"))
	c.await(strings.Join(want, "\n"))
	c.audited(p, s)

	again := c.open() // a process that takes over, of rows that tell pods by their addresses
	defer again.Close()
	check(t, p.Close())
	s = parse(t, web)
	check(t, again.Sync(t.Context(), s))
	c.await(strings.ReplaceAll(strings.Join(want, "\n"), "from_pods", "from_anywhere"))
	if got := c.pinned(); got != "8" && got != "0" { // of links: before Linux 6.6 there are none
		t.Errorf("%s pins of 4 devices", got)
	}
	check(t, again.Remove(t.Context()))
	c.await("")
}

// A pod's packets have yet to be routed when they pass an ifb, which limits their rate. Programs leave that device alone.
func TestDevices_ifb(t *testing.T) {
	lack.Need(t, lack.Linux66) // before, the qdisc ingress keeps programs from the pod's device
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	s := parse(t, strings.ReplaceAll(web, "snat never", "snat offcluster"))
	check(t, p.Sync(t.Context(), s))
	check(t, c.Do(testbed.Node, func() error { return redirect(c.device("pod-a"), "ifb0") }))
	_, err := c.AddPod(t.Context(), testbed.PodSpec{Name: "late", Node: testbed.Node}) // which is heard of after the ifb
	check(t, err)
	eventually.True(t, "a later device is served", func() bool { return strings.Contains(c.attached(), c.device("late")) })
	const want = "pod-a source 192.0.2.1, pod-c source 192.0.2.1"
	c.expect(want, testbed.Outside, model.TCP, "192.0.2.1:30080")
	check(t, p.Sync(t.Context(), s))
	c.expect(want, testbed.Outside, model.TCP, "192.0.2.1:30080")
}

// redirect sends what arrives at a device to an ifb, which goes on with it as if nothing had happened.
func redirect(device, ifb string) error {
	from, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	to := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: ifb}}
	if err := errors.Join(netlink.LinkAdd(to), netlink.LinkSetUp(to)); err != nil {
		return err
	}
	handle := netlink.MakeHandle(0xffff, 0)
	return errors.Join(
		netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: from.Attrs().Index, Handle: handle, Parent: netlink.HANDLE_INGRESS,
		}}),
		netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: from.Attrs().Index, Parent: handle, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Actions: []netlink.Action{netlink.NewMirredAction(to.Index)},
		}))
}

// While the first programs are attached, one after the other, none of them serves: who has served so far does.
func TestDevices_atOnce(t *testing.T) {
	c := newCluster(t)
	clients := []testbed.Place{testbed.Outside, "client", testbed.Node}
	const nodePort = "192.0.2.1:30080"
	steps := 0
	p := c.openWith(dataplane.Config{Fault: func(operation string) error {
		if operation == "ebpf attach" {
			steps++
			for _, from := range clients {
				c.expect("refused", from, model.TCP, nodePort)
			}
		}
		return nil
	}}, ebpf.Options{})
	defer p.Close()
	s := parse(t, strings.Replace(web, "http cluster snat never", "http cluster snat offcluster", 1))
	check(t, p.Sync(t.Context(), s))
	if steps < 8 {
		t.Errorf("the programs were attached in %d steps", steps)
	}
	for _, from := range clients {
		source := c.Addr(from, false)
		if from == testbed.Outside {
			source = c.Addr(testbed.Node, false)
		}
		c.expect(fmt.Sprintf("pod-a source %s, pod-c source %[1]s", source), from, model.TCP, nodePort)
	}
	check(t, p.Remove(t.Context()))
}

// Audit finds a device from which a program was detached, and Sync attaches it again.
func TestDevices_audit(t *testing.T) {
	lack.Need(t, lack.Linux66)
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	s := parse(t, web)
	check(t, p.Sync(t.Context(), s))
	want := c.attached()
	pins, err := filepath.Glob(filepath.Join(c.pins, "links", "*gress-*"))
	check(t, err)
	if len(pins) == 0 {
		t.Fatal("there are no links of tcx")
	}
	for _, pin := range pins {
		check(t, os.Remove(pin))
		eventually.True(t, "a program is detached", func() bool { return c.attached() != want }) // by a kernel worker
		report, err := p.Audit(t.Context(), s, dataplane.Quick)
		check(t, err)
		if len(report.Drifts) != 1 || report.Drifts[0].Class != "programs" {
			t.Errorf("without %s: %v", filepath.Base(pin), report.Drifts)
		}
		check(t, p.Sync(t.Context(), s))
		c.audited(p, s)
		c.await(want)
	}
}

// A new process removes what an earlier one has attached.
func TestDevices_remove(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	check(t, p.Sync(t.Context(), parse(t, web)))
	check(t, p.Close())
	if c.attached() == "" {
		t.Error("nothing is attached when the process has ended")
	}
	p = c.open()
	defer p.Close()
	check(t, p.Remove(context.Background()))
	c.await("")
	check(t, c.Do(testbed.Node, func() error {
		qdiscs, err := netlink.QdiscList(nil)
		for _, q := range qdiscs {
			if q.Type() == "clsact" {
				t.Errorf("a qdisc is left: %v", q.Attrs())
			}
		}
		return err
	}))
}

// A plane that leaves packets to another one takes its own programs for them away. It still counts what sockets send.
func TestDevices_behind(t *testing.T) {
	c := newCluster(t)
	s := parse(t, web)
	p := c.open()
	check(t, p.Sync(t.Context(), s))
	check(t, p.Close())
	p = c.openWith(dataplane.Config{Counters: dataplane.PerBackend}, ebpf.Options{Serve: ebpf.Behind})
	defer p.Close()
	check(t, p.Sync(t.Context(), s))
	c.await("")
	c.audited(p, s)
	c.expect("pod-b source 10.244.1.20", "client", model.UDP, "10.96.0.10:53")
	counters, err := p.Counters(t.Context())
	check(t, err)
	for _, served := range counters.Served {
		if served.ToBackend.Packets > 0 {
			return
		}
	}
	t.Errorf("no packet is counted:\n%s", counters)
}
