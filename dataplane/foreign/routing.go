package foreign

import (
	"fmt"
	"math"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
)

const (
	protocol = 250 // of the routes and rules that planes make
	dummy    = "kube-ipvs0"
)

// routing hears what is deleted. Who adds something takes nothing from a plane's packets; that is found by looking.
func (w *Watch) routing(m syscall.NetlinkMessage) {
	f := dataplane.Foreign{What: deleted(m)}
	if f.What == "" || w.isOwn(m.Header.Pid) {
		return
	}
	// A socket is mostly numbered as its process is.
	if m.Header.Pid <= math.MaxInt32 {
		f.PID = int(m.Header.Pid)
		f = w.self.named(f)
	}
	w.tell(f)
}

// isOwn knows one socket of this process only. Of its others it is told, and looks in vain.
func (w *Watch) isOwn(port uint32) bool { return port == uint32(unix.Getpid()) }

// deleted says what of a plane's a message says is deleted; empty: nothing.
func deleted(m syscall.NetlinkMessage) string {
	switch {
	case m.Header.Type == unix.RTM_DELLINK && len(m.Data) >= unix.SizeofIfInfomsg:
		if name := text(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME); name == dummy {
			return "deleted link " + name
		}
	case m.Header.Type == unix.RTM_DELADDR && len(m.Data) >= unix.SizeofIfAddrmsg:
		attrs := m.Data[unix.SizeofIfAddrmsg:]
		if text(attrs, unix.IFA_LABEL) == dummy || m.Data[0] == unix.AF_INET6 && m.Data[1] == 128 {
			return "deleted address " + address(attribute(attrs, unix.IFA_ADDRESS))
		}
	case m.Header.Type == unix.RTM_DELROUTE && len(m.Data) >= unix.SizeofRtMsg && m.Data[5] == protocol:
		to := address(attribute(m.Data[unix.SizeofRtMsg:], unix.RTA_DST))
		return fmt.Sprintf("deleted route %s/%d", to, m.Data[1])
	case m.Header.Type == unix.RTM_DELRULE && len(m.Data) >= unix.SizeofRtMsg:
		attrs := m.Data[unix.SizeofRtMsg:]
		if by := attribute(attrs, nl.FRA_PROTOCOL); len(by) == 1 && by[0] == protocol {
			return "deleted rule " + priority(attribute(attrs, nl.FRA_PRIORITY))
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

func attribute(b []byte, kind uint16) []byte {
	attrs, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil
	}
	for _, a := range attrs {
		if a.Attr.Type == kind {
			return a.Value
		}
	}
	return nil
}

func text(b []byte, kind uint16) string { return unix.ByteSliceToString(attribute(b, kind)) }
