package conntrack

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// answer is a message of the kernel.
type answer struct {
	kind uint16
	body []byte
}

// kernel is a socket whose requests get these answers, one after the other, and after them success.
func kernel(t *testing.T, answers ...[]answer) *nfnetlink.Socket {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, done := nfnetlink.Over(pair[0]), make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(pair[1])
		request := make([]byte, 1<<12)
		for {
			n, _, err := unix.Recvfrom(pair[1], request, 0)
			if err != nil || n == 0 {
				return
			}
			now := []answer{{unix.NLMSG_DONE, make([]byte, 4)}}
			if len(answers) > 0 {
				now, answers = answers[0], answers[1:]
			}
			var b []byte
			for _, a := range now {
				b = binary.NativeEndian.AppendUint32(b, uint32(unix.NLMSG_HDRLEN+len(a.body)))
				b = binary.NativeEndian.AppendUint16(b, a.kind)
				b = append(append(b, 0, 0), request[8:12]...) // the sequence number
				b = append(append(b, 0, 0, 0, 0), a.body...)
			}
			_ = unix.Sendto(pair[1], b, unix.MSG_NOSIGNAL, &unix.SockaddrUnix{}) // fails when the test has ended
		}
	}()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	return s
}

// TestIdle_unknown: a connection is not closed while it is not known whether it has been used.
func TestIdle_unknown(t *testing.T) {
	client, service := netip.MustParseAddrPort("127.0.0.2:1000"), netip.MustParseAddrPort("127.0.0.3:80")
	who := string(orphan{client, service}.key())
	flow := &tracked.Flow{
		Protocol: model.TCP, From: client, To: service, Answers: netip.MustParseAddrPort("127.0.0.4:80"), Back: client,
	}
	family := nft.Families[0]
	table := nft.NewTable(nft.Table{Family: family, Name: "fairlead-idle", Owned: true, Sets: idleSets(family)})
	heard := nfnetlink.Encoder{B: make([]byte, 4)}
	heard.Text(unix.NFTA_SET_ELEM_LIST_TABLE, table.Name)
	list := heard.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	element, key := heard.Open(unix.NFTA_LIST_ELEM), heard.Open(unix.NFTA_SET_ELEM_KEY)
	heard.Bytes(unix.NFTA_DATA_VALUE, append([]byte(who), make([]byte, 8)...))
	heard.Close(key)
	heard.Close(element)
	heard.Close(list)
	done := answer{unix.NLMSG_DONE, make([]byte, 4)}
	refused := binary.NativeEndian.AppendUint32(nil, uint32(0x100000000-int64(unix.EIO)))
	ruleset := nft.Over(kernel(t,
		[]answer{{nfnetlink.NFTables | unix.NFT_MSG_NEWSETELEM, heard.B}, done},
		[]answer{{unix.NLMSG_ERROR, refused}},
	), nil)
	i, asked := &idle{conntrack: kernel(t)}, map[string]*tracked.Flow{who: flow}
	closed, err := i.hear(ruleset, &table, asked)
	if closed != 0 || err == nil || asked[who] == nil {
		t.Errorf("closed %d of one, %v", closed, err)
	}
}
