package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// A UDP socket that is connected keeps its backend, whatever becomes of that. When one has left, the sockets that
// connect() led there are aborted: reading fails with ECONNABORTED, writing with EDESTADDRREQ, and their owners connect
// anew. Those of TCP are, if that is wanted, as well; else their backends end their connections, or time does.
//
//	sockets, flows: does a row still lead there? ─ no ─► /proc/*/ns/net ─► sock_diag: who has that peer? ─► destroy
//
// Most changes end with the first step, which reads memory that is shared with the kernel. Else the sockets of the
// namespaces in question are listed. A connect() that has chosen its backend before the rows changed may end after
// that: the next Audit looks again.

// Of include/uapi/linux/inet_diag.h and sock_diag.h. A request has a family, a protocol, states and the identity of a
// socket; a message has the family, the state and the identity. In an identity there are the local port and that of the
// peer, both addresses with 16 bytes each, the interface, and at its end the cookie.
const (
	diagRequest    = 56 // bytes of inet_diag_req_v2
	diagMessage    = 72 // bytes of inet_diag_msg
	diagID         = 48 // bytes of inet_diag_sockid, with the cookie, in both
	diagRequestID  = 8  // where it begins
	diagMessageID  = 4
	attrInfo       = 2                            // INET_DIAG_INFO, a struct tcp_info
	stateConnected = 1 << 1                       // TCP_ESTABLISHED, of UDP sockets as well
	statesTCP      = stateConnected | 1<<2 | 1<<8 // TCP_SYN_SENT, and TCP_CLOSE_WAIT
	statesHeld     = 1<<12 - 1 - 1<<6 - 1<<10     // all but TCP_TIME_WAIT and TCP_LISTEN
)

// bereft are sockets that are to be aborted.
type bereft struct {
	protocols []model.Protocol
	// of reports whether it may be one that was led from a service to a backend.
	of func(p model.Protocol, service, backend netip.AddrPort) bool
	// wants reports whether one of them is; nil: all are.
	wants   func(s diagSocket, service netip.AddrPort) bool
	aborted int
}

// release aborts the connected sockets whose backend does not serve them any more.
func (p *Plane) release(s *model.State) error {
	if err := p.config.Inject("ebpf release"); err != nil && !p.cannotRelease {
		return err
	}
	return p.abort(&bereft{protocols: p.releases(), of: func(of model.Protocol, service, backend netip.AddrPort) bool {
		return !serves(s, of, service, backend)
	}})
}

// auditReleased looks once more after a release.
func (p *Plane) auditReleased(s *model.State) (err error) {
	if p.releaseAgain {
		err = p.release(s)
		p.releaseAgain = err != nil
	}
	return err
}

// ResetOrphans implements dataplane.Observed. Flows of packets are left to their clients.
func (p *Plane) ResetOrphans(ctx context.Context, gone dataplane.Gone) (n int, err error) {
	if p.behind != nil {
		n, err = p.behind.ResetOrphans(ctx, gone)
	}
	if p.sockets == nil || len(gone) == 0 {
		return n, err
	}
	orphans := &bereft{
		protocols: []model.Protocol{model.TCP},
		wants:     func(s diagSocket, _ netip.AddrPort) bool { return s.unheard },
		of: func(_ model.Protocol, _, backend netip.AddrPort) bool {
			_, is := gone[backend]
			return is
		},
	}
	err = errors.Join(err, p.abort(orphans))
	return n + orphans.aborted, err
}

// CloseIdle implements dataplane.Observed. Flows of packets stay.
func (p *Plane) CloseIdle(ctx context.Context, of *dataplane.Idle) (n int, err error) {
	if p.behind != nil {
		n, err = p.behind.CloseIdle(ctx, of)
	}
	if p.sockets == nil {
		return n, err
	}
	var open []dataplane.Open
	var cookies []uint64
	look := &bereft{
		protocols: []model.Protocol{model.TCP},
		of:        func(_ model.Protocol, _, backend netip.AddrPort) bool { return of.Backends[backend] },
		wants: func(s diagSocket, service netip.AddrPort) bool {
			open = append(open, dataplane.Open{Service: service, Backend: s.peer(), Idle: s.idle})
			cookies = append(cookies, s.cookie())
			return false
		},
	}
	err = errors.Join(err, p.abort(look))
	chosen := map[uint64]time.Duration{}
	for _, i := range of.Choose(open) {
		chosen[cookies[i]] = open[i].Idle
	}
	if len(chosen) > 0 {
		look.wants = func(s diagSocket, _ netip.AddrPort) bool {
			idle, is := chosen[s.cookie()]
			return is && s.idle >= idle // else it has been used meanwhile
		}
		err = errors.Join(err, p.abort(look))
	}
	return n + look.aborted, err
}

