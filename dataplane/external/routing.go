package external

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
)

const (
	protocol = 250 // of the routes and rules that planes make
	dummy    = "kube-ipvs0"
)

// routing reports deletions. Additions take nothing from a plane's packets; audits find them. The number of the
// interface is remembered while it exists: messages about addresses of IPv6 do not have its name.
func (w *Watch) routing() func(syscall.NetlinkMessage) {
	own, number := ownPorts{}, 0
	if link, err := net.InterfaceByName(dummy); err == nil { // else its making will be heard of
		number = link.Index
	}
	return func(m syscall.NetlinkMessage) {
		f := dataplane.ExternalChange{What: deleted(m, number)}
		number = numberOf(m, number)
		if f.What == "" || own.has(m.Header.Pid) {
			return
		}
		// A socket is mostly numbered as its process is.
		if m.Header.Pid <= math.MaxInt32 {
			f.PID = int(m.Header.Pid)
			f = w.self.named(f)
		}
		w.notify(f)
	}
}

// numberOf is the number of the interface after a message.
func numberOf(m syscall.NetlinkMessage, before int) int {
	about := m.Header.Type == unix.RTM_NEWLINK || m.Header.Type == unix.RTM_DELLINK
	if !about || len(m.Data) < unix.SizeofIfInfomsg {
		return before
	}
	number := int(nl.NativeEndian().Uint32(m.Data[4:]))
	is := m.Header.Type == unix.RTM_NEWLINK && nfnetlink.Text(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME) == dummy
	switch {
	case is:
		return number
	case number == before: // it is gone, or has another name
		return 0
	}
	return before
}

// ownPorts are those of this process's sockets that have been heard of.
type ownPorts map[uint32]bool

// has reports whether a socket of this process asked. The first one has the number of the process, others any: of one
// that is not known its files tell.
func (o ownPorts) has(port uint32) bool {
	if port == uint32(unix.Getpid()) || o[port] {
		return true
	}
	if port <= math.MaxInt32 || !isOpen(port) {
		return false
	}
	o[port] = true
	return true
}

// isOpen reports whether this process has such a socket.
func isOpen(port uint32) bool {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return false // then we look in vain
	}
	return slices.ContainsFunc(files, func(file os.DirEntry) bool {
		fd, err := strconv.Atoi(file.Name())
		if err != nil {
			return false
		}
		name, err := unix.Getsockname(fd)
		address, ok := name.(*unix.SockaddrNetlink)
		if err != nil || !ok || address.Pid != port {
			return false
		}
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		return err == nil && kind == unix.NETLINK_ROUTE
	})
}

// deleted says what of a plane's a message says is deleted; empty: nothing. The number is that of the interface.
func deleted(m syscall.NetlinkMessage, number int) string {
	switch {
	case m.Header.Type == unix.RTM_DELLINK && len(m.Data) >= unix.SizeofIfInfomsg:
		if name := nfnetlink.Text(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME); name == dummy {
			return "deleted link " + name
		}
	case m.Header.Type == unix.RTM_DELADDR && len(m.Data) >= unix.SizeofIfAddrmsg:
		if on := int(nl.NativeEndian().Uint32(m.Data[4:])); number != 0 && on == number {
			attrs := m.Data[unix.SizeofIfAddrmsg:]
			return "deleted address " + address(nfnetlink.Attribute(attrs, unix.IFA_ADDRESS))
		}
	case m.Header.Type == unix.RTM_DELROUTE && len(m.Data) >= unix.SizeofRtMsg && m.Data[5] == protocol:
		to := address(nfnetlink.Attribute(m.Data[unix.SizeofRtMsg:], unix.RTA_DST))
		return fmt.Sprintf("deleted route %s/%d", to, m.Data[1])
	case m.Header.Type == unix.RTM_DELRULE && len(m.Data) >= unix.SizeofRtMsg:
		attrs := m.Data[unix.SizeofRtMsg:]
		if by := nfnetlink.Attribute(attrs, nl.FRA_PROTOCOL); len(by) == 1 && by[0] == protocol {
			return "deleted rule " + priority(nfnetlink.Attribute(attrs, nl.FRA_PRIORITY))
		}
	}
	return ""
}

func priority(b []byte) string {
	if len(b) != 4 {
		return "0"
	}
	return fmt.Sprint(nl.NativeEndian().Uint32(b))
}

func address(b []byte) string {
	if a, ok := netip.AddrFromSlice(b); ok {
		return a.String()
	}
	return "default"
}
