package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// A UDP socket that is connected keeps its backend, whatever becomes of that. When one has left, the sockets that
// connect() led there are aborted: reading fails with ECONNABORTED, writing with EDESTADDRREQ, and their owners connect
// anew.
//
//	/proc/*/ns/net ─► connected UDP sockets ─► sockets: is the peer a backend? ─► does a row still say so? ─► destroy

// Of include/uapi/linux/inet_diag.h and sock_diag.h.
const (
	diagRequest    = 56 // bytes of inet_diag_req_v2
	diagMessage    = 72 // bytes of inet_diag_msg
	diagID         = 48 // bytes of inet_diag_sockid, with the cookie, in both
	diagRequestID  = 8  // where it begins
	diagMessageID  = 4
	stateConnected = 1 << 1 // TCP_ESTABLISHED, of UDP sockets as well
)

// release aborts the connected UDP sockets whose backend does not serve them any more.
func (p *Plane) release(s *model.State) error {
	if p.cannotRelease {
		return nil
	}
	if err := p.fault("ebpf release"); err != nil {
		return err
	}
	spaces, err := namespaces()
	if err != nil {
		return err
	}
	var errs []error
	for _, ns := range spaces {
		err := p.releaseIn(ns, s)
		if errors.Is(err, unix.EPERM) {
			p.cannotReleasePods(err)
			err = nil
		}
		errs = append(errs, err)
		ns.Close()
	}
	err = errors.Join(errs...)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		p.cannotRelease = true
		if p.config.Log != nil {
			p.config.Log.Warn("connected UDP sockets stay with backends that are gone: "+
				"the kernel has no CONFIG_INET_UDP_DIAG or CONFIG_INET_DIAG_DESTROY", "error", err)
		}
		return nil
	}
	return err
}

// cannotReleasePods says it once.
func (p *Plane) cannotReleasePods(err error) {
	if p.onlyNode {
		return
	}
	p.onlyNode = true
	if p.config.Log != nil {
		p.config.Log.Warn("connected UDP sockets of pods stay with backends that are gone: CAP_SYS_ADMIN is needed to reach "+
			"them", "error", err)
	}
}

// namespaces opens each network namespace in which a process lives, or a thread of this one, and those that container
// runtimes have: in a container other processes cannot be seen.
func namespaces() ([]*os.File, error) {
	var files []*os.File
	seen := map[uint64]bool{}
	for _, pattern := range []string{
		"/proc/[0-9]*/ns/net", "/proc/self/task/*/ns/net", "/run/netns/*", "/run/docker/netns/*",
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

func (p *Plane) releaseIn(ns *os.File, s *model.State) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return err
	}
	c := &netlink.Config{}
	if fmt.Sprintf("net:[%d]", st.Ino) != p.node { // where this process is it needs no rights to go
		c.NetNS = int(ns.Fd())
	}
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, c)
	if err != nil {
		return fmt.Errorf("open sock_diag: %w", err)
	}
	defer conn.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		sockets, err := listSockets(conn, family)
		if err != nil {
			return fmt.Errorf("list UDP sockets: %w", err)
		}
		for _, socket := range sockets {
			service, ok, err := p.service(socket)
			if err != nil {
				return err
			}
			if !ok || serves(s, service, socket.peer()) {
				continue
			}
			if err := socket.destroy(conn); err != nil && !errors.Is(err, unix.ENOENT) { // it has been closed
				return fmt.Errorf("abort a UDP socket: %w", err)
			}
		}
	}
	return nil
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
func serves(s *model.State, service, backend netip.AddrPort) bool {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := model.Key{Addr: service.Addr(), Port: service.Port(), Protocol: model.UDP, Scope: scope}
		for _, b := range s.Pools[s.Frontends[key].Pool].Backends {
			if b.AddrPort == backend {
				return true
			}
		}
	}
	return false
}

// diagSocket is a connected UDP socket.
type diagSocket struct {
	family uint8
	id     [diagID]byte // ports, addresses, interface, cookie
}

func (d diagSocket) request() []byte {
	b := make([]byte, diagRequest)
	b[0], b[1] = d.family, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], stateConnected)
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

func listSockets(conn *netlink.Conn, family uint8) ([]diagSocket, error) {
	messages, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.SOCK_DIAG_BY_FAMILY, Flags: netlink.Request | netlink.Dump},
		Data:   diagSocket{family: family}.request(),
	})
	if err != nil {
		return nil, err
	}
	var sockets []diagSocket
	for _, m := range messages {
		if len(m.Data) >= diagMessage {
			sockets = append(sockets, diagSocket{m.Data[0], [diagID]byte(m.Data[diagMessageID:])})
		}
	}
	return sockets, nil
}

func (d diagSocket) cookie() uint64 { return binary.NativeEndian.Uint64(d.id[40:]) }

func (d diagSocket) peer() netip.AddrPort {
	port := binary.BigEndian.Uint16(d.id[2:])
	if d.family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(d.id[20:])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(d.id[20:])).Unmap(), port)
}