// abort aborts sockets in all namespaces where there may be some.
func (p *Plane) abort(b *bereft) error {
	if p.cannotRelease {
		return nil
	}
	where, err := p.find(b)
	if err != nil || len(where) == 0 {
		return err
	}
	spaces, err := namespaces()
	if err != nil {
		return err
	}
	var errs []error
	for _, ns := range spaces {
		err := p.abortIn(ns, b, where)
		if errors.Is(err, unix.EPERM) {
			p.cannotReleasePods(fmt.Errorf("CAP_SYS_ADMIN is needed to reach their network namespaces: %w", err))
			err = nil
		}
		errs = append(errs, err)
		ns.Close()
	}
	if delete(where, anyNetns); len(where) > 0 {
		p.cannotReleasePods(errors.New("their network namespaces are not found in /run/netns, /run/docker/netns or /proc"))
	}
	return p.withoutDiag(errors.Join(errs...))
}

// withoutDiag says it once if it is for want of something in the kernel that sockets cannot be aborted.
func (p *Plane) withoutDiag(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		p.cannotRelease = true
		p.config.Logger().Warn("connected sockets stay with backends that are gone: "+
			"the kernel has no CONFIG_INET_UDP_DIAG, CONFIG_INET_TCP_DIAG or CONFIG_INET_DIAG_DESTROY", "error", err)
		return nil
	}
	return err
}

// cannotReleasePods says it once.
func (p *Plane) cannotReleasePods(err error) {
	if p.releasesNode {
		return
	}
	p.releasesNode = true
	p.config.Logger().Warn("connected sockets of pods stay with backends that are gone", "error", err)
}

// namespaces opens each network namespace in which a process lives, or a thread of this one, and those that container
// runtimes have: in a container other processes cannot be seen.
func namespaces() ([]*os.File, error) {
	var files []*os.File
	seen := map[uint64]bool{}
	for _, pattern := range []string{
		"/proc/[0-9]*/ns/net", "/proc/self/task/*/ns/net", "/run/netns/*", "/run/docker/netns/*",
		"/proc/1/root/run/netns/*", // the machine's, if its processes can be seen
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			f, err := os.Open(path)
			if err != nil {
				continue // it has ended
			}
			var st unix.Stat_t
			var fs unix.Statfs_t
			err = errors.Join(unix.Fstat(int(f.Fd()), &st), unix.Fstatfs(int(f.Fd()), &fs))
			if err != nil || fs.Type != unix.NSFS_MAGIC || seen[st.Ino] {
				f.Close()
				continue
			}
			seen[st.Ino] = true
			files = append(files, f)
		}
	}
	return files, nil
}

// namespaceName is what links in /proc say of it.
func namespaceName(ns *os.File) string {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return "" // which is no namespace's name
	}
	return fmt.Sprintf("net:[%d]", st.Ino)
}

// openDiag asks the kernel for sockets of a namespace.
func openDiag(ns *os.File) (*netlink.Conn, error) {
	c := &netlink.Config{}
	if here, err := ownNode(); err != nil || namespaceName(ns) != here { // where this process is it needs no rights to go
		c.NetNS = int(ns.Fd())
	}
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, c)
	if err != nil {
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	return conn, nil
}

