package localhost

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// All clients of relays are processes of this node. What one user has with a Service is one client's. Whose a socket is
// the kernel is asked only when half of the places are taken: what was taken before counts as one client's, too.

// maxPlaces bounds the connections, and the flows, of all relays together, if there are files for so many.
const maxPlaces = 4096

// clients are what all relays of a plane share.
type clients struct {
	sockets            namespace.Namespace
	listeners          *share.Pool
	connections, flows *share.Pool
	pipes              *share.Pool // files
	carrier            *carry.Carrier

	mu   sync.Mutex
	diag *netlink.Conn // nil: it is not open
}

// newClients leaves files to relays themselves, and to the rest of the process.
func newClients(sockets namespace.Namespace) *clients {
	files := share.Files() - share.Reserve()
	return &clients{
		sockets: sockets, listeners: share.New(files / 4),
		connections: share.New(min(maxPlaces, files/8)), flows: share.NewReplacing(min(maxPlaces, files/8)),
		pipes: share.New(files / 16), carrier: carry.New(carry.Never, carry.Never),
	}
}

// owner is whose a client's connection or flow would be.
func (c *clients) owner(id model.PoolID, in *share.Pool, s diagSocket) share.Owner {
	o := share.Of(id.Service, share.Client{})
	if in.Used() < in.Capacity()/2 {
		return o
	}
	if uid, ok := c.user(s); ok {
		o.Client = share.User(uid)
	}
	return o
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
func (c *clients) user(s diagSocket) (uid uint32, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.diag == nil {
		_ = c.sockets.Do(func() (err error) { // who cannot be asked does not answer
			c.diag, err = netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
			return err
		})
	}
	if c.diag == nil {
		return 0, false
	}
	answers, err := c.diag.Execute(netlink.Message{
		Header: netlink.Header{Type: diagByFamily, Flags: netlink.Request}, Data: s.request(),
	})
	if err != nil || len(answers) == 0 || len(answers[0].Data) < diagMessage {
		return 0, false
	}
	return binary.NativeEndian.Uint32(answers[0].Data[diagUser:]), true
}

// close ends flows. Connections live on.
func (c *clients) close() error {
	c.flows.Clear()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.diag == nil {
		return nil
	}
	err := c.diag.Close()
	c.diag = nil
	return err
}
