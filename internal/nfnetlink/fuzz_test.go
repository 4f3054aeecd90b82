package nfnetlink_test

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzReplies gives a socket arbitrary datagrams in answer to a request and a transaction: no panic, bounded memory,
// and what is read of attributes is part of the datagram.
func FuzzReplies(f *testing.F) {
	f.Add(reply(unix.NLMSG_ERROR, 0, make([]byte, 20)))
	f.Add(reply(unix.NLMSG_DONE, 0, make([]byte, 4)))
	f.Add(reply(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, make([]byte, 4)))
	refused := binary.NativeEndian.AppendUint32(nil, uint32(0x100000000-int64(unix.EEXIST)))
	f.Add(reply(unix.NLMSG_ERROR, 0, refused))
	e := nfnetlink.Encoder{B: make([]byte, 4)}
	e.Text(1, "fairlead")
	nested := e.Open(2)
	e.Uint32(3, 4)
	e.Close(nested)
	table := reply(nfnetlink.NFTables|unix.NFT_MSG_NEWTABLE, unix.NLM_F_MULTI, e.B)
	f.Add(append(table, reply(unix.NLMSG_DONE, 0, nil)...))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		if len(datagram) > 1<<16 {
			return // it is longer than the kernel's datagrams
		}
		allocs.Bound(t, len(datagram), func() {
			ask(t, datagram, func(s *nfnetlink.Socket) error {
				return s.Dump(nfnetlink.Request{Kind: nfnetlink.NFTables | unix.NFT_MSG_GETTABLE, Reset: func() {},
					Each: func(attrs []byte) { readAll(t, attrs, len(datagram)) }})
			})
			ask(t, datagram, func(s *nfnetlink.Socket) error {
				b := s.Begin()
				m := b.Message(nfnetlink.NFTables|unix.NFT_MSG_NEWTABLE, 0, unix.NFPROTO_IPV4)
				b.Text(1, "fairlead")
				b.Finish(m)
				return s.Commit()
			})
			ask(t, datagram, func(s *nfnetlink.Socket) error {
				_, err := s.Generation()
				return err
			})
		})
	})
}

func reply(kind, flags uint16, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, 1) // sequence number
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, body...)
}

// ask makes a request of which the answer is a datagram, and then the end of the connection.
func ask(t *testing.T, datagram []byte, f func(*nfnetlink.Socket) error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := nfnetlink.Over(pair[0])
	defer s.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(pair[1])
		_, _, _ = unix.Recvfrom(pair[1], make([]byte, 1<<12), 0)
		_ = unix.Sendto(pair[1], datagram, unix.MSG_NOSIGNAL, &unix.SockaddrUnix{})
	}()
	_ = f(s) // tests with a kernel check the error
	<-done
}

// readAll reads attributes and what they have inside.
func readAll(t *testing.T, attrs []byte, most int) {
	if len(attrs) > most {
		t.Errorf("attributes of %d bytes are more than the datagram of %d", len(attrs), most)
	}
	nfnetlink.Attributes(attrs, func(kind uint16, data []byte) {
		_ = nfnetlink.Text(attrs, kind)
		readAll(t, data, len(attrs)-4)
	})
}
