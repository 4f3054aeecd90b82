package tracked_test

import (
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/nfnetlinktest"
	"fairlead.dev/fairlead/model"
)

// FuzzFlows lists arbitrary messages as flows: no panic, bounded memory, and what is listed passes the filter.
func FuzzFlows(f *testing.F) {
	f.Add(flow([]byte{192, 0, 2, 9}, []byte{10, 96, 0, 10}))
	f.Add(flow(make([]byte, 16), make([]byte, 16)))
	udp := tracked.Filter{Protocol: model.UDP, Status: tracked.Answered, Mask: tracked.Answered}
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() {
			c := nfnetlinktest.New(t, messages).Socket
			flows, err := tracked.List(c, func(*tracked.Flow) bool { return true }, udp)
			if err != nil {
				t.Error(err)
			}
			for _, f := range flows {
				if f.Protocol != model.UDP || f.Status&tracked.Answered == 0 {
					t.Errorf("the filter lets %+v pass", f)
				}
			}
			if err := tracked.Forget(c, flows); err != nil {
				t.Error(err)
			}
		})
	})
}

// flow is one as the kernel lists it.
func flow(from, to []byte) []byte {
	var e nfnetlink.Encoder
	m := e.Message(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW, 0, unix.AF_UNSPEC)
	source, target := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if len(from) == 16 {
		source, target = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	for _, kind := range []uint16{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY} {
		tuple := e.Open(kind)
		ip := e.Open(nl.CTA_TUPLE_IP)
		e.Bytes(source, from)
		e.Bytes(target, to)
		e.Close(ip)
		ports := e.Open(nl.CTA_TUPLE_PROTO)
		e.Bytes(nl.CTA_PROTO_NUM, []byte{byte(model.UDP)})
		e.Bytes(nl.CTA_PROTO_SRC_PORT, []byte{0x80, 1})
		e.Bytes(nl.CTA_PROTO_DST_PORT, []byte{0, 53})
		e.Close(ports)
		e.Close(tuple)
	}
	e.Uint32(nl.CTA_STATUS, uint32(tracked.Answered))
	e.Uint32(nl.CTA_MARK, 1)
	info := e.Open(nl.CTA_PROTOINFO)
	tcp := e.Open(nl.CTA_PROTOINFO_TCP)
	e.Bytes(nl.CTA_PROTOINFO_TCP_STATE, []byte{nl.TCP_CONNTRACK_SYN_SENT})
	e.Close(tcp)
	e.Close(info)
	e.Finish(m)
	return e.B
}
