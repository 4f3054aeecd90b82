package external

import (
	"encoding/binary"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzMessages hears arbitrary datagrams of each kind: no panic, bounded memory, and each change that is told says what
// has changed.
func FuzzMessages(f *testing.F) {
	var e nfnetlink.Encoder
	rule := e.Message(nfnetlink.NFTables|unix.NFT_MSG_DELRULE, 0, unix.NFPROTO_IPV4)
	e.Text(unix.NFTA_RULE_TABLE, "nat")
	e.Text(unix.NFTA_RULE_CHAIN, "KUBE-SERVICES")
	e.Finish(rule)
	end := e.Message(nfnetlink.NFTables|unix.NFT_MSG_NEWGEN, 0, unix.AF_UNSPEC)
	e.Text(unix.NFTA_GEN_PROC_NAME, "nft")
	e.Uint32(unix.NFTA_GEN_PROC_PID, 1)
	e.Finish(end)
	f.Add(e.B)
	link := nfnetlink.Encoder{B: make([]byte, unix.SizeofIfInfomsg)}
	link.Text(unix.IFLA_IFNAME, dummy)
	f.Add(message(unix.RTM_NEWLINK, link.B))
	f.Add(message(unix.RTM_DELLINK, link.B))
	route := nfnetlink.Encoder{B: make([]byte, unix.SizeofRtMsg)}
	route.B[1], route.B[5] = 16, protocol
	route.Bytes(unix.RTA_DST, []byte{10, 96, 0, 0})
	f.Add(message(unix.RTM_DELROUTE, route.B))
	f.Add(message(unix.AUDIT_NETFILTER_CFG, []byte("audit(1.2:3): table=nat:7 family=2 op=xt_replace pid=321 "+
		`subj=unconfined comm="iptables"`)))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		allocs.Bound(t, len(datagram), func() {
			w := &Watch{changes: make(chan dataplane.ExternalChange, maxPending), self: self{comm: "fairlead"}}
			hearers := []func(syscall.NetlinkMessage){w.ruleset(), w.routing(), w.records}
			for m := range nfnetlink.Messages(datagram) {
				m.Header.Pid = 1 // the sockets of a process are not sought, which takes long
				for _, hear := range hearers {
					hear(m)
				}
			}
			for range len(w.changes) {
				if c := <-w.changes; strings.TrimSpace(c.What) == "" {
					t.Errorf("%+v says nothing", c)
				}
			}
		})
	})
}

func message(kind uint16, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(append(b, make([]byte, 10)...), body...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}
