package ipvs

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nfnetlink/nfnetlinktest"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
)

// FuzzReplies reads arbitrary datagrams as IPVS's answers to the listings of servers and to a question: no panic,
// bounded memory, and what a reply says of a server can be asked for again.
func FuzzReplies(f *testing.F) {
	for _, text := range []string{"10.96.0.10:80", "[fd00::10]:80"} {
		at := netip.MustParseAddrPort(text)
		key := addressKey(model.Key{Addr: at.Addr(), Protocol: model.TCP, Port: at.Port()})
		f.Add(replies(f, newServer(key, "rr", nil), realRequest(cmdNewDest, key, real{addr: at, weight: 3}, nil)))
	}
	f.Add(replies(f, newServer(serverKey{mark: markBits | 1}, "mh", nil)))
	f.Add(replies(f))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		allocs.Bound(t, len(datagram), func() { readReplies(t, datagram) })
	})
}

func readReplies(t *testing.T, datagram []byte) {
	_, _ = objects(datagram, 1, attrService, func(ad *netlink.AttributeDecoder) error {
		key, s := decodeServer(ad)
		_ = adopt(s, nil).compare(key, newHeld("rr"))
		if _, err := (&director{}).message(request{command: cmdGetDest, encode: key.identify}, 0); err != nil {
			t.Errorf("%s cannot be asked for: %v", key, err)
		}
		return ad.Err()
	})
	_, _ = objects(datagram, 1, attrDest, func(ad *netlink.AttributeDecoder) error {
		_ = adopt(listed{}, []real{decodeReal(ad, false)})
		return ad.Err()
	})
	messages, _ := syscall.ParseNetlinkMessage(datagram)
	for _, m := range messages {
		_, _ = decodeTimeouts(m)
	}
}

// replies are requests as the kernel would list what they make, and the end of the list.
func replies(t testing.TB, requests ...request) (b []byte) {
	for _, r := range requests {
		m, err := (&director{}).message(r, 0)
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

// FuzzTables lists arbitrary messages to the plane as its tables of nf_tables: no panic, and bounded memory.
func FuzzTables(f *testing.F) {
	s, err := model.ParseState(`
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster allow 10.0.0.0/8
frontend 10.96.0.12:80/tcp any reject default/none:http
frontend [fd00::10]:80/tcp internal forward default/web:http cluster6 snat never
pool default/web:http cluster affinity 3h0m0s
backend default/web:http cluster 10.244.1.2:8080 local
pool default/web:http cluster6
backend default/web:http cluster6 [fd00::af4:102]:8080
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
`)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(written(f, s))
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() {
			p := &Plane{conn: nfnetlinktest.New(t, messages).Socket, config: dataplane.Config{Mark: dataplane.DefaultMark}}
			k, err := p.recognise(s)
			if errors.Is(err, nfnetlink.ErrInterrupted) { // an element is listed twice
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, table := range k.tables {
				if _, err := table.records(p.conn); err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
					t.Error(err)
				}
				if err := p.eachSession(table, k.sticky(), func(dataplane.Session) {}); err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
					t.Error(err)
				}
			}
		})
	})
}

// written are the messages by which the plane makes its tables.
func written(t testing.TB, s *model.State) []byte {
	kernel := nfnetlinktest.New(t, nil)
	p := &Plane{conn: kernel.Socket, config: dataplane.Config{Mark: dataplane.DefaultMark}}
	p.director, p.locals = &director{lacking: &lacking{}}, &locals{}
	todo, err := p.planAll(p.newKernel(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.commit(&todo.records), p.commit(&todo.table)); err != nil {
		t.Fatal(err)
	}
	return kernel.Sent()
}
