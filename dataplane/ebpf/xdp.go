package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/mdlayher/genetlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/said"
)

// Acceleration says whether packets of known flows that come from outside and go there again take a way past the
// stack: bpf/xdp.c, run by the drivers of devices.
type Acceleration string

const (
	// AccelerationOff leaves drivers alone. So does the empty one.
	AccelerationOff Acceleration = "off"
	// AccelerationBestEffort uses the drivers that can, and says nothing of others.
	AccelerationBestEffort Acceleration = "best-effort"
	// AccelerationNative makes an error of a device whose driver cannot. The stack serves its packets all the same.
	AccelerationNative Acceleration = "native"
)

func (a Acceleration) wanted() bool { return a == AccelerationBestEffort || a == AccelerationNative }

// errForeign says that a device has another program's, of which it can have only one.
var errForeign = errors.New("another program's XDP program is attached to it")

// xdpPrefix begins the names of the pins of links; the device's index ends them.
const xdpPrefix = "xdp-"

// outsideDevices is how many devices may have the program.
const outsideDevices = 256

// drivers run the program for them at the devices by which packets come from outside.
//
//	Sync ──► replace: every such device gets the new program, if its driver can
//	Audit ─► audit: devices that have come since get it; what another program has undone
//
// Pins alone hold the links. The caller is in the devices' network namespace.
type drivers struct {
	dir  string // of pins, which others use, too
	mode Acceleration
	log  *slog.Logger

	running map[int]packetsOutlet // by device, as far as no other program has changed that
	refused map[int]error         // since the last Sync
	said    map[string]*said.Condition
}

func newDrivers(dir string, log *slog.Logger) drivers {
	return drivers{
		dir: dir, log: log, running: map[int]packetsOutlet{}, refused: map[int]error{}, said: map[string]*said.Condition{},
	}
}

// replace puts the program in force at some devices, and at no other. In native mode it returns which cannot have it:
// all is served, if not in this way.
func (d *drivers) replace(p *packets, at []netlink.Link) error {
	clear(d.running)
	clear(d.refused)
	if p.Programs[packetsProgFromOutside] == nil {
		return d.keep(d.running)
	}
	for _, l := range at {
		d.add(p, l)
	}
	errs := []error{d.keep(d.running), d.unlist(p.Maps[packetsMapOutside])}
	if d.mode == AccelerationNative {
		errs = slices.AppendSeq(errs, maps.Values(d.refused))
	}
	return errors.Join(errs...)
}

// unlist has others send nothing to devices at which the program does not run.
func (d *drivers) unlist(outside *ebpf.Map) error {
	var listed []uint32
	var device uint32
	var outlet packetsOutlet
	all := outside.Iterate()
	for all.Next(&device, &outlet) {
		if _, runs := d.running[int(device)]; !runs {
			listed = append(listed, device)
		}
	}
	errs := []error{all.Err()}
	for _, device := range listed {
		errs = append(errs, outside.Delete(device))
	}
	return errors.Join(errs...)
}

// add puts the program in force at a device, or remembers and says why not.
func (d *drivers) add(p *packets, l netlink.Link) {
	index, name := l.Attrs().Index, l.Attrs().Name
	condition := d.said[name]
	if condition == nil {
		condition = &said.Condition{}
		d.said[name] = condition
	}
	err := d.attach(l, p.Programs[packetsProgFromOutside], p.Maps[packetsMapOutside])
	switch {
	case err == nil:
		d.running[index] = outletOf(l)
		condition.Cleared()
		return
	case errors.Is(err, unix.ENODEV): // it is gone by now
		return
	}
	delete(d.running, index)
	_ = p.Maps[packetsMapOutside].Delete(uint32(index)) // others do not send there; it may not be listed
	d.refused[index] = fmt.Errorf("XDP at %s: %w", name, err)
	if condition.Changed(err.Error()) && d.log != nil {
		level := slog.LevelInfo
		if d.mode == AccelerationNative {
			level = slog.LevelWarn
		}
		d.log.Log(context.Background(), level, "XDP cannot be used at a device; tc alone serves its packets",
			"device", name, "error", err)
	}
}

