package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// From outside to the other node, and to this one.
const passing = `
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster6 [fd00::af4:20d]:8080
backend default/web:dns cluster 10.244.2.13:5353
backend default/web:dns cluster6 [fd00::af4:20d]:5353
backend default/web:here cluster 10.244.1.11:8080 local
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat offcluster
frontend [fd00::c000:201]:30080/tcp any forward default/web:http cluster6 snat offcluster
frontend 192.0.2.1:30053/udp any forward default/web:dns cluster snat offcluster
frontend [fd00::c000:201]:30053/udp any forward default/web:dns cluster6 snat offcluster
frontend 192.0.2.1:30081/tcp any forward default/web:here cluster snat never
pods 10.244.0.0/16
pods fd00::af4:0/112
`

// takesFrames lets the switch take what XDP programs of the node send, as hardware does.
func (c cluster) takesFrames(takes bool) {
	c.t.Helper()
	check(c.t, c.SetFeature(testbed.LAN, string(testbed.Node), testbed.GRO, takes))
}

// accelerated makes a plane with rows. It skips the test where veths tell nothing.
func (c cluster) accelerated(mode ebpf.Acceleration) (dataplane.Dataplane, *model.State) {
	c.t.Helper()
	p := c.openAs(ebpf.Options{Serve: ebpf.TC, Acceleration: mode})
	c.t.Cleanup(func() { p.Close() })
	s := parse(c.t, passing)
	err := p.Sync(c.t.Context(), s)
	c.reported(err)
	check(c.t, err)
	return p, s
}

// told skips the test if the kernel does not tell what veths take, as before Linux 6.3.
func (c cluster) reported(err error) {
	c.t.Helper()
	if err != nil && strings.Contains(err.Error(), "the kernel does not report this") {
		lack.Skip(c.t, lack.Linux63, err)
	}
}

// xdp is the XDP program at a device of the node; 0: none.
func (c cluster) xdp(device string) (id uint32) {
	c.t.Helper()
	check(c.t, c.Do(testbed.Node, func() error {
		l, err := netlink.LinkByName(device)
		if err == nil && l.Attrs().Xdp != nil {
			id = l.Attrs().Xdp.ProgId
		}
		return err
	}))
	return id
}

// openFlow is a connection, or what UDP has for one, and how answers to it begin.
type openFlow struct {
	net.Conn
	want string
}

// openFlows are some of each kind, which have been answered.
func (c cluster) openFlows() (flows []openFlow) {
	c.t.Helper()
	for to, protocol := range map[string]model.Protocol{
		"192.0.2.1:30080": model.TCP, "[fd00::c000:201]:30080": model.TCP,
		"192.0.2.1:30053": model.UDP, "[fd00::c000:201]:30053": model.UDP,
	} {
		addr := netip.MustParseAddrPort(to)
		conn, err := c.Dial(c.t.Context(), testbed.Outside, protocol, addr)
		check(c.t, err)
		c.t.Cleanup(func() { conn.Close() })
		f := openFlow{conn, fmt.Sprintf("pod-c %s", addr.Addr())}
		if protocol == model.TCP { // it greets
			f.answered(c.t)
		}
		f.ask(c.t, 1)
		flows = append(flows, f)
	}
	return flows
}

func (f openFlow) answered(t *testing.T) {
	t.Helper()
	answer := make([]byte, 100)
	check(t, f.SetReadDeadline(time.Now().Add(answerTime)))
	n, err := f.Read(answer)
	if got := strings.NewReplacer("[", "", "]", "").Replace(string(answer[:n])); !strings.HasPrefix(got, f.want) {
		t.Fatalf("%s: %q, %v; want %s", f.RemoteAddr(), got, err, f.want)
	}
}

func (f openFlow) ask(t *testing.T, times int) {
	t.Helper()
	for range times {
		_, err := f.Write([]byte("again\n"))
		check(t, err)
		f.answered(t)
	}
}