// abortIn takes the namespace from those where there may be such sockets.
func (p *Plane) abortIn(ns *os.File, b *bereft, where map[uint64]bool) error {
	conn, err := openDiag(ns)
	if err != nil {
		return err
	}
	defer conn.Close()
	cookie, known := netnsCookie(conn)
	if known && !where[cookie] && !where[anyNetns] {
		return nil
	}
	if delete(where, cookie); !known { // so that none is known to be missing
		clear(where)
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range b.protocols {
			if err := p.abortSockets(conn, family, protocol, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// releases are the protocols whose sockets are aborted.
func (p *Plane) releases() []model.Protocol {
	if p.releaseTCP {
		return []model.Protocol{model.UDP, model.TCP}
	}
	return []model.Protocol{model.UDP}
}

// abortSockets aborts sockets of one protocol. A socket stays if its Service is not known.
func (p *Plane) abortSockets(conn *netlink.Conn, family uint8, protocol model.Protocol, b *bereft) error {
	states := uint32(stateConnected)
	if protocol == model.TCP {
		states = statesTCP
	}
	sockets, err := listSockets(conn, diagSocket{family: family, protocol: protocol, states: states})
	if err != nil {
		return fmt.Errorf("list %s sockets: %w", protocol, err)
	}
	for _, socket := range sockets {
		service, ok, err := p.service(socket)
		if err != nil {
			return err
		}
		if !ok || !b.of(protocol, service, socket.peer()) || b.wants != nil && !b.wants(socket, service) {
			continue
		}
		if err := socket.destroy(conn); err != nil && !errors.Is(err, unix.ENOENT) { // it has been closed
			return fmt.Errorf("abort a %s socket: %w", protocol, err)
		}
		b.aborted++
	}
	return nil
}

// anyNetns stands for namespaces that are not known.
const anyNetns = 0

func netnsCookie(conn *netlink.Conn) (cookie uint64, known bool) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, false
	}
	var refused error
	err = raw.Control(func(fd uintptr) {
		cookie, refused = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	})
	return cookie, errors.Join(err, refused) == nil // else it is older than Linux 5.14
}

// find are the namespaces in which there may be such sockets, by their cookies.
func (p *Plane) find(b *bereft) (map[uint64]bool, error) {
	where := map[uint64]bool{}
	places, claims, unmap, err := p.socketPlaces()
	if err != nil {
		return nil, err
	}
	defer unmap()
	for i := range places {
		at := &places[i]
		protocol := model.Protocol(at.Protocol)
		if claims[i] == 0 || at.Peer.Backend.Port == 0 || !slices.Contains(b.protocols, protocol) {
			continue
		}
		if !where[at.Netns] && b.of(protocol, at.Peer.Service.addrPort(), at.Peer.Backend.addrPort()) {
			where[at.Netns] = true
		}
	}
	lost, err := p.findFlow(b)
	if lost {
		where[anyNetns] = true
	}
	return where, err
}

// findFlow reports whether one may be that found no place. Where it is, and whether it is open, is not known.
func (p *Plane) findFlow(b *bereft) (lost bool, err error) {
	err = each(p.memory[objectsMapFlows], func(key objectsFlowKey, flow objectsFlow) error {
		protocol := model.Protocol(flow.Protocol)
		lost = lost || key.Back == 1 && slices.Contains(b.protocols, protocol) &&
			b.of(protocol, flow.Other.addrPort(), key.Peer.addrPort())
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("flows: %w", err)
	}
	return lost, nil
}

// service is what a socket asked for when it got its peer; ok is false if connect() did not translate that.
func (p *Plane) service(socket diagSocket) (a netip.AddrPort, ok bool, err error) {
	var at objectsPlace
	peer, cookie := endpoint(socket.peer()), socket.cookie()
	if err := p.memory[objectsMapSockets].Lookup(uint32(cookie)&(p.sizes.orDefault().Sockets-1), &at); err != nil {
		return a, false, err
	}
	if at.Cookie == cookie && at.Peer.Backend == peer {
		return at.Peer.Service.addrPort(), true, nil
	}
	var flow objectsFlow
	err = p.memory[objectsMapFlows].Lookup(objectsFlowKey{Cookie: cookie, Peer: peer, Back: 1}, &flow)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return a, false, nil
	}
	return flow.Other.addrPort(), err == nil, err
}

// serves reports whether a row leads from a service to a backend.
func serves(s *model.State, protocol model.Protocol, service, backend netip.AddrPort) bool {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := model.Key{Addr: service.Addr(), Port: service.Port(), Protocol: protocol, Scope: scope}
		if hasBackend(s.Pools[s.Frontends[key].Pool].Backends, backend) {
			return true
		}
	}
	return false
}

// diagSocket is a socket, or what is asked for.
type diagSocket struct {
	family   uint8
	protocol model.Protocol
	states   uint32
	id       [diagID]byte  // ports, addresses, interface, cookie
	unheard  bool          // of TCP: see socket.Unheard
	idle     time.Duration // likewise: see socket.Idle
}

func (d diagSocket) request() []byte {
	b := make([]byte, diagRequest)
	b[0], b[1], b[2] = d.family, uint8(d.protocol), 1<<(attrInfo-1)
	binary.NativeEndian.PutUint32(b[4:], d.states)
	copy(b[diagRequestID:], d.id[:])
	return b
}

func (d diagSocket) destroy(conn *netlink.Conn) error {
	_, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.SOCK_DESTROY, Flags: netlink.Request | netlink.Acknowledge},
		Data:   d.request(),
	})
	return err
}

func listSockets(conn *netlink.Conn, like diagSocket) ([]diagSocket, error) {
	messages, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.SOCK_DIAG_BY_FAMILY, Flags: netlink.Request | netlink.Dump},
		Data:   like.request(),
	})
	if err != nil {
		return nil, err
	}
	var sockets []diagSocket
	for _, m := range messages {
		if len(m.Data) >= diagMessage {
			info := nfnetlink.Attribute(m.Data[diagMessage:], attrInfo)
			sockets = append(sockets, diagSocket{
				m.Data[0], like.protocol, like.states, [diagID]byte(m.Data[diagMessageID:]),
				socket.Unheard(info), socket.Idle(info),
			})
		}
	}
	return sockets, nil
}

func (d diagSocket) cookie() uint64 { return binary.NativeEndian.Uint64(d.id[40:]) }

func (d diagSocket) local() netip.AddrPort { return d.addrPort(0, 4) }
func (d diagSocket) peer() netip.AddrPort  { return d.addrPort(2, 20) }

// addrPort reads what stands at some places.
func (d diagSocket) addrPort(port, addr int) netip.AddrPort {
	number := binary.BigEndian.Uint16(d.id[port:])
	if d.family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(d.id[addr:])), number)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(d.id[addr:])).Unmap(), number)
}