// audit gives the program to devices that have come, or have changed, since. It reports where another program has
// removed it.
func (d *drivers) audit(p *packets, at []netlink.Link) (drifts []dataplane.Drift) {
	program, outside := p.Programs[packetsProgFromOutside], p.Maps[packetsMapOutside]
	if program == nil {
		return nil
	}
	gone := maps.Clone(d.running)
	for _, l := range at {
		index := l.Attrs().Index
		delete(gone, index)
		is, runs := d.running[index]
		switch {
		case d.refused[index] != nil:
		case !runs, is != outletOf(l), sends(l) != nil:
			d.add(p, l)
		case !d.holds(index, &p.identities, program):
			drifts = append(drifts, dataplane.Drift{
				Class: "programs", Object: "XDP program at device " + l.Attrs().Name, Want: "that of this process",
			})
		}
	}
	for index := range gone {
		err := outside.Delete(uint32(index))
		if err = errors.Join(err, d.detach(index)); err != nil && d.log != nil {
			d.log.Warn("cannot remove an XDP program from a device", "device", index, "error", err)
		}
		delete(d.running, index)
	}
	return drifts
}

func (d *drivers) holds(index int, known *identities, program *ebpf.Program) bool {
	id, err := known.of(program)
	return err == nil && d.link(index).program() == id
}

func outletOf(l netlink.Link) (out packetsOutlet) {
	copy(out.Mac[:], l.Attrs().HardwareAddr)
	if l.Type() == "veth" {
		out.Redirects = 1
	}
	return out
}

// worthFast says whether a device is one by which packets come from outside and leave again. Ports of a bridge, and
// those that lead to pods, have no address of the node; tunnels, VLANs and bridges themselves have no driver.
func worthFast(l netlink.Link, addrs []netlink.Addr) bool {
	a := l.Attrs()
	switch l.Type() {
	case "device", "bond", "veth":
	default:
		return false
	}
	if a.EncapType != "ether" || a.MasterIndex != 0 || a.Flags&net.FlagUp == 0 {
		return false
	}
	return slices.ContainsFunc(addrs, func(have netlink.Addr) bool {
		return have.LinkIndex == a.Index && have.IP.IsGlobalUnicast()
	})
}

// outside are the devices for drivers.
func (d *devices) outside() (out []netlink.Link, err error) {
	links, err := d.links()
	if err != nil {
		return nil, err
	}
	addrs, err := d.addrs(netlink.FAMILY_ALL)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if worthFast(l, addrs) && !d.pods.Contain(netip.Addr{}, l.Attrs().Name) {
			out = append(out, l)
		}
	}
	return out, nil
}

// accelerate puts the program for drivers in force.
func (d *devices) accelerate(p *packets) error {
	var at []netlink.Link
	if d.drivers.mode.wanted() {
		var err error
		if at, err = d.outside(); err != nil {
			return fmt.Errorf("list devices: %w", err)
		}
	}
	return d.namespace.Do(func() error { return d.drivers.replace(p, at) })
}

// accelerated looks after it.
func (d *devices) accelerated() (drifts []dataplane.Drift, err error) {
	if !d.drivers.mode.wanted() {
		return nil, nil
	}
	at, err := d.outside()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	err = d.namespace.Do(func() error {
		drifts = d.drivers.audit(d.programs, at)
		return nil
	})
	return drifts, err
}

// probeFast has the kernel verify the program for drivers. If it cannot, it is no error but in native mode.
func (p *Plane) probeFast(mode Acceleration) error {
	if !mode.wanted() {
		return nil
	}
	err := p.probePackets(true)
	if errors.Is(err, dataplane.ErrUnsupported) && mode != AccelerationNative {
		p.say("XDP cannot be used; tc alone serves packets", "error", err)
		return nil
	}
	p.devices.drivers.mode = mode
	return err
}