// Once a flow is known, the stack has no part in it: it goes on when nothing there would translate it.
func TestFastGoesPastTheStack(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.Linux66)
	c := newCluster(t)
	c.takesFrames(true)
	for _, sender := range []testbed.Place{testbed.Outside, "pod-c"} {
		check(t, c.SetFeature(sender, "eth0", testbed.TXChecksums, false))
	}
	c.accelerated(ebpf.AccelerationNative)
	flows := c.openFlows()
	for _, side := range []string{"ingress-*", "egress-*"} {
		links, err := filepath.Glob(filepath.Join(c.pins, "links", side))
		check(t, err)
		if len(links) == 0 {
			t.Fatalf("there are no links of tcx at %s", side)
		}
		for _, l := range links {
			check(t, os.Remove(l))
		}
	}
	for _, f := range flows {
		f.ask(t, 20)
	}
}

// The stack serves packets whose checksums a device is to finish, and packets that stay on this node.
func TestFastLeavesOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(true)
	p, s := c.accelerated(ebpf.AccelerationBestEffort)
	for _, f := range c.openFlows() {
		f.ask(t, 20)
	}
	c.expect("pod-a source 192.0.2.9", testbed.Outside, model.TCP, "192.0.2.1:30081")
	c.audited(p, s)
}

// Programs at other devices send no packets to a device at which no program runs any more: its stack may know better.
func TestFastUnlists(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(true)
	p, s := c.accelerated(ebpf.AccelerationNative)
	before, err := ebpf.Outside(p)
	check(t, err)
	c.command("ip link add x0 type veth peer name x1", "ip link set x0 up", "ip link set x1 up",
		"ip address add 198.19.0.1/24 dev x0")
	for _, device := range []string{"x0", "x1"} {
		check(t, c.SetFeature(testbed.Node, device, testbed.GRO, true))
	}
	check(t, p.Sync(t.Context(), s))
	if more, err := ebpf.Outside(p); err != nil || len(more) != len(before)+1 {
		t.Fatalf("a device has come, and there are %v, %v; before there were %v", more, err, before)
	}
	c.command("ip address del 198.19.0.1/24 dev x0")
	check(t, p.Sync(t.Context(), s))
	if after, err := ebpf.Outside(p); err != nil || !slices.Equal(after, before) {
		t.Errorf("packets are sent to devices %v, %v; want %v", after, err, before)
	}
}

// command runs commands on the node.
func (c cluster) command(lines ...string) {
	c.t.Helper()
	for _, line := range lines {
		check(c.t, c.Do(testbed.Node, func() error {
			words := strings.Fields(line)
			return exec.Command(words[0], words[1:]...).Run()
		}))
	}
}

// A device that cannot do what is wanted keeps no change from being made, nor those after it.
func TestApply_partial(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(false)
	p := c.openAs(ebpf.Options{Serve: ebpf.TC, Acceleration: ebpf.AccelerationNative})
	defer p.Close()
	have := parse(t, passing)
	err := p.Sync(t.Context(), have)
	c.reported(err)
	if !errors.Is(err, dataplane.ErrPartial) {
		t.Fatal(err)
	}
	for _, change := range []struct {
		rows    string
		partial bool
	}{
		{"pods 10.245.0.0/16\n", true},
		{"pods 10.245.0.0/16\nfrontend 192.0.2.1:30099/tcp any reject default/web:none\n", false},
	} {
		want := parse(t, passing+change.rows)
		if err := p.Apply(t.Context(), want, model.Diff(have, want)); errors.Is(err, dataplane.ErrPartial) != change.partial ||
			err != nil && !change.partial {
			t.Errorf("%s: %v", change.rows, err)
		}
		c.audited(p, want)
		have = want
	}
}

