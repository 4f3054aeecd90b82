package ipvs

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
)

// FuzzReplies reads arbitrary datagrams as IPVS's answers to the listings of servers and to a question. It must not
// panic, and its memory is bounded. Each server of a reply can be asked for again.
func FuzzReplies(f *testing.F) {
	for _, text := range []string{"10.96.0.10:80", "[fd00::10]:80"} {
		at := netip.MustParseAddrPort(text)
		key := Key{Addr: at.Addr(), Protocol: model.TCP, Port: at.Port(), V6: at.Addr().Is6()}
		f.Add(replies(f, NewServer(key, "rr", nil), NewRequest(NewDestination, key, Destination{Addr: at, Weight: 3}, nil)))
	}
	f.Add(replies(f, NewServer(Key{Mark: 1}, "mh", nil)))
	f.Add(replies(f))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		allocs.Bound(t, len(datagram), func() { readReplies(t, datagram) })
	})
}

func readReplies(t *testing.T, datagram []byte) {
	_, _ = objects(datagram, 1, inside(attrService, func(ad *netlink.AttributeDecoder) error {
		key, _ := decodeServer(ad)
		if _, err := (&Client{}).message(Request{command: cmdGetDest, encode: key.identify}, 0); err != nil {
			t.Errorf("%s cannot be asked for: %v", key, err)
		}
		return ad.Err()
	}))
	_, _ = objects(datagram, 1, inside(attrDest, func(ad *netlink.AttributeDecoder) error {
		_ = decodeDestination(ad, false)
		return ad.Err()
	}))
}

// replies are requests as the kernel would list what they make, and the end of the list.
func replies(t testing.TB, requests ...Request) (b []byte) {
	for _, r := range requests {
		m, err := (&Client{}).message(r, 0)
		if err != nil {
			t.Fatal(err)
		}
		b = append(b, reply(unix.NLMSG_MIN_TYPE, m.Data)...)
	}
	return append(b, reply(unix.NLMSG_DONE, make([]byte, 4))...)
}

func reply(kind uint16, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_MULTI)
	b = binary.NativeEndian.AppendUint64(b, 1) // sequence number
	b = append(b, body...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}
