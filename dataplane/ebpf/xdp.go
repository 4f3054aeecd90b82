package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

// Acceleration says whether packets of known flows that come from outside and go there again take a way past the
// stack: bpf/xdp.c, run by the drivers of devices.
type Acceleration string

const (
	// AccelerationOff leaves drivers alone. So does the empty one.
	AccelerationOff Acceleration = "off"
	// AccelerationBestEffort uses the drivers that can, and says nothing of others.
	AccelerationBestEffort Acceleration = "best-effort"
	// AccelerationNative makes an error of a device whose driver cannot. What arrives there is served all the same.
	AccelerationNative Acceleration = "native"
)

func (a Acceleration) wanted() bool { return a == AccelerationBestEffort || a == AccelerationNative }

// errForeign says that a device has somebody else's program, of which it can have only one.
var errForeign = errors.New("it has an XDP program of somebody else")

// xdpPrefix begins the names of the pins of links; the device's index ends them.
const xdpPrefix = "xdp-"

// outsideDevices is how many devices may have the program.
const outsideDevices = 256

// fast prepares the program for drivers, or leaves it out.
func fast(spec *ebpf.CollectionSpec, wanted bool) {
	if wanted {
		spec.Maps[packetsMapOutside].MaxEntries = outsideDevices
		return
	}
	delete(spec.Programs, packetsProgFromOutside)
	delete(spec.Maps, packetsMapOutside)
}

// drivers are the devices whose drivers run a program. Links are held by pins alone, in a directory that others use, too.
type drivers struct{ dir string }

// worthFast says whether a device is one by which packets come from outside and leave again. Ports of a bridge, and
// those that lead to pods, have no address of the node; tunnels, VLANs and bridges themselves have no driver.
func worthFast(l netlink.Link, addrs []netlink.Addr) bool {
	switch l.Type() {
	case "device", "bond", "veth":
	default:
		return false
	}
	if l.Attrs().EncapType != "ether" || l.Attrs().MasterIndex != 0 {
		return false
	}
	for _, a := range addrs {
		if a.IP.IsGlobalUnicast() {
			return true
		}
	}
	return false
}

// attach puts a program in force at a device, in place of the one that an earlier call or process has put there, and
// lists the device in outside.
func (d drivers) attach(l netlink.Link, program *ebpf.Program, outside *ebpf.Map) error {
	device := l.Attrs()
	if err := sends(l); err != nil {
		return errors.Join(err, d.detach(device.Index))
	}
	return d.put(device, program, outside)
}

func (d drivers) put(device *netlink.LinkAttrs, program *ebpf.Program, outside *ebpf.Map) error {
	err := d.replace(device.Index, program)
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		err = errForeign
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EOPNOTSUPP):
		err = fmt.Errorf("%w: its driver runs no XDP programs", dataplane.ErrUnsupported)
	}
	if err != nil {
		return err
	}
	var mac packetsMac
	copy(mac.Bytes[:], device.HardwareAddr)
	return outside.Put(uint32(device.Index), mac)
}

func (d drivers) replace(device int, program *ebpf.Program) error {
	if l := d.open(device); l != nil {
		defer l.Close()
		return l.Update(program)
	}
	path := d.path(device)
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := link.AttachXDP(link.XDPOptions{Interface: device, Program: program, Flags: link.XDPDriverMode})
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(path)
}

func (d drivers) path(device int) string { return filepath.Join(d.dir, xdpPrefix+strconv.Itoa(device)) }

// open is nil if there is no link of ours to that device.
func (d drivers) open(device int) link.Link {
	l, err := link.LoadPinnedLink(d.path(device), nil)
	if err != nil {
		return nil
	}
	if info, err := l.Info(); err == nil {
		if at := info.XDP(); at != nil && at.Ifindex == uint32(device) {
			return l
		}
	}
	l.Close()
	return nil
}

// runs is the program that a device has from us; 0: none.
func (d drivers) runs(device int) ebpf.ProgramID {
	l := d.open(device)
	if l == nil {
		return 0
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0
	}
	return info.Program
}

// detach takes our program from a device, also one that is gone.
func (d drivers) detach(device int) error {
	path := d.path(device)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return errors.Join(l.Unpin(), l.Close()) // nobody else holds it
}

// pinned are the devices that have had a program from us.
func (d drivers) pinned() (devices []int, err error) {
	entries, err := os.ReadDir(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if number, ok := strings.CutPrefix(e.Name(), xdpPrefix); ok {
			if device, err := strconv.Atoi(number); err == nil {
				devices = append(devices, device)
			}
		}
	}
	return devices, err
}

// keep takes our programs from all devices but some.
func (d drivers) keep(some map[int]bool) error {
	devices, err := d.pinned()
	errs := []error{err}
	for _, device := range devices {
		if !some[device] {
			errs = append(errs, d.detach(device))
		}
	}
	return errors.Join(errs...)
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
// unless that has a program or GRO.
func sends(l netlink.Link) error {
	if l.Type() != "veth" {
		return nil
	}
	features, err := xdpFeatures(l.Attrs().Index)
	switch {
	case err != nil:
		return fmt.Errorf("%w: whether the other end of a veth takes what XDP programs send: %w", dataplane.ErrUnsupported, err)
	case features&netdevXmit == 0:
		return fmt.Errorf("%w: the other end of this veth takes nothing from XDP programs (`ethtool -K DEVICE gro on` there "+
			"lets it)", dataplane.ErrUnsupported)
	}
	return nil
}

func xdpFeatures(device int) (uint64, error) {
	family, err := netlink.GenlFamilyGet(netdevFamily)
	if err != nil {
		return 0, fmt.Errorf("the kernel does not tell (Linux 6.3): %w", err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), 0)
	req.AddRawData([]byte{netdevCmdDevGet, byte(family.Version), 0, 0})
	req.AddRawData(nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(device))).Serialize())
	messages, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil || len(messages) == 0 {
		return 0, errors.Join(errors.New("the kernel does not tell"), err)
	}
	attrs, err := nl.ParseRouteAttr(messages[0][nl.SizeofGenlmsg:])
	if err != nil {
		return 0, err
	}
	for _, a := range attrs {
		if a.Attr.Type == netdevXDPFeatures && len(a.Value) == 8 {
			return nl.NativeEndian().Uint64(a.Value), nil
		}
	}
	return 0, errors.New("the kernel does not tell")
}
