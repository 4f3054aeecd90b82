package userspace

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/nfnetlinktest"
	"fairlead.dev/fairlead/model"
)

// FuzzKernel reads arbitrary bytes as what the kernel tells of a redirected datagram: no panic, bounded memory.
func FuzzKernel(f *testing.F) {
	var e nfnetlink.Encoder
	m := e.Message(unix.NFNL_SUBSYS_CTNETLINK<<8, 0, unix.AF_INET)
	tuple := e.Open(1)
	ip := e.Open(1)
	e.Bytes(2, []byte{10, 96, 0, 10})
	e.Close(ip)
	ports := e.Open(2)
	e.Bytes(3, []byte{0, 53})
	e.Close(ports)
	e.Close(tuple)
	e.Finish(m)
	f.Add(e.B)
	f.Fuzz(func(t *testing.T, told []byte) {
		allocs.Bound(t, len(told), func() {
			tracks := &tracking{gate: relay.NewGate(1), conn: nfnetlinktest.New(t, told).Socket}
			client, own := netip.MustParseAddrPort("192.0.2.9:1"), netip.MustParseAddrPort("192.0.2.1:2")
			if to, err := tracks.original(model.UDP, client, own); err == nil && !to.IsValid() {
				t.Error("neither a destination nor an error")
			}
		})
	})
}
