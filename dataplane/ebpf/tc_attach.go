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
	"golang.org/x/sys/unix"
)

// side is a hook of a device.
type side struct {
	attach ebpf.AttachType
	parent uint32 // of a filter of tc
	name   string // of a pin, before the device's index
}

func ingress() side { return side{ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, "ingress-"} }
func egress() side  { return side{ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, "egress-"} }

// filter is the name of a filter of tc.
func (s side) filter() string { return "fairlead-" + strings.TrimSuffix(s.name, "-") }

func (d *devices) pin(index int, at side) string {
	return filepath.Join(d.pins, at.name+strconv.Itoa(index))
}

// attach puts a program in force, in place of ours that is there and beside those of others: what it leaves alone they
// see as well. Before Linux 6.6 that is a filter of tc. It runs in the devices' namespace.
func (d *devices) attach(dev device, at side, program *ebpf.Program) error {
	if d.filters {
		return d.attachFilter(dev, at, program)
	}
	err := d.link(dev.index, at).put(program)
	if errors.Is(err, ebpf.ErrNotSupported) {
		d.filters = true
		return d.attachFilter(dev, at, program)
	}
	return err
}

// link is for one side of a device.
func (d *devices) link(index int, at side) linkPin {
	return linkPin{
		d.pin(index, at), func(i *link.Info) bool {
			tcx := i.TCX()
			return tcx != nil && int(tcx.Ifindex) == index && uint32(tcx.AttachType) == uint32(at.attach)
		}, func(program *ebpf.Program) (link.Link, error) {
			return link.AttachTCX(link.TCXOptions{Interface: index, Program: program, Attach: at.attach})
		},
	}
}

// attached is the program of ours at a device; 0: none.
func (d *devices) attached(dev device, at side) ebpf.ProgramID {
	if d.filters {
		if f := d.filter(dev.index, at); f != nil {
			return ebpf.ProgramID(f.Id)
		}
		return 0
	}
	return d.link(dev.index, at).program()
}

// drop takes the programs of all processes from the devices for whose index it says so, the ones that are gone
// included.
func (d *devices) drop(from func(index int) bool) error {
	return errors.Join(dropPinned(d.pins, from, ingress().name, egress().name), d.dropFilters(from))
}

// dropPinned ends the links in a directory whose pins begin so, and end with a device's index for which it says so.
func dropPinned(dir string, from func(index int) bool, prefixes ...string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		for _, prefix := range prefixes {
			number, ok := strings.CutPrefix(e.Name(), prefix)
			if index, err := strconv.Atoi(number); ok && err == nil && from(index) {
				errs = append(errs, unpinLink(filepath.Join(dir, e.Name())))
			}
		}
	}
	return errors.Join(errs...)
}

// filterPriority is behind those that people choose, and before the kernel's own.
const filterPriority = 0x4661

// errIngress says that a device has no place for filters of both sides. The qdisc ingress has the same filters for each
// side that is asked for: the program for what leaves would see what arrives.
var errIngress = errors.New("another program's qdisc ingress is in place of the qdisc clsact, which Linux before 6.6 " +
	"needs; set ebpf.packets: nftables")

// attachFilter uses the qdisc clsact, which others may have made. It stays then, and when they use it.
func (d *devices) attachFilter(dev device, at side, program *ebpf.Program) error {
	err := d.netlink.QdiscReplace(clsact(dev.index)) // keeps one that is there, and refuses one of another kind
	if errors.Is(err, unix.EINVAL) {
		return errIngress
	}
	if err != nil {
		return fmt.Errorf("add qdisc clsact: %w", err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: dev.index, Parent: at.parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: filterPriority,
		},
		Fd: program.FD(), Name: at.filter(), DirectAction: true,
	}
	if err := d.netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("add filter %s: %w", filter.Name, err)
	}
	return nil
}

func clsact(index int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// filter is ours at a device; nil: there is none.
func (d *devices) filter(index int, at side) *netlink.BpfFilter {
	filters, err := d.netlink.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, at.parent)
	if err != nil {
		return nil
	}
	for _, f := range filters {
		bpf, ok := f.(*netlink.BpfFilter)
		if ok && bpf.Priority == filterPriority && bpf.Name == at.filter() {
			return bpf
		}
	}
	return nil
}

// dropFilters removes filters, and the qdiscs that have no other filter.
func (d *devices) dropFilters(from func(index int) bool) error {
	qdiscs, err := d.netlink.QdiscList(nil)
	if err != nil {
		return fmt.Errorf("list qdiscs: %w", err)
	}
	var errs []error
	for _, q := range qdiscs {
		index := q.Attrs().LinkIndex
		if q.Type() != "clsact" || !from(index) {
			continue
		}
		ours := false
		for _, at := range []side{ingress(), egress()} {
			if f := d.filter(index, at); f != nil {
				ours = true
				errs = append(errs, d.netlink.FilterDel(f))
			}
		}
		if ours {
			errs = append(errs, d.dropClsact(index))
		}
	}
	return errors.Join(errs...)
}

// dropClsact removes the qdisc if it has no filter.
func (d *devices) dropClsact(index int) error {
	l := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
	for _, at := range []side{ingress(), egress()} {
		filters, err := d.netlink.FilterList(l, at.parent)
		if err != nil || len(filters) > 0 {
			return err
		}
	}
	return d.netlink.QdiscDel(clsact(index))
}
