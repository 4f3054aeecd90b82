package userspace

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/localport"
	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// proxy is the process's side of the plane: the sockets to which the kernel's rules lead, and what is relayed.
type proxy struct {
	*relay.Proxy
	way       Redirect
	sockets   namespace.Namespace
	entrances []*entrance // of both families
	sourceNAT *sourceNAT  // of what connects from the own address
	tracking  *tracking   // for new flows
	origins   *tracking   // for datagrams that come, which do not wait for new flows
	listeners *listeners  // nil: there are rules
	spare     []uint16    // ports for flows, see connectAs
}

func newProxy(o Options, sockets namespace.Namespace, log *slog.Logger) *proxy {
	p := &proxy{way: o.Redirect, sockets: sockets}
	options := relay.Options{
		DialTimeout: o.DialTimeout, Dials: o.Dials, IdleTimeout: o.IdleTimeout, HalfClosedTimeout: o.HalfClosedTimeout,
		FlowTimeout: o.FlowTimeout, StreamTimeout: o.StreamTimeout,
		MaxConnections: o.MaxConnections, MaxFlows: o.MaxFlows, Extra: extraFiles(),
		SideBySide: o.Redirect == ByNAT, Original: p.original,
		Unserved: unserved(log),
	}
	if o.Redirect == ByTPROXY || o.Redirect == ByNAT {
		options.Connect = p.connect
	}
	if o.Redirect == ByTPROXY { // what cannot be read leaves the choice to the kernel
		_ = sockets.Do(func() (err error) {
			p.spare, err = localport.Above()
			return err
		})
	}
	p.Proxy = relay.New(options, sockets)
	return p
}

// original is where a datagram was going.
func (p *proxy) original(client, own netip.AddrPort) (netip.AddrPort, error) {
	return p.origins.original(model.UDP, client, own)
}

// firstPort is that of the first origin; the others follow. They are outside the range from which the kernel
// takes ports by itself, and the same in each process, so that the next one finds rules that fit.
const firstPort = 17985

// ask opens what asks the kernel of connections. The caller is in the right namespace.
func (p *proxy) ask() (err error) {
	if p.sourceNAT.conn, err = nfnetlink.Dial(); err != nil {
		return err
	}
	if p.tracking, err = openTracking(); err != nil {
		return err
	}
	p.origins, err = openTracking()
	return err
}

// listenIn opens all sockets of one family, by its number. The caller is in the right namespace.
func (p *proxy) listenIn(family int) (at listening, err error) {
	loopback := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}[family]
	if at.redirectAll = p.way != ByTPROXY; !at.redirectAll {
		if at.ports, err = p.listen(loopback, false); err != nil {
			return at, err
		}
	}
	at.redirectPorts, err = p.listen(ownAddress(loopback.Is6()), true)
	return at, err
}

// entrance is the sockets to which what comes from one origin is led, at one port.
type entrance struct {
	origin     origin
	redirected bool // by translation of addresses; else by TPROXY
	tcp        *socket.Conn
	udp        *net.UDPConn
	sctp       *socket.Conn // nil: not yet
}

func openEntrance(o origin, a netip.AddrPort, redirected bool) (*entrance, error) {
	setups := []socket.Setup{socket.Transparent, socket.OriginalDestination}
	if redirected {
		setups = []socket.Setup{socket.Free}
	}
	tcp, err := socket.ListenTCP(a, setups[0])
	if err != nil {
		return nil, err
	}
	udp, err := socket.ListenUDP(tcp.LocalAddr(), setups...)
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	socket.ReceiveMuch(udp)
	return &entrance{origin: o, redirected: redirected, tcp: tcp, udp: udp}, nil
}

func (e *entrance) close() {
	e.tcp.Close()
	e.udp.Close()
	if e.sctp != nil {
		e.sctp.Close()
	}
}

// listen opens the sockets at an address, all or none, and serves them. The caller is in the right namespace.
func (p *proxy) listen(a netip.Addr, redirected bool) (at ports, err error) {
	var all []*entrance
	for o := range numOrigins {
		e, err := openEntrance(o, netip.AddrPortFrom(a, firstPort+uint16(o)), redirected)
		if errors.Is(err, unix.EADDRINUSE) {
			e, err = openEntrance(o, netip.AddrPortFrom(a, 0), redirected)
		}
		if err != nil {
			for _, e := range all {
				e.close()
			}
			return ports{}, err
		}
		all = append(all, e)
		at[o] = e.tcp.LocalAddr().Port()
	}
	for _, e := range all {
		p.Accept(e.tcp, model.TCP, e.accepted)
		p.Receive(e.udp, e.datagrams())
	}
	p.entrances = append(p.entrances, all...)
	return at, nil
}

// listenSCTP has all entrances to which is redirected take SCTP as well.
func (p *proxy) listenSCTP() error {
	for _, e := range p.entrances {
		if e.sctp != nil || !e.redirected {
			continue
		}
		l, err := relay.ListenSCTP(e.tcp.LocalAddr(), socket.Free)
		if err != nil {
			return err
		}
		e.sctp = l
		p.Accept(l, model.SCTP, e.accepted)
	}
	return nil
}

// packet is the first one of a client from an origin.
func (o origin) packet() relay.Packet {
	return relay.Packet{Internal: o != elsewhere, Pod: o == fromPod}
}

// accepted implements relay.Locator.
func (e *entrance) accepted(fd int, client netip.AddrPort) (at relay.Packet, err error) {
	at = e.origin.packet()
	at.Client = client
	if e.redirected {
		at.Destination, err = originalOf(fd, client.Addr().Is6())
		return at, err
	}
	to, err := unix.Getsockname(fd)
	at.Destination = socket.AddrPort(to)
	return at, os.NewSyscallError("getsockname", err)
}

// datagrams tell where they were going, or are answered from where they have come, as the kernel knows.
func (e *entrance) datagrams() relay.DatagramLocator {
	from := &relay.Answers{UDPConn: e.udp, At: e.tcp.LocalAddr(), Redirected: true}
	return func(client netip.AddrPort, control []byte) (at relay.Packet, ok bool) {
		at = e.origin.packet()
		at.Client = client
		if e.redirected {
			at.From = from
			return at, true
		}
		at.Destination, ok = destination(control)
		return at, ok
	}
}

// destination is where a datagram was going.
func destination(oob []byte) (netip.AddrPort, bool) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for i := range messages {
		if to, err := unix.ParseOrigDstAddr(&messages[i]); err == nil {
			return socket.AddrPort(to), true
		}
	}
	return netip.AddrPort{}, false
}

// close ends all connections and flows, and returns when that is done.
func (p *proxy) close() {
	for _, e := range p.entrances {
		e.close()
	}
	if p.listeners != nil {
		p.listeners.closeAll()
	}
	p.Close()
	p.sourceNAT.close()
	p.tracking.close()
	p.origins.close()
}
