package ebpf

import (
	"errors"
	"math"

	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// event is what the kernel tells.
type event struct {
	link    netlink.Link // that is new, changed or gone; nil: this is not about a device
	gone    bool
	address bool // it is about addresses, or a default route
	lost    bool // there was more than fits: anything may have happened
}

// watch hears of devices, addresses and default routes, in a goroutine of its own.
type watch struct {
	conn *mdlayher.Conn
	done chan struct{}
}

// newWatch watches the network namespace of the calling thread.
func newWatch(happened func(event)) (*watch, error) {
	conn, err := mdlayher.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, err
	}
	if err := conn.SetBPF(withoutRoutes()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	for _, group := range []uint32{
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
		unix.RTNLGRP_IPV6_ROUTE,
	} {
		if err := conn.JoinGroup(group); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	w := &watch{conn, make(chan struct{})}
	go w.run(happened)
	return w, nil
}

// withoutRoutes has the kernel keep back what is about routes that are no default ones: a node may have many, and more
// come with each pod. Such a filter reads as from a network, so that the bytes of numbers have changed places.
func withoutRoutes() []bpf.RawInstruction {
	const typeAt, lengthAt = 4, unix.NLMSG_HDRLEN + 1 // of struct nlmsghdr, and rtm_dst_len
	filter, _ := bpf.Assemble([]bpf.Instruction{      // it fails for instructions that there are not
		bpf.LoadAbsolute{Off: typeAt, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.RTM_NEWROUTE << 8, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.RTM_DELROUTE << 8, SkipTrue: 2},
		bpf.LoadAbsolute{Off: lengthAt, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 1},
		bpf.RetConstant{Val: math.MaxUint32},
		bpf.RetConstant{Val: 0},
	})
	return filter
}

func (w *watch) run(happened func(event)) {
	defer close(w.done)
	for {
		messages, err := w.conn.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			happened(event{lost: true})
		case err != nil:
			return // it is closed; Audit looks at all devices in any case
		}
		for _, m := range messages {
			if e, ok := read(m); ok {
				happened(e)
			}
		}
	}
}

// read understands a message. Those of bridges about their ports are left out: "deleted" is a port, not its device.
func read(m mdlayher.Message) (e event, ok bool) {
	kind := uint16(m.Header.Type)
	if kind != unix.RTM_NEWLINK && kind != unix.RTM_DELLINK {
		return event{address: true}, true
	}
	if len(m.Data) == 0 || m.Data[0] != unix.AF_UNSPEC {
		return e, false
	}
	l, err := netlink.LinkDeserialize(&unix.NlMsghdr{Type: kind}, m.Data)
	if err != nil {
		return event{lost: true}, true
	}
	return event{link: l, gone: kind == unix.RTM_DELLINK}, true
}

func (w *watch) close() error {
	err := w.conn.Close()
	<-w.done
	return err
}
