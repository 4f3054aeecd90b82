// Package nfnetlinktest stands in for the kernel at the other end of an nfnetlink.Socket: what it lists are messages
// that a test gives it, well-formed or not. It keeps the transactions that it is sent, which are messages of the same
// form, so that what a plane writes can be listed to it.
//
//	messages ─► Kernel ◄─ socket pair ─► nfnetlink.Socket ◄─ plane
//	                └─► Sent: the messages of transactions
package nfnetlinktest

import (
	"encoding/binary"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
)

// header is the size of struct nlmsghdr, headers that of it and struct nfgenmsg.
const (
	header  = unix.NLMSG_HDRLEN
	headers = header + 4
)

// Kernel answers requests.
type Kernel struct {
	Socket *nfnetlink.Socket

	fd       int
	messages [][]byte
	mu       sync.Mutex
	sent     []byte
}

// longest is how many bytes of messages find what is to be found.
const longest = 1 << 15

// New makes one that lists messages, until the test ends; of very many only the first ones.
func New(t testing.TB, messages []byte) *Kernel {
	t.Helper()
	messages = messages[:min(len(messages), longest)]
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	k := &Kernel{Socket: nfnetlink.Over(pair[0]), fd: pair[1], messages: split(messages)}
	k.Socket.Room = 1 << 16
	for _, m := range k.messages {
		binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_MULTI) // no listing is interrupted
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.serve()
	}()
	t.Cleanup(func() {
		_ = k.Socket.Close()
		<-done
		_ = unix.Close(k.fd)
	})
	return k
}

// Sent are the messages of all transactions, without what brackets them.
func (k *Kernel) Sent() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.sent)
}

// split cuts messages apart. The last one ends where the bytes end; what is shorter than its headers is left out.
func split(b []byte) (messages [][]byte) {
	for len(b) >= headers {
		n := int(binary.NativeEndian.Uint32(b))
		if n < headers || n > len(b) {
			n = len(b)
		}
		m := slices.Clone(b[:n])
		binary.NativeEndian.PutUint32(m, uint32(n))
		m = append(m, make([]byte, (4-n%4)%4)...) // as the kernel's datagrams are
		messages = append(messages, m)
		b = b[min((n+3)&^3, len(b)):]
	}
	return messages
}

// serve answers until the other end is closed.
func (k *Kernel) serve() {
	buffer := make([]byte, 1<<17)
	for {
		n, _, err := unix.Recvfrom(k.fd, buffer, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		k.answer(buffer[:n])
	}
}

func kind(m []byte) uint16  { return binary.NativeEndian.Uint16(m[4:]) }
func flags(m []byte) uint16 { return binary.NativeEndian.Uint16(m[6:]) }

// answer answers a request, or acknowledges a transaction.
func (k *Kernel) answer(request []byte) {
	requests := split(request)
	switch first := requests[0]; {
	case kind(first) == unix.NFNL_MSG_BATCH_BEGIN:
		k.perform(requests)
	case flags(first)&unix.NLM_F_DUMP == unix.NLM_F_DUMP:
		for _, m := range k.messages {
			if concerns(first, m) {
				k.send(m, first)
			}
		}
		k.send(end(unix.NLMSG_DONE, 0), first)
	case flags(first)&unix.NLM_F_ACK != 0:
		k.send(end(unix.NLMSG_ERROR, 0), first)
	default:
		i := slices.IndexFunc(k.messages, func(m []byte) bool { return concerns(first, m) })
		if i < 0 {
			k.send(end(unix.NLMSG_ERROR, unix.ENOENT), first)
			return
		}
		k.send(k.messages[i], first)
	}
}

func (k *Kernel) perform(requests [][]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range requests {
		if kind(r) != unix.NFNL_MSG_BATCH_BEGIN && kind(r) != unix.NFNL_MSG_BATCH_END {
			k.sent = append(k.sent, r...)
		}
		if flags(r)&unix.NLM_F_ACK != 0 {
			k.send(end(unix.NLMSG_ERROR, 0), r)
		}
	}
}

// object is the attribute by which the elements of one set, or the rules of one chain, are asked for.
const object = unix.NFTA_SET_ELEM_LIST_SET

// concerns reports whether a message answers a request: it makes what is asked for, or is of the same type.
func concerns(request, m []byte) bool {
	asked, is := kind(request), kind(m)
	if is != asked && is+1 != asked || request[header] != 0 && m[header] != request[header] {
		return false
	}
	if asked>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return true
	}
	name := nfnetlink.Text(request[headers:], object)
	has := nfnetlink.Text(m[headers:], object)
	return name == "" || has == "" || has == name
}

// end ends an answer; it has an error number and room for what a reader may expect behind it.
func end(kind uint16, err unix.Errno) []byte {
	m := make([]byte, header+4+header)
	binary.NativeEndian.PutUint32(m, uint32(len(m)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	binary.NativeEndian.PutUint32(m[header:], uint32(-int32(err)))
	return m
}

// send sends a message that answers a request. It fails when the other end is closed.
func (k *Kernel) send(m, request []byte) {
	copy(m[8:12], request[8:12])
	_ = unix.Sendto(k.fd, m, unix.MSG_NOSIGNAL, &unix.SockaddrUnix{})
}
