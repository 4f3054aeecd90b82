package localhost

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/share"
)

// users tell which user has a socket. All clients of relays are processes of this node, and what one user has with a
// Service is one client's. The kernel is asked only when half of the places are taken: what was taken before counts as
// one client's, too.
type users struct {
	sockets namespace.Namespace

	mu     sync.Mutex
	diag   *netlink.Conn // nil: it is not open
	closed bool
}

// client is whose a packet is.
func (u *users) client(at relay.Packet) share.Client {
	if uid, ok := u.user(diagSocket{uint8(at.Protocol), at.Client, at.Destination}); ok {
		return share.User(uid)
	}
	return share.Client{}
}

// diagSocket is a client's.
type diagSocket struct {
	protocol uint8
	from, to netip.AddrPort
}

// Of include/uapi/linux/inet_diag.h and sock_diag.h.
const (
	diagByFamily = 20 // SOCK_DIAG_BY_FAMILY
	diagRequest  = 56 // bytes of inet_diag_req_v2
	diagMessage  = 72 // bytes of inet_diag_msg
	diagUser     = 64 // where idiag_uid is in it
)

// request asks for the socket. Of UDP the kernel takes the ends the other way round (udp_dump_one in
// net/ipv4/udp_diag.c).
func (s diagSocket) request() []byte {
	from, to := s.from, s.to
	if s.protocol == unix.IPPROTO_UDP {
		from, to = to, from
	}
	b := make([]byte, diagRequest)
	b[0], b[1] = unix.AF_INET6, s.protocol
	if from.Addr().Is4() {
		b[0] = unix.AF_INET
	}
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // any state
	binary.BigEndian.PutUint16(b[8:], from.Port())
	binary.BigEndian.PutUint16(b[10:], to.Port())
	copy(b[12:28], from.Addr().AsSlice())
	copy(b[28:44], to.Addr().AsSlice())
	binary.NativeEndian.PutUint64(b[48:], ^uint64(0)) // whatever its cookie is
	return b
}

// user is the user that has a socket; ok is false where the kernel does not say.
func (u *users) user(s diagSocket) (uid uint32, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.diag == nil && !u.closed {
		_ = u.sockets.Do(func() (err error) { // who cannot be asked does not answer
			u.diag, err = netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
			return err
		})
	}
	if u.diag == nil {
		return 0, false
	}
	answers, err := u.diag.Execute(netlink.Message{
		Header: netlink.Header{Type: diagByFamily, Flags: netlink.Request}, Data: s.request(),
	})
	if err != nil || len(answers) == 0 || len(answers[0].Data) < diagMessage {
		return 0, false
	}
	return binary.NativeEndian.Uint32(answers[0].Data[diagUser:]), true
}

func (u *users) close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	if u.diag == nil {
		return nil
	}
	return u.diag.Close()
}