// Native says which device cannot, and what arrives there is served all the same; best effort says nothing.
func TestFastCannot(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(false)
	for mode, want := range map[ebpf.Acceleration]string{
		ebpf.AccelerationBestEffort: "", ebpf.AccelerationOff: "", ebpf.AccelerationNative: "XDP at eth0: ",
	} {
		p := c.openAs(ebpf.Options{Serve: ebpf.TC, Acceleration: mode})
		s := parse(t, passing)
		err := p.Sync(t.Context(), s)
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) ||
			err != nil && !errors.Is(err, dataplane.ErrPartial) {
			t.Errorf("%s: %v; want %q", mode, err, want)
		}
		c.audited(p, s)
		c.expect("pod-c source 192.0.2.1", testbed.Outside, model.TCP, "192.0.2.1:30080")
		check(t, p.Close())
	}
}

// Programs come and go with processes, modes and devices.
func TestFastLives(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(true)
	p, s := c.accelerated(ebpf.AccelerationNative)
	first := c.xdp("eth0")
	if first == 0 {
		t.Fatal("eth0 has no program")
	}
	check(t, p.Close())
	p, _ = c.accelerated(ebpf.AccelerationBestEffort)
	if next := c.xdp("eth0"); next == 0 || next == first {
		t.Errorf("eth0 has program %d, where the former process had %d", next, first)
	}
	if id := c.xdp(c.device("pod-a")); id != 0 {
		t.Errorf("a device that leads to a pod has program %d", id)
	}
	c.audited(p, s)

	pins, err := filepath.Glob(filepath.Join(c.pins, "links", "xdp-*"))
	check(t, err)
	for _, pin := range pins {
		check(t, os.Remove(pin))
	}
	report, err := p.Audit(t.Context(), s, dataplane.Quick)
	check(t, err)
	if got := fmt.Sprint(report.Drifts); got != "[XDP program at device eth0: missing: that of this process]" {
		t.Errorf("report.Drifts: %s", got)
	}
	check(t, p.Sync(t.Context(), s))
	c.audited(p, s)

	c.takesFrames(false) // the audit sees to it
	c.audited(p, s)
	if id := c.xdp("eth0"); id != 0 {
		t.Errorf("eth0 keeps program %d, which sends to nobody", id)
	}
	c.takesFrames(true)
	check(t, p.Sync(t.Context(), s))
	if c.xdp("eth0") == 0 {
		t.Error("eth0 has no program after the switch takes frames again")
	}
	check(t, p.Close())

	p, _ = c.accelerated(ebpf.AccelerationOff)
	if id := c.xdp("eth0"); id != 0 {
		t.Errorf("eth0 keeps program %d, with acceleration off", id)
	}
	check(t, p.Close())
	p, _ = c.accelerated(ebpf.AccelerationNative)
	check(t, p.Remove(context.Background()))
	if id := c.xdp("eth0"); id != 0 {
		t.Errorf("eth0 keeps program %d, after Remove", id)
	}
}

// A device has one program at a time. Ours is not put in place of another.
func TestFastForeign(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.takesFrames(true)
	var foreign uint32
	check(t, c.Do(testbed.Node, func() error {
		program, err := bpf.NewProgram(&bpf.ProgramSpec{
			Type: bpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
		})
		if err != nil {
			return err
		}
		defer program.Close()
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: eth0.Index})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	if foreign = c.xdp("eth0"); foreign == 0 {
		t.Fatal("eth0 has no program")
	}
	p, s := c.accelerated(ebpf.AccelerationBestEffort)
	c.audited(p, s)
	if got := c.xdp("eth0"); got != foreign {
		t.Errorf("eth0 has program %d; want that of somebody else, %d", got, foreign)
	}
	check(t, p.Close())
	p = c.openAs(ebpf.Options{Serve: ebpf.TC, Acceleration: ebpf.AccelerationNative})
	defer p.Close()
	err := p.Sync(t.Context(), s)
	c.reported(err)
	if err == nil || !strings.Contains(err.Error(), "XDP at eth0: another program's XDP program is attached to it") {
		t.Errorf("sync: %v", err)
	}
	c.expect("pod-c source 192.0.2.1", testbed.Outside, model.TCP, "192.0.2.1:30080")
}
