package userspace

import (
	"errors"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/model"
)

// connect opens a socket that asks a backend, as the client unless that is to be hidden.
func (p *proxy) connect(c relay.Call, b model.Backend, setups ...socket.Setup) (*relay.Socket, error) {
	if p.way == ByNAT || c.Protocol() == model.SCTP {
		if c.Protocol() == model.TCP && c.Hidden(b) { // the kernel may choose the port when it knows the backend
			setups = append(setups, socket.LatePort)
		}
		return p.connectOwn(c, b, setups...)
	}
	var conn *socket.Conn
	var err error
	switch {
	case c.Protocol() == model.UDP && c.Hidden(b):
		conn, err = p.Connect(c, b, socket.Transparent)
	case c.Protocol() == model.UDP:
		conn, err = p.connectAs(c, b)
	case c.Hidden(b):
		conn, err = p.Connect(c, b, append(setups, socket.Transparent, socket.LatePort)...)
	default:
		as, from := socket.Bind(netip.AddrPortFrom(c.Client().Addr(), 0)), socket.FromPort(c.Client().Port())
		conn, err = p.Connect(c, b, append(setups, socket.Transparent, socket.LatePort, from, as)...)
		if errors.Is(err, unix.EADDRNOTAVAIL) { // the client has come from there to another destination with this backend
			conn, err = p.Connect(c, b, append(setups, socket.Transparent, socket.LatePort, as)...)
		}
	}
	return &relay.Socket{Conn: conn}, err
}

// connectAs opens a flow as a client. If it can, it takes a port that the kernel gives to no socket, neither of the
// client, if that is like this machine. If the client asks the same backend by another plane, the answer goes to its
// own port. The kernel does not forward a packet for a socket of the node (udp_v4_early_demux and ip_forward).
func (p *proxy) connectAs(c relay.Call, b model.Backend) (*socket.Conn, error) {
	const tries = 16
	as := func(port uint16) socket.Setup { return socket.Bind(netip.AddrPortFrom(c.Client().Addr(), port)) }
	if n := len(p.spare); n > 0 {
		for i, begin := 0, rand.IntN(n); i < min(tries, n); i++ {
			s, err := p.Connect(c, b, socket.Transparent, as(p.spare[(begin+i)%n]))
			if errors.Is(err, unix.EADDRINUSE) {
				continue
			}
			if !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) { // SELinux may allow any port, but none by number
				return s, err
			}
			break
		}
	}
	return p.Connect(c, b, socket.Transparent, as(0))
}