// attach puts a program in force at a device, in place of the one that an earlier call or process has put there, and
// lists the device in outside.
func (d *drivers) attach(l netlink.Link, program *ebpf.Program, outside *ebpf.Map) error {
	if err := sends(l); err != nil {
		return errors.Join(err, d.detach(l.Attrs().Index))
	}
	return d.put(l, program, outside)
}

func (d *drivers) put(device netlink.Link, program *ebpf.Program, outside *ebpf.Map) error {
	err := d.link(device.Attrs().Index).put(program)
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		err = errForeign
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EOPNOTSUPP):
		err = fmt.Errorf("%w: its driver runs no XDP programs", dataplane.ErrUnsupported)
	}
	if err != nil {
		return err
	}
	return outside.Put(uint32(device.Attrs().Index), outletOf(device))
}

func (d *drivers) link(device int) linkPin {
	return linkPin{
		d.path(device), func(i *link.Info) bool {
			at := i.XDP()
			return at != nil && at.Ifindex == uint32(device)
		}, func(program *ebpf.Program) (link.Link, error) {
			return link.AttachXDP(link.XDPOptions{Interface: device, Program: program, Flags: link.XDPDriverMode})
		},
	}
}

func (d *drivers) path(device int) string {
	return filepath.Join(d.dir, xdpPrefix+strconv.Itoa(device))
}

// detach takes our program from a device, also one that is gone.
func (d *drivers) detach(device int) error {
	return unpinLink(d.path(device))
}

// keep takes our programs from all devices but some.
func (d *drivers) keep(some map[int]packetsOutlet) error {
	return dropPinned(d.dir, func(device int) bool { _, stays := some[device]; return !stays }, xdpPrefix)
}

// Of the kernel's family netdev of generic netlink, since Linux 6.3 (include/uapi/linux/netdev.h).
const (
	netdevFamily      = "netdev"
	netdevCmdDevGet   = 1
	netdevIfindex     = 1
	netdevXDPFeatures = 3
	netdevXmit        = 1 << 2 // what XDP programs send leaves
)

// sends says whether what a program sends back leaves the device. The other end of a veth drops it, without a word,
// unless that has a program or GRO. In the place of a bond its ports have the program, which does not know them.
func sends(l netlink.Link) error {
	switch l.Type() {
	case "veth":
	case "bond":
		return fmt.Errorf("%w: packets arrive by the ports of a bond, which have no program", dataplane.ErrUnsupported)
	default:
		return nil
	}
	features, err := xdpFeatures(l.Attrs().Index)
	switch {
	case err != nil:
		return fmt.Errorf("%w: whether the other end of a veth takes what XDP programs send: %w",
			dataplane.ErrUnsupported, err)
	case features&netdevXmit == 0:
		return fmt.Errorf("%w: the other end of this veth takes nothing from XDP programs (`ethtool -K DEVICE gro on` there "+
			"lets it)", dataplane.ErrUnsupported)
	}
	return nil
}

// xdpFeatures asks the kernel which XDP features a device has, by the family netdev of generic netlink.
func xdpFeatures(device int) (uint64, error) {
	conn, err := genetlink.Dial(nil)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	family, err := conn.GetFamily(netdevFamily)
	if err != nil {
		return 0, fmt.Errorf("the kernel does not report this (Linux 6.3): %w", err)
	}
	ask := genetlink.Message{
		Header: genetlink.Header{Command: netdevCmdDevGet, Version: family.Version},
		Data:   nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(device))).Serialize(),
	}
	messages, err := conn.Execute(ask, family.ID, unix.NLM_F_REQUEST)
	if err != nil || len(messages) == 0 {
		return 0, errors.Join(errors.New("the kernel does not report this"), err)
	}
	features := nfnetlink.Attribute(messages[0].Data, netdevXDPFeatures)
	if len(features) != 8 {
		return 0, errors.New("the kernel does not report this")
	}
	return binary.NativeEndian.Uint64(features), nil
}
