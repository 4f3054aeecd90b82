package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// A socket of UDP may have connected to a Service's address before the programs were in force, or before there was that
// Service. It goes on to send there, and no hook sees it. A pod's packets are served at its device; those of the node
// itself arrive at none. The plane that served the socket before may go on for a while, to a backend that is still one
// (see ServedBy). Else this plane aborts the socket as it does when a backend has left: its owner gets an error, and
// connects anew. A socket that connected a moment ago may have sent nothing yet. So the second look decides.
//
//	Sync, new Services ─► sock_diag: whose peer is a row's address? ─► served? ─ no ─► seen before? ─ yes ─► destroy
//	                                                                  yes ─┐           no ─┐
//	                                                 Audit looks again ◄───┴───────────────┘

const (
	strayPause    = time.Second // after which Audit looks again, at first
	maxStrayPause = 30 * time.Second
)

// UDPFlow is what a connected socket sends.
type UDPFlow struct{ From, To netip.AddrPort }

// strays say when to look for such sockets.
type strays struct {
	servedBy func(UDPFlow) (netip.AddrPort, error)
	any      bool            // there may be some
	seen     map[uint64]bool // cookies of those that no plane served at the last look
	pacer
}

// soon has the next Audit look.
func (w *strays) soon() { w.any, w.pacer = true, pacer{} }

// auditStrays looks if it is time.
func (p *Plane) auditStrays(s *model.State) error {
	if !p.strays.any || !p.strays.due() {
		return nil
	}
	return p.releaseStrays(s)
}

// releaseStrays aborts the node's sockets that no plane serves.
func (p *Plane) releaseStrays(s *model.State) error {
	if p.serve != TC || p.cannotRelease {
		return nil
	}
	spaces, err := namespaces()
	if err != nil {
		return err
	}
	left, seen := 0, p.strays.seen
	p.strays.seen = map[uint64]bool{}
	for _, ns := range spaces {
		if namespaceName(ns) == p.node {
			left, err = p.releaseStraysIn(ns, s, seen)
		}
		ns.Close()
	}
	p.strays.any = left > 0 || err != nil
	p.strays.wait(strayPause, maxStrayPause)
	return err
}

// releaseStraysIn returns how many stay: another plane serves them, or they are not among those seen before.
func (p *Plane) releaseStraysIn(ns *os.File, s *model.State, seen map[uint64]bool) (left int, err error) {
	conn, err := openDiag(ns)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	found, err := p.findStrays(conn, s)
	if err != nil {
		return 0, p.withoutDiag(err)
	}
	for _, socket := range found {
		to := socket.peer()
		backend, err := p.strays.serverOf(UDPFlow{socket.local(), to})
		if err != nil {
			return len(found), err
		}
		if backend == to || serves(s, model.UDP, to, backend) {
			left++
			continue
		}
		if !seen[socket.cookie()] {
			p.strays.seen[socket.cookie()] = true
			left++
			continue
		}
		if err := socket.destroy(conn); err != nil && !errors.Is(err, unix.ENOENT) { // it has been closed
			return len(found), p.withoutDiag(fmt.Errorf("abort a socket of UDP: %w", err))
		}
	}
	return left, nil
}

func (p *Plane) findStrays(conn *netlink.Conn, s *model.State) (found []diagSocket, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		sockets, err := listSockets(conn, diagSocket{family: family, protocol: model.UDP, states: stateConnected})
		if err != nil {
			return nil, fmt.Errorf("list sockets of UDP: %w", err)
		}
		for _, socket := range sockets {
			if _, known, err := p.service(socket); err != nil {
				return nil, err
			} else if !known && p.isStray(s, socket.peer()) {
				found = append(found, socket)
			}
		}
	}
	return found, nil
}

// serverOf is not valid if no plane serves the flow.
func (w *strays) serverOf(f UDPFlow) (netip.AddrPort, error) {
	if w.servedBy == nil {
		return netip.AddrPort{}, nil
	}
	return w.servedBy(f)
}

// isStray reports whether connect() would have translated an address.
func (p *Plane) isStray(s *model.State, peer netip.AddrPort) bool {
	key, f, ok := forNode(s, model.Key{Addr: peer.Addr(), Port: peer.Port(), Protocol: model.UDP})
	return ok && f.Verdict == model.Forward && !p.left.isLeft(key, f) &&
		p.left.node.flags(key, f)&objectsFlagsNODE_DENIED == 0
}

// setsUDP reports whether a change has frontends of UDP.
func setsUDP(c model.Change) bool {
	for key := range c.Frontends.Set.All() {
		if key.Protocol == model.UDP {
			return true
		}
	}
	return false
}
