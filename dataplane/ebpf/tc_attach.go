package ebpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// side is a hook of a device.
type side struct {
	attach ebpf.AttachType
	parent uint32 // of a filter of tc
	name   string
}

func ingress() side {
	return side{ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, "fairlead-ingress"}
}

func egress() side {
	return side{ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, "fairlead-egress"}
}

// detach takes a program from its hook.
type detach func() error

// attachPackets puts a program in force at a device of the calling thread's network namespace, beside those of others:
// what it leaves alone they see as well. Before Linux 6.6 that is a filter of tc.
func attachPackets(device int, at side, program *ebpf.Program) (detach, error) {
	l, err := link.AttachTCX(link.TCXOptions{Interface: device, Program: program, Attach: at.attach})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return attachFilter(device, at, program)
	}
	if err != nil {
		return nil, fmt.Errorf("attach to interface %d: %w", device, err)
	}
	return l.Close, nil
}

// attachFilter uses the qdisc clsact, which others may have made. It stays then, and when they use it.
func attachFilter(device int, at side, program *ebpf.Program) (detach, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	qdisc := clsact(device)
	if err := h.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		h.Close()
		return nil, fmt.Errorf("add qdisc clsact to interface %d: %w", device, err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: device, Parent: at.parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: filterPriority,
		},
		Fd: program.FD(), Name: at.name, DirectAction: true,
	}
	if err := h.FilterReplace(filter); err != nil {
		h.Close()
		return nil, fmt.Errorf("add filter %s to interface %d: %w", at.name, device, err)
	}
	return func() error {
		defer h.Close()
		return errors.Join(h.FilterDel(filter), dropClsact(h, device))
	}, nil
}

// filterPriority is behind those that people choose, and before the kernel's own.
const filterPriority = 0x4661

func clsact(device int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: device, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// dropClsact removes the qdisc if nobody has a filter there.
func dropClsact(h *netlink.Handle, device int) error {
	l := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: device}}
	for _, at := range []side{ingress(), egress()} {
		filters, err := h.FilterList(l, at.parent)
		if err != nil || len(filters) > 0 {
			return err
		}
	}
	return h.QdiscDel(clsact(device))
}
